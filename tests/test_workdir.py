"""The lock of a run's folder: where the file system has no locks, and where somebody else's file is in the way."""

import errno
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from mlm import workdir as workdirs
from mlm.errors import InputError
from mlm.paths import UPath
from mlm.workdir import LEASE, LOCK, lock

NONE = [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL]


def fail_with(number: int):
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workdirs, "RENEW", 0.1)
    monkeypatch.setattr(workdirs, "STALE", 2.0)


@pytest.mark.parametrize("number", NONE)
def test_without_locks_one_process_at_a_time(tmp_path, monkeypatch, capsys, number):
    """The holder is alive, and named; its lease lasts as long as it does."""
    quicken(monkeypatch)
    monkeypatch.setattr(fcntl, "flock", fail_with(number))
    with lock(UPath(tmp_path)):
        assert os.strerror(number) in capsys.readouterr().err
        with (
            pytest.raises(InputError, match=rf"{tmp_path}: another process .*process {os.getpid()}"),
            lock(UPath(tmp_path)),
        ):
            pass
    with lock(UPath(tmp_path)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.standard
def test_without_locks_what_a_killed_process_has_left_is_taken_over(tmp_path, monkeypatch):
    """At once on its own host; elsewhere, and where nothing can be read, when it is not renewed."""
    quicken(monkeypatch)
    monkeypatch.setattr(fcntl, "flock", fail_with(errno.ENOSYS))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for host, least in ((workdirs.platform.node(), 0.0), ("another", 2.0), (None, 2.0)):
        left = json.dumps({"host": host, "process": gone.pid, "token": "x", "renewed": "0000000003"}) if host else "{"
        (tmp_path / LEASE).write_text(left)
        begin = time.monotonic()
        with lock(UPath(tmp_path)):
            assert least <= time.monotonic() - begin < least + 5
            time.sleep(0.5)  # some renewals
            assert json.loads((tmp_path / LEASE).read_text())["process"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_without_locks_one_of_several_takes_over(tmp_path):
    """What a slower one has seen, and would delete, is not there any more: the lease of the faster one stays."""
    slow, fast = (workdirs._File(UPath(tmp_path) / LEASE) for _ in range(2))
    seen = slow.create({"host": "gone"})
    fast.delete(seen)
    token = fast.create({"host": "fast"})
    slow.delete(seen)
    assert slow.read()[0] == token and [path.name for path in tmp_path.iterdir()] == [LEASE]
    with pytest.raises(FileExistsError):
        slow.create({"host": "slow"})


def test_without_locks_a_holder_whose_lease_is_taken_ends(tmp_path, monkeypatch, capsys):
    quicken(monkeypatch)
    monkeypatch.setattr(fcntl, "flock", fail_with(errno.ENOLCK))
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    other = json.dumps({"host": "another", "process": 1, "token": "theirs", "renewed": "0000000000"})
    with lock(UPath(tmp_path)):
        (tmp_path / LEASE).write_text(other)
        time.sleep(1)
    assert set(codes) == {2} and str(tmp_path / LEASE) in capsys.readouterr().err
    assert (tmp_path / LEASE).read_text() == other, "the lease of another process is left alone"


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EACCES])
def test_a_lock_that_another_process_holds(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", fail_with(number))
    with pytest.raises(InputError, match=rf"{tmp_path}: another process"), lock(UPath(tmp_path)):
        pass
    assert not (tmp_path / LEASE).exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADF])
def test_a_lock_that_fails(tmp_path, monkeypatch, number):
    """EBADF: of a file that can only be read, on NFS."""
    monkeypatch.setattr(fcntl, "flock", fail_with(number))
    with pytest.raises(InputError, match=rf"{tmp_path}/\.lock: .*{os.strerror(number)}"), lock(UPath(tmp_path)):
        pass


def test_a_lock_that_is_no_file(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(InputError, match=rf"{tmp_path}/\.lock: .*Is a directory"), lock(UPath(tmp_path)):
        pass


OF_OTHERS = """
import os, pathlib, sys
from mlm.errors import InputError
from mlm.paths import UPath
from mlm.workdir import Workdir, lock
if os.geteuid() == 0:  # whom no mode stops
    os.setresuid(12345, 12345, 12345)
try:
    with lock(UPath(sys.argv[1])):
        print("locked")
except InputError as error:
    print(error)
"""


@pytest.mark.standard
def test_the_lock_and_the_folder_of_a_colleague(tmp_path):
    """Of the same folder: a lock that can be read, one that can't, and no right to write. Another user's, if we can."""

    def say(folder: pathlib.Path) -> str:
        line = [sys.executable, "-c", OF_OTHERS, str(folder)]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout

    folder = pathlib.Path("/var/tmp", f"mlm-{os.getpid()}")  # tmp_path is below a folder of root alone
    folder.mkdir()
    try:
        folder.chmod(0o1777)  # as /tmp
        (folder / LOCK).touch(0o444)
        assert say(folder) == "locked\n"
        with lock(UPath(folder)):
            assert "another process" in say(folder)
        (folder / LOCK).chmod(0o000)
        assert f"{folder}/{LOCK}" in (said := say(folder)) and "Permission denied" in said
        folder.chmod(0o555)
        assert str(folder) in (said := say(folder)) and "can't be written (Permission denied)" in said
    finally:
        folder.chmod(0o1777)
        (folder / LOCK).unlink()
        folder.rmdir()
