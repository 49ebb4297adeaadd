"""host_setup.py: the code is unpacked and its environment made, once, and nothing half done is taken for done."""

import errno
import fcntl
import json
import os
import pathlib
import shutil

import host_setup
import pytest

from tests.launch.pod import LAUNCH

pytestmark = pytest.mark.standard


def test_unpack(host):
    assert host.unpack(host.code, b"")["fresh"] is False
    archive, code = host.pack({"x": b"1"})
    for torn in (archive[:-5], b""):
        assert "arrived damaged" in host.ask("unpack", code, stdin=torn, code=1)["error"]
    outside, other = host.pack({"../x": b"1"})
    assert "does not belong" in host.ask("unpack", other, stdin=outside, code=1)["error"]
    assert not {code, other} & {*host.ask("preflight")["code"]}
    assert host.unpack(code, archive) == {"code": code, "fresh": True}
    assert (host.root / "code" / code / "x").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("links", "named"),
    [
        ({"etc": "/etc"}, "etc"),
        ({"a/up": "../../x"}, "a/up"),
        ({"a/b/top": "../..", "out": "a/b/top/.."}, "out"),  # inside by its words, outside by where they lead
        ({"a/b/top": "/tmp", "a/b/top/mlm-through-a-link": None}, "a/b/top"),
    ],
)
def test_links_stay_inside(host, links, named):
    files = {name: b"" for name, target in links.items() if target is None}
    archive, code = host.pack(files, {name: target for name, target in links.items() if target})
    error = host.ask("unpack", code, stdin=archive, code=1)["error"]
    assert f"holds what does not belong into it: '{named}' " in error
    assert not (host.root / "code" / code).exists() and not pathlib.Path("/tmp/mlm-through-a-link").exists()


def test_a_link_inside_is_kept(host):
    archive, code = host.pack({"a/file": b""}, {"z/link": "../a/file"})
    assert host.unpack(code, archive)["fresh"] is True
    assert (host.root / "code" / code / "z" / "link").resolve() == (host.root / "code" / code / "a" / "file").resolve()


def test_packages_are_installed_once_per_hash(host):
    assert host.ask("install", host.code)["fresh"] is False
    other = host.ask("install", host.code, "--extra=jax[tpu]==0.10.2")
    assert other["fresh"] is True and other["requirements"] != host.requirements
    assert host.ask("preflight", "--code", host.code)["installed"] == other["requirements"]
    (host.root / "venv" / other["requirements"] / "python.json").unlink()  # as if it had been interrupted
    assert host.ask("preflight", "--code", host.code)["installed"] is None
    assert host.ask("install", host.code, "--extra=jax[tpu]==0.10.2")["fresh"] is True


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ("pip", "pip can't install uv==0.13.8, which makes the environment (python3 is 3.10.12): sudo apt-get install"),
        ("venv", "uv can't make an environment with Python 3.12 (python3 is 3.10.12): install Python 3.11, 3.12 or 3."),
        ("sync", "no environment was made (installing requirements.txt into "),
    ],
)
def test_a_host_with_too_old_a_python_and_no_way_to_another(host, tmp_path, refused, said):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "cat", "cksum", "cp", "cut", "mkdir", "rm", "sed"):
        (programs / name).symlink_to(shutil.which(name))
    program = programs / "python3"
    program.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -V ] && echo 3.10.12 && exit\n'
        '[ "$1" = -c ] && echo 3.10 && exit\n'
        f'[ "$2" = pip ] && [ {refused} != pip ] && exit\n'
        f'for last; do :; done; [ "$3" = venv ] && [ {refused} != venv ] && mkdir -p "$last/bin" &&\n'
        '  cp "$0" "$last/bin/python" && cp "$0" "$last/bin/uv" && exit\n'
        "printf 'error: no network\\n  cause: dns error\\n' >&2; exit 2\n"
    )
    program.chmod(0o755)
    script = (LAUNCH / "environment.sh").read_bytes()
    archive, code = host.pack({"requirements.txt": b"six", "launch/environment.sh": script})
    host.unpack(code, archive)
    for _ in range(2):  # what is half made is not taken for made
        error = host.ask("install", code, "--python=", code=1, PATH=str(programs))["error"]
        assert said in error and "error: no network; cause: dns error" in error
        assert refused == "sync" or error.endswith("name one that has the packages: python in pod.toml)")
    assert host.ask("preflight", "--code", code)["installed"] is None


def test_an_environment_of_the_code_s_own_script(host):
    script = b'[ -n "${MLM_FIND:-}" ] && echo 3.12 || { cat "$MLM_EXTRAS" >"$MLM_VENV/made"; }'
    archive, code = host.pack({"requirements.txt": b"six", "launch/environment.sh": script})
    host.unpack(code, archive)
    found = host.ask("install", code, "--python=", "--extra=a", "--extra=b>1")
    assert found["fresh"] is True and found["python"] == "3.12"
    folder = host.root / "venv" / found["requirements"]
    assert (folder / "made").read_text() == "a\nb>1"
    assert json.loads((folder / "python.json").read_text()) == {"python": f"{folder}/bin/python"}
    assert host.ask("install", code, "--python=", "--extra=a", "--extra=b>1") == {**found, "fresh": False}
    assert host.ask("install", code, "--python=")["requirements"] != found["requirements"]


def test_a_folder_without_locks_is_named(monkeypatch, tmp_path):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    named = pytest.raises(host_setup.HostError, match=rf"{tmp_path}/run can't be locked \(No locks available\)")
    with named, host_setup.alone(tmp_path / "run" / ".lock"):
        pass
