"""pod.toml and its flags: what is right, what is refused and in which words, and what an accelerator type says."""

import argparse
import pathlib

import pytest
from pods import settings
from pods.backend import SettingsError

EXAMPLE = pathlib.Path(settings.__file__).parents[1] / "pod.toml.example"
GOOD = {"name": "p", "project": "q", "zone": "us-central2-b", "accelerator_type": "v4-32"}


def write(tmp_path, text: str) -> str:
    path = tmp_path / "pod.toml"
    path.write_text(text)
    return str(path)


def toml(values: dict) -> str:
    return "".join(
        f"{name} = {str(value).lower() if value in (True, False) else repr(value)}\n"
        for name, value in values.items()
    )


def test_what_the_name_of_an_accelerator_says():
    sizes = {
        "v3-256": (128, 32),
        "v4-8": (4, 1),
        "v5p-16": (8, 2),
        "v5litepod-8": (8, 1),
        "v5litepod-16": (16, 4),
    }
    found = {
        name: settings.load("", GOOD | {"accelerator_type": name}) for name in (*sizes, "v6e-8")
    }
    assert {name: (found[name].chips, found[name].host_count) for name in sizes} == sizes
    runtimes = [found[name].runtime for name in ("v4-8", "v5litepod-16", "v5p-16", "v6e-8")]
    assert runtimes == [
        "tpu-ubuntu2204-base",
        "v2-alpha-tpuv5-lite",
        "v2-alpha-tpuv5",
        "v2-alpha-tpuv6e",
    ]


def test_file_and_flags(tmp_path, monkeypatch):
    # the mark of editors on Windows
    file = write(tmp_path, "\ufeff" + toml({**GOOD, "price": 3, "spot": True}))
    found = settings.load(file, {})
    assert (found.price, found.spot, found.queued, found.root, found.host_count) == (
        3,
        True,
        False,
        "~/.mlm-pod",
        4,
    )
    assert found.dollars_per_hour == 48
    assert settings.load(file, {"spot": False, "accelerator_type": "v6e-8"}).host_count == 1
    assert settings.load(file, {"hosts": 2}).host_count == 2
    assert settings.load("", GOOD).accelerator_type == "v4-32"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.load("~/pod.toml", {}) == found, "no shell expands it in --pod=~/..."


def test_every_key_is_a_flag(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    settings.add_flags(parser)
    monkeypatch.chdir(tmp_path)
    words = [
        "--name=n",
        "--project=q",
        "--zone=z",
        "--accelerator-type=v5p-16",
        "--runtime-version=r",
        "--spot",
    ]
    words += [
        "--queued",
        "--network=w",
        "--bucket=gs://bbb/c",
        "--price=1.5",
        "--root=/r",
        "--hosts=2",
    ]
    words += ["--python=/usr/bin/python3", "--user=u", "--track=alpha", "--create-flags=--reserved"]
    words += ["--create-flags=--labels=a=b,c=d", "--ssh-flags=--internal-ip"]
    found = settings.from_arguments(parser.parse_args(words))
    default = settings.Settings()
    assert [
        name for name in settings.FIELDS if getattr(found, name) == getattr(default, name)
    ] == []
    assert found.create_flags == ("--reserved", "--labels=a=b,c=d") and found.ssh_flags == (
        "--internal-ip",
    )


BAD = {
    "name": ["My_Pod", "--spot"], "project": ["-x"], "zone": ["a b"],
    "accelerator_type": ["v9-8", "tpu7x-8", "v4-0", "v4-7", "v4-36x", "v6e-9"],
    "spot": ["yes"], "price": ["cheap", -1, float("nan")], "hosts": [5000, True, 1.5], "bucket": ["my-bucket"],
    "user": ["me@x"], "track": ["beta"], "create_flags": ["--reserved", ["reserved"], ["--spot"]],
    "ssh_flags": [["-L 80:h:80"], ["--worker=all"]], "root": ["", "~/../x"], "python": ["python3"],
}  # fmt: skip


@pytest.mark.parametrize("key", BAD)
def test_bad_values_name_file_and_key(tmp_path, key):
    for value in BAD[key]:
        for file, values, where in (
            (write(tmp_path, toml({**GOOD, key: value})), {}, f"{tmp_path}/pod.toml: {key}"),
            ("", {**GOOD, key: value}, f"--{key.replace('_', '-')}"),
        ):
            with pytest.raises(SettingsError, match=f"^{where}") as error:
                settings.load(file, values)
            assert (
                str(value[0] if isinstance(value, list) else value) in str(error.value)
                and error.value.code == 2
            )


def test_no_argument_of_a_program_holds_a_zero():
    for key, value in {
        "create_flags": ["--x=\0"],
        "python": "/a\0",
        "bucket": "gs://bucket/\0",
    }.items():
        with pytest.raises(SettingsError, match=key.replace("_", "-")):
            settings.load("", {**GOOD, key: value})


def test_files_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, values, words in (
        (None, {}, "no pod.toml, and no --name: copy launch/pod.toml.example"),
        ("name = my pod", {}, "pod.toml is no TOML: .*line 1"),
        (toml({key: GOOD[key] for key in ("name", "project")}), {}, "pod.toml has no zone"),
        (toml({**GOOD, "typo": 1}), {}, "pod.toml: typo is no key"),
        (f"hosts = {'9' * 5000}", {}, "pod.toml is no TOML: Exceeds the limit"),
        (f"create_flags = {'[' * 3000}{']' * 3000}", {}, "pod.toml is no TOML: maximum recursion"),
    ):
        with pytest.raises(SettingsError, match=words):
            settings.load(write(tmp_path, text) if text else "", values)
    with pytest.raises(SettingsError, match=r"nowhere.toml can't be read"):
        settings.load("nowhere.toml", GOOD)


def test_the_example_has_every_key():
    """test_tpu_dry_run.py gives the launcher each of its lines, those that are commented out as well."""
    assert settings.load(str(EXAMPLE), {}).host_count == 4
    lines = EXAMPLE.read_text().splitlines()
    assert {line.removeprefix("# ").partition(" ")[0] for line in lines} >= set(settings.FIELDS)
