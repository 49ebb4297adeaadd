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


def test_unpack(host):
    assert host.unpack(host.code, b"")["fresh"] is False
    archive, code = host.pack({"a/x": b"1"}, {"z/link": "../a/x"})
    for torn in (archive[:-5], b""):
        assert "arrived damaged" in host.ask("unpack", code, stdin=torn, code=1)["error"]
    assert host.ask("preflight")["code"] == [host.code]
    assert host.unpack(code, archive) == {"code": code, "fresh": True}
    folder = host.root / "code" / code
    assert (folder / "a" / "x").read_bytes() == b"1" and (folder / "z" / "link").resolve() == folder / "a" / "x"


@pytest.mark.parametrize(
    ("files", "links", "named"),
    [
        (["../x"], {}, "../x"),
        ([], {"etc": "/etc"}, "etc"),
        ([], {"a/up": "../../x"}, "a/up"),
        ([], {"a/b/top": "../..", "out": "a/b/top/.."}, "out"),  # inside by its words, outside by where they lead
        (["a/b/top/mlm-through-a-link"], {"a/b/top": "/tmp"}, "a/b/top"),
    ],
)
def test_nothing_leaves_the_folder(host, files, links, named):
    archive, code = host.pack(dict.fromkeys(files, b""), links)
    assert f"'{named}' " in host.ask("unpack", code, stdin=archive, code=1)["error"]
    assert not (host.root / "code" / code).exists() and not pathlib.Path("/tmp/mlm-through-a-link").exists()


@pytest.mark.standard
def test_packages_are_installed_once_per_hash(host):
    first = host.ask("install", host.code)
    assert first["fresh"] is True and host.ask("install", host.code)["fresh"] is False
    other = host.ask("install", host.code, "--extra=jax[tpu]==0.10.2")
    assert other["fresh"] is True and other["requirements"] != first["requirements"]
    assert host.ask("preflight", "--code", host.code)["installed"] == other["requirements"]
    (host.root / "venv" / other["requirements"] / "python.json").unlink()  # as if it had been interrupted
    assert host.ask("preflight", "--code", host.code)["installed"] is None
    assert host.ask("install", host.code, "--extra=jax[tpu]==0.10.2")["fresh"] is True


@pytest.mark.standard
@pytest.mark.parametrize("refused", ["pip", "venv", "sync"])
def test_a_host_with_too_old_a_python_and_no_way_to_another(host, tmp_path, refused):
    said = {"pip": "can't install uv==", "venv": "with Python 3.12 (python3 is 3.10.12)", "sync": "requirements.txt"}
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
        assert said[refused] in error and "error: no network; cause: dns error" in error
        assert refused == "sync" or "python in pod.toml" in error
    assert host.ask("preflight", "--code", code)["installed"] is None


@pytest.mark.standard
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
