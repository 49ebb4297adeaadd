"""host_setup.py: the code is unpacked and its environment made, once, and nothing half done is taken for done."""

import errno
import fcntl
import json
import os
import pathlib

import host_setup
import pytest


def test_unpack(host):
    assert host.unpack(host.code, b"")["fresh"] is False
    archive, code = host.pack({"a/x": b"1"}, {"z/link": "../a/x"})
    for torn in (archive[:-5], b""):
        assert "arrived damaged" in host.ask("unpack", code, stdin=torn, code=1)["error"]
    assert (
        not host.ask("preflight", code)["has_code"] and host.ask("preflight", host.code)["has_code"]
    )
    assert host.unpack(code, archive) == {"code": code, "fresh": True}
    folder = host.root / "code" / code
    assert (folder / "a" / "x").read_bytes() == b"1" and (
        folder / "z" / "link"
    ).resolve() == folder / "a" / "x"


@pytest.mark.parametrize(
    ("files", "links", "named"),
    [
        (["../x"], {}, "../x"),
        ([], {"etc": "/etc"}, "etc"),
        ([], {"a/up": "../../x"}, "a/up"),
        # inside by its words, outside by where they lead
        ([], {"a/b/top": "../..", "out": "a/b/top/.."}, "out"),
        (["a/b/top/mlm-through-a-link"], {"a/b/top": "/tmp"}, "a/b/top"),
    ],
)
def test_nothing_leaves_the_folder(host, files, links, named):
    archive, code = host.pack(dict.fromkeys(files, b""), links)
    assert f"'{named}' " in host.ask("unpack", code, stdin=archive, code=1)["error"]
    assert (
        not (host.root / "code" / code).exists()
        and not pathlib.Path("/tmp/mlm-through-a-link").exists()
    )


@pytest.mark.standard
def test_packages_are_installed_once_per_hash(host):
    first = host.ask("install", host.code)
    assert first["fresh"] is True and host.ask("install", host.code)["fresh"] is False
    assert host.ask("preflight", host.code)["packages"] == first["packages"]
    archive, code = host.pack({"requirements.txt": b"six"})
    host.unpack(code, archive)
    assert "packages are not installed" in " ".join(host.ask("preflight", code)["problems"])
    other = host.ask("install", code)
    assert other["fresh"] is True and other["packages"] != first["packages"]
    # as if it had been interrupted
    (host.root / "venv" / other["packages"] / "python.json").unlink()
    assert host.ask("preflight", code)["packages"] is None
    assert host.ask("install", code)["fresh"] is True


@pytest.mark.standard
def test_an_environment_of_the_code_s_own_script(host):
    def with_script(makes: bytes) -> str:
        script = b'[ -n "${MLM_FIND:-}" ] && echo 3.12 && exit; ' + makes
        archive, code = host.pack({"requirements.txt": b"six", "launch/environment.sh": script})
        host.unpack(code, archive)
        return code

    code = with_script(b'mkdir -p "$MLM_VENV/bin"; printf "launch: a\\nb\\n" >&2; exit 2')
    for _ in range(2):  # what is half made is not taken for made
        assert "(a; b)" in host.ask("install", code, "", code=1)["error"]
    assert host.ask("preflight", code)["packages"] is None
    code = with_script(b'touch "$MLM_VENV/made"')
    answer = host.ask("install", code, "")
    assert answer["fresh"] is True and answer["python"] == "3.12"
    folder = host.root / "venv" / answer["packages"]
    assert (folder / "made").exists()
    assert json.loads((folder / "python.json").read_text()) == {"python": f"{folder}/bin/python"}
    assert host.ask("install", code, "") == {**answer, "fresh": False}


def test_a_folder_without_locks_is_named(monkeypatch, tmp_path):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    named = pytest.raises(
        host_setup.HostError, match=rf"{tmp_path}/run can't be locked \(No locks available\)"
    )
    with named, host_setup.alone(tmp_path / "run" / ".lock"):
        pass
