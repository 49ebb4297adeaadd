"""pod.toml: what is right, what is refused and in which words, and what an accelerator type says."""

import json
import pathlib

import pytest
from pods import settings
from pods.backend import SettingsError

EXAMPLE = pathlib.Path(settings.__file__).parents[1] / "pod.toml.example"
GOOD = {"name": "p", "project": "q", "zone": "us-central2-b", "accelerator_type": "v4-32"}


@pytest.fixture
def load(tmp_path):
    def written(text: str | dict) -> settings.Settings:
        if isinstance(text, dict):
            text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in text.items())
        (tmp_path / "pod.toml").write_text(text)
        return settings.load(str(tmp_path / "pod.toml"))

    return written


def test_what_the_name_of_an_accelerator_says():
    for name, *expected in (
        ("v3-256", 128, 32, "tpu-ubuntu2204-base"),
        ("v4-8", 4, 1, "tpu-ubuntu2204-base"),
        ("v5p-16", 8, 2, "v2-alpha-tpuv5"),
        ("v5litepod-8", 8, 1, "v2-alpha-tpuv5-lite"),
        ("v5litepod-16", 16, 4, "v2-alpha-tpuv5-lite"),
        ("v6e-8", 8, 1, "v2-alpha-tpuv6e"),
    ):
        found = settings.Settings(accelerator_type=name)
        assert [found.chips, found.host_count, found.runtime] == expected


def test_a_file(load):
    # the mark of editors on Windows
    found = load("\ufeff" + "\n".join(f"{key} = '{value}'" for key, value in GOOD.items()))
    assert (found.spot, found.host_count, found.create_flags) == (False, 4, ())
    found = load(GOOD | {"price": 3, "spot": True, "create_flags": ["--reserved"]})
    assert (found.spot, found.dollars_per_hour, found.create_flags) == (True, 48, ("--reserved",))


BAD = {
    "name": ["My_Pod", "--spot"],
    "accelerator_type": ["v9-8", "tpu7x-8", "v4-0", "v4-7", "v4-36x", "v6e-9"],
    "spot": ["yes"], "price": ["cheap", -1, True], "bucket": ["my-bucket"], "python": ["python3"],
    "track": ["beta"], "zone": [7], "create_flags": ["--reserved", ["--spot"], ["--labels=a=b"]],
    "ssh_flags": [["--worker=all"], [1]],
}  # fmt: skip


@pytest.mark.parametrize("key", BAD)
def test_bad_values_name_file_and_key(load, key):
    for value in BAD[key]:
        with pytest.raises(SettingsError, match=rf"/pod\.toml: {key}") as error:
            load({**GOOD, key: value})
        assert str(value[0] if isinstance(value, list) else value) in str(error.value)


def test_files_that_are_none(load):
    for text, words in (
        ("name = my pod", "pod.toml is no TOML: .*line 1"),
        ({"name": "p", "project": "q"}, "pod.toml has no zone"),
        ({**GOOD, "typo": 1}, "pod.toml: typo is no key"),
    ):
        with pytest.raises(SettingsError, match=words):
            load(text)
    with pytest.raises(SettingsError, match=r"nowhere.toml: No such file.*pod.toml.example"):
        settings.load("nowhere.toml")


def test_the_example_has_every_key():
    """test_real_gcloud.py gives gcloud each of its lines, those that are commented out as well."""
    assert settings.load(str(EXAMPLE)).host_count == 4
    lines = EXAMPLE.read_text().splitlines()
    assert {line.removeprefix("# ").partition(" ")[0] for line in lines} >= {
        *vars(settings.Settings())
    }
