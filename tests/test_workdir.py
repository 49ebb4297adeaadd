"""The lock of a run's folder: where the file system has no locks, and where somebody else's file is in the way."""

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import subprocess
import sys

import pytest

from mlm.errors import InputError
from mlm.paths import UPath
from mlm.workdir import LOCK, lock
from tests.support.refusals import refuse


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOLCK, "warning: "),
        (errno.EINVAL, "warning: "),
        (errno.EWOULDBLOCK, "another process"),
        (errno.EBADF, os.strerror(errno.EBADF)),
    ],
)
def test_a_lock_that_fails(tmp_path, monkeypatch, capsys, number, words):
    """As the file system has none; as another process holds it; as it can only be read, on NFS."""

    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    is_refused = words != "warning: "
    refusal = pytest.raises(InputError, match=rf"{tmp_path}.*: .*{words}")
    with refusal if is_refused else contextlib.nullcontext(), lock(UPath(tmp_path)):
        said = capsys.readouterr().err
        assert said.startswith("warning: ") and str(tmp_path) in said
        assert os.strerror(number) in said


@pytest.mark.parametrize("name", ["run[1]", "run*", "what?", "[lab]/run", "a]"])
def test_a_name_that_is_a_pattern_is_refused_before_anything_is_written(tmp_path, capsys, name):
    arguments = ["train", "--config=configs/quickstart.py", f"--workdir={tmp_path}/{name}"]
    refuse(arguments, 2, f"--workdir={tmp_path}/{name}: ", capsys=capsys)
    assert not list(tmp_path.iterdir())


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
        return subprocess.check_output(line, text=True)

    # tmp_path is below a folder of root alone
    folder = pathlib.Path("/var/tmp", f"mlm-{os.getpid()}")
    folder.mkdir()
    try:
        folder.chmod(0o1777)  # as /tmp
        (folder / LOCK).touch(0o444)
        assert say(folder) == "locked\n"
        with lock(UPath(folder)):
            assert "another process" in say(folder)
        (folder / LOCK).chmod(0o000)
        assert re.search(f"{folder}/{LOCK}.*Permission denied", say(folder))
        folder.chmod(0o555)
        assert re.search(rf"{folder}.*can't be written \(Permission denied\)", say(folder))
    finally:
        folder.chmod(0o1777)
        (folder / LOCK).unlink()
        folder.rmdir()
