"""What a host needs before a run: the code and its packages.

For host.py, on a host: the standard library of Python 3.10 and later. Nothing here is half done under its final name:
folders are made under another one and renamed when they are complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

PYTHONS = ("3.12", "3.11", "3.13")  # that requirements.txt is tested with; the first that is here
UV = "uv==0.13.8"
HERE = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
INSTEAD = "install one on every host, or name one that has the packages: python in pod.toml"
NO_UV = f"{HERE}'s pip can't install {UV}, which makes environments: sudo apt-get install python3-pip, or {INSTEAD}"
NO_PYTHON = f"Python 3.11, 3.12 or 3.13 is needed, here is {HERE}, and uv can't download {PYTHONS[0]}: {INSTEAD}"


class HostError(Exception):
    """What a command of host.py can't do, as a sentence that goes on after the host's name."""


def write(path: pathlib.Path, value: object) -> None:
    """Replaces a JSON file as a whole; readable by its owner alone."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    with open(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        json.dump(value, file)
    new.replace(path)


def read(path: pathlib.Path) -> dict | None:
    """Returns a JSON file's object; None if there is none, or it is no object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def is_name(code: str) -> bool:
    """Returns whether this can be a code hash: SHA-256 in hex."""
    return re.fullmatch(r"[0-9a-f]{64}", code) is not None


@contextlib.contextmanager
def alone(root: pathlib.Path, name: str):
    """One at a time on this host: a second one waits for the first."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(root / f".{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def unpack(root: pathlib.Path, code: str, archive: pathlib.Path) -> dict:
    """Unpacks an archive whose SHA-256 is `code` to ROOT/code/{code}, and moves it to ROOT/archives."""
    if not is_name(code):
        raise HostError(f"{code!r} is no SHA-256")
    final, kept = root / "code" / code, root / "archives" / f"{code}.tar.gz"
    with alone(root, "unpack"):
        if final.is_dir():
            if archive != kept:
                archive.unlink(missing_ok=True)
            os.utime(final)  # the newest is the one in use
            return {"code": code, "fresh": False}
        if not archive.exists():
            raise HostError(f"{archive} is not here: sync again")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != code:
            archive.unlink()
            raise HostError(f"{archive} arrived damaged (SHA-256 {found[:12]}, not {code[:12]}): sync again")
        final.parent.mkdir(exist_ok=True)
        kept.parent.mkdir(exist_ok=True)
        new = final.with_name(f".{code}.new")
        shutil.rmtree(new, ignore_errors=True)
        _extract(archive, new)
        archive.replace(kept)
        new.rename(final)
    return {"code": code, "fresh": True}


def _extract(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Extracts an archive of files and links, none of which may lead out of the folder. Raises HostError."""
    with tarfile.open(archive, "r:gz") as tar:
        members = tar.getmembers()
        for member in sorted(members, key=tarfile.TarInfo.issym):  # links last: nothing is written through them
            path = pathlib.PurePosixPath(member.name)
            fits = member.isfile() or member.isdir() or member.issym()
            if path.is_absolute() or ".." in path.parts or not fits:
                raise HostError(f"{archive} holds {member.name!r}, which does not belong into it")
            if member.issym():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).symlink_to(member.linkname)
            else:
                tar.extract(member, folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        for link in filter(tarfile.TarInfo.issym, members):
            target = pathlib.Path(os.path.realpath(folder / link.name))
            if link.linkname.startswith("/") or not target.is_relative_to(os.path.realpath(folder)):
                raise HostError(f"{archive} holds {link.name!r}, a link to {link.linkname}, out of the code's folder")


def install(root: pathlib.Path, code: str, extras: list[str], given: str) -> dict:
    """Makes the environment for a code's requirements.txt, once; `given`: an interpreter to use instead."""
    requirements = root / "code" / code / "requirements.txt"
    if not is_name(code) or not requirements.parent.is_dir():
        raise HostError(f"code {code[:12]} is not here: sync first")
    text = requirements.read_bytes() if requirements.exists() else b""
    base = given or _find_python()
    version = _version(base) if base else PYTHONS[0]
    parts = [text, version.encode(), given.encode(), *(extra.encode() for extra in extras)]
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = root / "venv" / name
    with alone(root, "install"):
        write(root / "code" / f".{code}.json", {"requirements": name})  # what `run` starts this code with
        if (folder / ".complete").exists():
            return {"requirements": name, "fresh": False, "python": version}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        python = given or _make(root, folder, base or version, requirements, extras)
        write(folder / "python.json", {"python": python})
        (folder / ".complete").touch()
    return {"requirements": name, "fresh": True, "python": version}


def _find_python() -> str:
    """Returns the path of a Python that will do, "" if there is none: a name alone may be a wrapper for nothing."""
    for version in PYTHONS:
        path = shutil.which(f"python{version}") or ""
        with contextlib.suppress(HostError):
            if path and _version(path) == version:
                return path
    return ""


def _make(root: pathlib.Path, folder: pathlib.Path, base: str, requirements: pathlib.Path, extras: list) -> str:
    """Returns the interpreter of a new environment. base: a Python here, or a version that uv is to bring."""
    tools, python = root / "tools", str(folder / "bin" / "python")
    uv = [sys.executable, "-m", "uv"]
    path = {**os.environ, "PYTHONPATH": str(tools)}
    if not (tools / "uv").is_dir():
        _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), UV], os.environ, NO_UV)
    no_python = NO_PYTHON if base in PYTHONS else f"uv can't make an environment with {base}"
    _run([*uv, "venv", "--quiet", "--allow-existing", "--python", base, str(folder)], path, no_python)
    packages = ["-r", str(requirements)] if requirements.exists() else []
    _run([*uv, "pip", "install", "--quiet", "--python", python, *packages, *extras], path, "uv can't install packages")
    return python


def _run(argv: list[str], environment, failure: str) -> None:
    done = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise HostError(f"{failure} ({'; '.join(lines[-2:]) or f'code {done.returncode}'})")


def _version(python: str) -> str:
    words = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise HostError(f"the interpreter {python} does not work: {error}") from error
    return done.stdout.strip()


def interpreter(root: pathlib.Path, requirements: str) -> str:
    """Returns the interpreter of an environment that `install` has completed."""
    folder = root / "venv" / requirements
    if not re.fullmatch(r"[0-9a-f]{16}", requirements) or not (folder / ".complete").exists():
        raise HostError(f"the packages {requirements or 'of this code'} are not installed here: sync first")
    return str((read(folder / "python.json") or {}).get("python"))
