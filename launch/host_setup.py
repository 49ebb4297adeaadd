"""What a host needs before a run: the code and its packages; and the files, names and locks of both ends.

For host.py, on a host: the standard library of Python 3.10 and later.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.parse
from collections.abc import Callable, Iterator

MAKE = ["bash", "launch/environment.sh"]  # in the folder of the code


class HostError(Exception):
    """What a command of host.py can't do, as a sentence that goes on after the host's name."""


def expand(path: str) -> pathlib.Path:
    """Returns a path with a home folder for its ~ or ~USER. Raises HostError for a user who is not here."""
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError:
        raise HostError(f"{path} is in the home of nobody on this machine") from None


def write(path: pathlib.Path, value: object) -> None:
    """Replaces a JSON file as a whole; readable by its owner alone."""
    new = path.with_name(f"{path.name}.{os.urandom(4).hex()}.new")
    try:
        with open(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            json.dump(value, file)
        new.replace(path)
    except OSError:  # a full disk, on which nothing half written stays
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def read(path: pathlib.Path) -> dict | None:
    """Returns a JSON file's object; None if there is none, or it is no object."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else None
    return None


def folder_name(run: str) -> str:
    """Returns the name of a run's folder. Raises HostError for an id that can't be one."""
    try:
        name = urllib.parse.quote(run, safe="")
    except UnicodeEncodeError:
        raise HostError(f"run id {run!r} is no text") from None
    if not 0 < len(name) <= 200:
        raise HostError(
            f"run id {run!r}: it must have 1 to 200 characters, those that a URL quotes counted as three"
        )
    # "." and ".." are no names for a folder
    return name if name.strip(".") else name.replace(".", "%2E")


@contextlib.contextmanager
def alone(file: pathlib.Path, refusal: Exception | None = None, *, is_needed: bool = True):
    """Holds a lock file. Where another process does, it raises the refusal, or waits if there is none.

    Raises HostError on a file system without locks, unless they are not needed.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(file, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except BlockingIOError:
            raise refusal from None
        except OSError as error:
            if is_needed:
                where = "keep it on a local disk (on a host: root in pod.toml)"
                raise HostError(
                    f"{file.parent} can't be locked ({error.strerror}): {where}"
                ) from None
        yield


def prepare_streams() -> None:
    """Makes stdout and stderr take any text: pipes and files as UTF-8; a terminal shows codes for what it lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = stream.encoding if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    """Returns once the condition is true, or after some seconds."""
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)


def source(root: pathlib.Path, code: str) -> pathlib.Path:
    """Returns the folder of unpacked code. Raises HostError if it is not here."""
    folder = root / "code" / code
    if not folder.is_dir():
        raise HostError(f"code {code[:12]} is not here: sync first")
    return folder


@contextlib.contextmanager
def hidden(final: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a new folder beside another one, to be renamed to it once it is complete; after an error it is removed."""
    new = final.with_name(f".{final.name}.{os.getpid()}")
    new.mkdir(parents=True, mode=0o700)
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def rename(new: pathlib.Path, final: pathlib.Path) -> bool:
    """Gives a folder its name; returns False, and removes it, if the name is taken."""
    try:
        new.rename(final)
    except OSError:
        shutil.rmtree(new)
        if not final.exists():
            raise
        return False
    return True


def unpack(root: pathlib.Path, code: str, archive: bytes) -> dict:
    """Unpacks an archive whose SHA-256 is `code` to ROOT/code/{code}."""
    final = root / "code" / code
    if final.is_dir():
        return {"code": code, "fresh": False}
    digest = hashlib.sha256(archive).hexdigest()
    if digest != code:
        raise HostError(
            f"the archive arrived damaged (SHA-256 {digest[:12]}, not {code[:12]}): sync again"
        )
    with hidden(final) as new:
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                # nothing leads out of the folder; the first releases of Python 3.10 have no such filter
                tar.extraction_filter = getattr(tarfile, "data_filter", None)
                tar.extractall(new)
        except tarfile.TarError as error:
            advice = "replace it by what it points to, or by a relative link within the repository"
            raise HostError(
                f"the code holds a link or a file that leaves it: {error}: {advice}"
            ) from None
        return {"code": code, "fresh": rename(new, final)}


def install(root: pathlib.Path, code: str, python: str) -> dict:
    """Makes the environment for a code's requirements.txt, once; `python`: an interpreter to use instead, or ""."""
    folder = source(root, code)
    requirements = folder / "requirements.txt"
    text = requirements.read_bytes() if requirements.exists() else b""
    print_version = (
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"] if python else MAKE
    )
    version = _run(
        print_version, f"the interpreter {python or 'python3'} does not work", folder, MLM_FIND="1"
    )
    packages = hashlib.sha256(b"\0".join([text, version.encode(), python.encode()])).hexdigest()[
        :16
    ]
    venv = root / "venv" / packages
    with alone(root / ".install.lock"):
        # what `run` starts this code with
        write(root / "code" / f".{code}.json", {"packages": packages})
        if fresh := not (venv / "python.json").exists():  # written when all the rest is there
            shutil.rmtree(venv, ignore_errors=True)
            venv.mkdir(parents=True)
            if not python:
                _run(MAKE, "no environment was made", folder, MLM_VENV=str(venv))
            write(venv / "python.json", {"python": python or str(venv / "bin" / "python")})
    return {"packages": packages, "fresh": fresh, "python": version}


def _run(argv: list[str], failure: str, folder: pathlib.Path, **variables: str) -> str:
    """Returns what a program prints. Raises HostError, which begins with `failure`."""
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(
            argv, cwd=folder, env=environment, input="", capture_output=True, errors="replace"
        )
    except OSError as error:
        raise HostError(f"{failure} ({error.strerror})") from None
    if done.returncode:
        lines = [
            line.strip().removeprefix("launch: ")
            for line in done.stderr.splitlines()
            if line.strip()
        ]
        raise HostError(f"{failure} ({'; '.join(lines[-3:]) or f'code {done.returncode}'})")
    return done.stdout.strip()


def interpreter(root: pathlib.Path, packages: str) -> str:
    """Returns the interpreter of an environment that `install` has completed. Raises HostError if it is not here."""
    environment = read(root / "venv" / packages / "python.json")
    if environment is None or shutil.which(environment["python"]) is None:
        raise HostError(f"the packages {packages} are not installed here: sync first")
    return environment["python"]
