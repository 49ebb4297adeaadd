"""pod.toml and its flags: what is right, what is refused and in which words, and what an accelerator type says."""

import argparse
import pathlib
import shutil
import tomllib

import pytest
from pods import accelerators, settings
from pods.errors import SettingsError

from tests.launch.fake_gcloud import synopsis

GOOD = {"name": "p", "project": "q", "zone": "us-central2-b", "accelerator_type": "v4-32"}


def write(tmp_path, text: str) -> str:
    path = tmp_path / "pod.toml"
    path.write_text(text)
    return str(path)


def toml(values: dict) -> str:
    return "".join(
        f"{name} = {str(value).lower() if value in (True, False) else repr(value)}\n" for name, value in values.items()
    )


@pytest.mark.parametrize(
    ("name", "chips", "hosts"),
    [
        ("v2-8", 4, 1),
        ("v2-32", 16, 4),
        ("v3-8", 4, 1),
        ("v3-256", 128, 32),
        ("v4-8", 4, 1),
        ("v4-32", 16, 4),
        ("v5p-8", 4, 1),
        ("v5p-16", 8, 2),
        ("v5p-512", 256, 64),
        ("v5litepod-1", 1, 1),
        ("v5litepod-8", 8, 1),
        ("v5litepod-16", 16, 4),
        ("v6e-8", 8, 1),
        ("v6e-256", 256, 64),
    ],
)
def test_chips_and_hosts(name, chips, hosts):
    found = accelerators.parse(name)
    assert (found.chips, found.hosts) == (chips, hosts)


@pytest.mark.parametrize("name", ["v4", "v4-", "v4-0", "v4-7", "v4-36x", "v9-8", "v5e-16", "v6e-9", "--spot", "v4-8 "])
def test_types_that_do_not_exist(name):
    with pytest.raises(ValueError, match=r"such as v4-32|count|fill"):
        accelerators.parse(name)


def test_file_and_flags(tmp_path):
    file = write(tmp_path, "\ufeff" + toml({**GOOD, "price": 3, "spot": True}))  # the mark of editors on Windows
    found = settings.load(file, {})
    assert (found.price, found.spot, found.queued, found.root, found.host_count) == (3, True, False, "~/.mlm-pod", 4)
    assert found.dollars_per_hour == 48
    assert settings.load(file, {"spot": False, "accelerator_type": "v6e-8"}).host_count == 1
    assert settings.load(file, {"hosts": 2}).host_count == 2
    assert settings.load("", GOOD).accelerator_type == "v4-32"


def test_every_key_is_a_flag(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    settings.add_flags(parser)
    monkeypatch.chdir(tmp_path)
    words = ["--name=n", "--project=q", "--zone=z", "--accelerator-type=v5p-16", "--runtime-version=r", "--spot"]
    words += ["--queued", "--network=w", "--bucket=gs://bbb/c", "--price=1.5", "--root=/r", "--hosts=2"]
    words += ["--python=/usr/bin/python3", "--user=u", "--track=alpha", "--create-flags=--reserved"]
    words += ["--create-flags=--labels=a=b,c=d", "--ssh-flags=--internal-ip"]
    found = settings.from_arguments(parser.parse_args(words))
    default = settings.Settings()
    assert [name for name in settings.FIELDS if getattr(found, name) == getattr(default, name)] == []
    assert found.create_flags == ("--reserved", "--labels=a=b,c=d") and found.ssh_flags == ("--internal-ip",)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("name", "My_Pod", "name is 'My_Pod'; it must be small letters"),
        ("name", "--spot", "name is '--spot'"),
        ("project", "-x", "project is '-x'; it must be one plain word"),
        ("zone", "a b", "zone is 'a b'"),
        ("accelerator_type", "v9-8", "accelerator_type: 'v9-8' is no accelerator type"),
        (
            "accelerator_type",
            "tpu7x-8",
            "on GKE, use the JobSet in launch/gke.yaml; on Compute Engine, start `python -m",
        ),
        ("spot", "yes", "spot is 'yes'; it must be true or false"),
        ("price", "cheap", "price is 'cheap'; it must be a number"),
        ("price", -1, "price is -1; it must be from 0"),
        ("price", float("nan"), "price is nan"),
        ("hosts", 5000, "hosts is 5000; it must be from 0 to 4096"),
        ("hosts", True, "hosts is True; it must be a whole number"),
        ("hosts", 1.5, "hosts is 1.5; it must be a whole number"),
        ("bucket", "my-bucket", "bucket is 'my-bucket'; it must begin with gs://"),
        ("user", "me@x", "user is 'me@x'; it must be one plain word"),
        ("track", "beta", 'track is \'beta\'; it must be "alpha" or "": gcloud has no other track for TPU VMs'),
        ("create_flags", "--reserved", "create_flags is '--reserved'; it must be a list of flags"),
        ("create_flags", ["reserved"], "create_flags is ['reserved']; it must be a list of flags, such as"),
        ("create_flags", ["--spot"], "create_flags: --spot is the launcher's to set: use the keys of pod.toml"),
        ("ssh_flags", ["-L 80:h:80"], "ssh_flags is ['-L 80:h:80']; it must be a list of flags"),
        ("ssh_flags", ["--worker=all"], "ssh_flags: --worker=all is the launcher's to set"),
        ("root", "", "root is ''"),
        ("root", "~/../x", "root is '~/../x'"),
        ("python", "python3", "python is 'python3'; it must be an absolute path"),
        ("typo", 1, "typo is no key of it; the keys are name, project"),
    ],
)
def test_bad_values_name_file_and_key(tmp_path, key, value, words):
    with pytest.raises(SettingsError) as error:
        settings.load(write(tmp_path, toml({**GOOD, key: value})), {})
    assert words in str(error.value) and str(error.value).startswith(f"{tmp_path}/pod.toml") and error.value.code == 2
    if key != "typo":
        with pytest.raises(SettingsError, match=f"^--{key.replace('_', '-')}") as error:
            settings.load("", {**GOOD, key: value})


def test_files_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"there is no pod.toml, and no --name: copy launch/pod.toml.example"):
        settings.load("", {})
    with pytest.raises(SettingsError, match=r"nowhere.toml can't be read: No such file"):
        settings.load("nowhere.toml", GOOD)
    with pytest.raises(SettingsError, match=r"pod.toml is no TOML: .*line 1"):
        settings.load(write(tmp_path, "name = my pod"), {})
    with pytest.raises(SettingsError, match=r"pod.toml has no zone"):
        settings.load(write(tmp_path, toml({key: GOOD[key] for key in ("name", "project")})), {})


def test_the_example_is_right_and_names_every_key():
    path = pathlib.Path(settings.__file__).parents[1] / "pod.toml.example"
    found = settings.load(str(path), {})
    assert found.accelerator.chips == 16 and found.host_count == 4
    keys = tomllib.loads(path.read_text()).keys()
    commented = {line[2:].partition(" ")[0] for line in path.read_text().splitlines() if line.startswith("# ")}
    assert set(settings.FIELDS) <= set(keys) | commented


CALLS = {
    "create_flags": "queued-resources create q --node-id=n --accelerator-type=a --runtime-version=v",
    "ssh_flags": "tpu-vm ssh n",
}


def test_every_line_of_the_example_is_right(tmp_path):
    """Those that are commented out as well: what they hand to gcloud is what it takes, alpha's of alpha alone."""
    lines = (pathlib.Path(settings.__file__).parents[1] / "pod.toml.example").read_text().splitlines()
    keys, seen = [line for line in lines if not line.startswith("#")], set()
    for line in lines:
        name, _, value = line.removeprefix("# ").partition(" = ")
        if name not in settings.FIELDS:
            continue
        others = [one for one in keys if not one.startswith(f"{name} ")]
        needs = ['track = "alpha"'] if "# alpha" in value else []
        file = write(tmp_path, "\n".join([*others, *needs, line.removeprefix("# ")]))
        found = getattr(settings.load(file, {}), name)
        for flag in found if name in CALLS else ():
            seen.add(flag.partition("=")[0])
            call = ["compute", "tpus", *CALLS[name].split(), "--project=p", "--zone=z", flag]
            assert synopsis.parse(["alpha", *call]).flags
            if "# alpha" not in value:
                assert synopsis.parse(call).flags
            else:
                with pytest.raises(synopsis.RefusedError, match="gcloud alpha compute tpus"):
                    synopsis.parse(call)
    assert len(seen) >= 14


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('ssh_flags = ["--tunnel-through-iap"]', ["ssh_flags", "--tunnel-through-iap", 'track = "alpha"']),
        ('create_flags = ["--reservation=r"]', ["create_flags", "--reservation", 'track = "alpha"']),
        ('create_flags = ["--valid-until-duration=6h"]', ["--valid-until-duration", "queued = true"]),
        ('create_flags = ["--max-run-duration=4h"]', ['track = "alpha" and queued = true']),
        ('queued = true\ncreate_flags = ["--preemptible"]', ["--preemptible", "queued = false"]),
    ],
)
def test_flags_that_gcloud_takes_elsewhere_alone(tmp_path, text, words):
    file = write(tmp_path, f"{toml(GOOD)}{text}\n")
    with pytest.raises(SettingsError) as raised:
        settings.load(file, {})
    assert [word for word in [*words, "pod.toml"] if word not in str(raised.value)] == []
    settings.load(file, {"track": "alpha", "queued": "--preemptible" not in text})


GCLOUD = pathlib.Path(shutil.which("gcloud") or "/no/gcloud").resolve()
COMPLETIONS = GCLOUD.parents[1] / "data/cli/gcloud_completions.py"


@pytest.mark.parametrize("file", [COMPLETIONS], ids=["as gcloud has it" if COMPLETIONS.is_file() else "no gcloud here"])
def test_the_flags_that_gcloud_takes_elsewhere_are_those_of_its_own_table(file):
    assert set(settings.QUEUED).isdisjoint(settings.NOT_QUEUED)
    if not file.is_file():
        return
    tree: dict = {}
    exec(file.read_text(), tree)

    def flags(*words: str) -> set[str]:
        node = tree["STATIC_COMPLETION_CLI_TREE"]
        for word in words:
            node = node["commands"][word]
        return set(node["flags"])

    create, queue, ssh = ("tpu-vm", "create"), ("queued-resources", "create"), ("tpu-vm", "ssh")
    place = ("compute", "tpus")
    alpha = [flags("alpha", *place, *command) - flags(*place, *command) for command in (create, queue, ssh)]
    assert set(settings.ALPHA) == set().union(*alpha) - {"--boot-disk"}  # which is for everybody by now
    queued = flags("alpha", *place, *queue) - flags("alpha", *place, *create) - set(settings.OWN_FLAGS)
    assert set(settings.QUEUED) == queued
    assert set(settings.NOT_QUEUED) == flags(*place, *create) - flags(*place, *queue) - set(settings.OWN_FLAGS)
