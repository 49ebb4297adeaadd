"""What a host needs before a run: the code and its packages; and the files and locks of both ends.

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
import threading
import time
from collections.abc import Callable, Iterator


class HostError(Exception):
    """What a command of host.py can't do, as a sentence that goes on after the host's name."""


def expand(path: str) -> pathlib.Path:
    """Returns a path with a home folder for its ~ or ~USER. Raises HostError for a user who is not here."""
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError:
        raise HostError(f"{path} is in the home of nobody on this machine") from None


def write(path: pathlib.Path, value: object) -> None:
    """Replaces a JSON file as a whole."""
    new = path.with_name(f"{path.name}.{threading.get_native_id()}")  # two may write it at once
    new.write_text(json.dumps(value))
    new.replace(path)


def read(path: pathlib.Path) -> dict | None:
    """Returns a JSON file's object; None if there is none, or it is no object."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else None
    return None


@contextlib.contextmanager
def alone(file: pathlib.Path, refusal: Exception) -> Iterator[None]:
    """Holds a lock file; raises the refusal where another process does. A file system without locks has none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        except OSError:
            pass
        yield


def prepare_streams() -> None:
    """Makes stdout and stderr take any text: pipes and files as UTF-8; a terminal shows codes for what it lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = stream.encoding if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def join_overrides(argv: list[str]) -> list[str]:
    """Returns a command line in which --config.KEY VALUE is one word, as argparse needs it."""
    words = iter(argv)
    return [
        f"{word}={next(words, '')}" if word.startswith("--config.") and "=" not in word else word
        for word in words
    ]


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    """Returns once the condition is true, or after some seconds."""
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)


@contextlib.contextmanager
def new_folder(final: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a folder that gets its name once it is complete, and no error came, unless another one has the name."""
    new = final.with_name(f".{final.name}.{os.getpid()}")
    new.mkdir(parents=True, mode=0o700)
    try:
        yield new
        with contextlib.suppress(OSError):
            new.rename(final)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def unpack(root: pathlib.Path, code: str, archive: bytes) -> dict:
    """Unpacks an archive whose SHA-256 is `code` to ROOT/code/{code}."""
    digest = hashlib.sha256(archive).hexdigest()
    if digest != code:
        raise HostError(
            f"the archive arrived damaged (SHA-256 {digest[:12]}, not {code[:12]}): sync again"
        )
    final = root / "code" / code
    with new_folder(final) as new:
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                # nothing leads out of the folder; the first releases of Python 3.10 have no such filter
                tar.extraction_filter = getattr(tarfile, "data_filter", None)
                tar.extractall(new)
        except tarfile.TarError as error:
            advice = "replace it by what it points to, or by a relative link within the repository"
            sentence = f"the code holds a link or a file that leaves it: {error}: {advice}"
            raise HostError(sentence) from None
    return {}


def install(root: pathlib.Path, code: str, python: str) -> dict:
    """Makes the environment for a code's requirements.txt, once; `python`: an interpreter to use instead, or ""."""
    folder = root / "code" / code
    if not python:
        needs = [folder / "requirements.txt", folder / "launch" / "environment.sh"]
        packages = hashlib.sha256(b"".join(path.read_bytes() for path in needs)).hexdigest()[:16]
        venv = root / "venv" / packages
        _run(["bash", "launch/environment.sh"], folder, MLM_VENV=str(venv))
        python = str(venv / "bin" / "python")
    version = _run([python, "-V"], folder)
    # what `start` runs this code with
    write(root / "code" / f"{code}.json", {"python": python})
    return {"python": version.strip()}


def _run(argv: list[str], folder: pathlib.Path, **variables: str) -> str:
    """Returns what a program prints. Raises HostError, which says why it failed."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        argv,
        cwd=folder,
        env=environment,
        input="",
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        lines = [line.removeprefix("launch: ") for line in done.stderr.splitlines() if line.strip()]
        raise HostError(f"{' '.join(argv)}: {'; '.join(lines[-3:]) or f'code {done.returncode}'}")
    return done.stdout
