"""One kind of path for local files and gs:// alike: `pathlib`'s interface, by universal_pathlib over fsspec.

An object in a bucket appears whole or not at all, can't be appended to or renamed, and there are no folders: what is
written under a temporary name and renamed on a disk is uploaded in one piece there. All such differences are here.
"""

import atexit
import contextlib
import functools
import itertools
import logging
import os
import platform
import posixpath
import re
import shutil
import socket
import tempfile
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
from upath import UPath

from mlm.errors import InputError

# gcsfs keeps the listings of folders, but other hosts write to them too.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs what it raises, with stacks
ANSWER = 8.0  # seconds for the server of a bucket; its client would try for minutes
HUB_NAME = r"[\w.-]+(/[\w.-]+)?"  # what a name on the Hugging Face Hub matches; a path may, too
CLIENTS = ("gcsfs", "google", "aiohttp", "requests")  # whose errors have no base class in common
_caches: list[Any] = []  # of functools, of what a command has read


def of_a_command(cached: Any) -> Any:
    """Returns a function of functools.cache whose cache is cleared when the next command starts, as in a notebook."""
    _caches.append(cached)
    return cached


def forget() -> None:
    """Clears the caches of `of_a_command`, as a command starts."""
    for cached in _caches:
        cached.cache_clear()


def is_remote(path: UPath | Path | str) -> bool:
    """Returns whether a path is in a bucket or the like, not on a file system of this machine."""
    return "://" in str(path)


def check_reachable(path: str) -> None:
    """Raises InputError for a path whose server does not answer, or whose client is not installed."""
    if is_remote(path) and (reason := _unreachable(*urllib.parse.urlsplit(path)[:2])):
        raise InputError(
            f"{path}: can't be reached ({reason}); check the network and the name, or name a local path."
        )


@of_a_command
@functools.cache
def _unreachable(scheme: str, host: str) -> str:
    """Returns why nothing at scheme://host can be reached, "" if its server answers."""
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        return str(error)
    google = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    url = google if scheme in ("gs", "gcs") else f"{scheme}://{host}"
    server = urllib.parse.urlsplit(url)
    port = server.port or {"http": 80, "https": 443}.get(server.scheme)
    if port is None:  # of other schemes, whose clients know
        return ""
    try:
        socket.create_connection((server.hostname, port), ANSWER).close()
    except OSError as error:
        return f"{server.hostname}: {error.strerror or error}"
    return ""


def expand(path: str) -> str:
    """Returns a path with its home folder for ~ or ~USER, without file:// and slashes at its end; raises ValueError."""
    # a shell completes the name of a folder with one
    path = re.sub("(?<=[^/:])/+$", "", _expand_home(path))
    # "x:/y" would be a scheme to UPath
    return path if is_remote(path) or not re.match("[^/]*:", path) else f"./{path}"


def _expand_home(path: str) -> str:
    path = re.sub(r"^(file|local)://", "", path)
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        raise ValueError(
            "begins with no home of a user of this machine; write the path from / on"
        ) from None


def expand_source(source: str) -> str:
    """Returns a source such as "text:~/x" with its path expanded."""
    kind, colon, rest = source.partition(":")
    return kind + colon + _expand_home(rest)


def canonical(path: str) -> str:
    """Returns the one spelling of a path that all its spellings have: absolute, without "..", links or "//"."""
    if not is_remote(path):
        return os.path.realpath(path)
    scheme, _, rest = path.partition("://")
    return f"{scheme.replace('gcs', 'gs')}://{posixpath.normpath(rest).lstrip('/')}"


def distinct_parts(paths: Sequence[str]) -> list[str]:
    """Returns the last part in which all paths differ ("wiki", "web" of b/wiki/shards, b/web/shards), else all."""
    split = [
        [re.sub(r"[^A-Za-z0-9._-]+", "-", part) for part in path.split("/") if part]
        for path in paths
    ]
    for column in itertools.zip_longest(*map(reversed, split), fillvalue=""):
        if all(column) and len(set(column)) == len(paths):
            return list(column)
    return ["-".join(parts) for parts in split]


def make_folder(folder: UPath) -> None:
    """Creates a folder and its parents; a bucket needs none, and a missing bucket is never created."""
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)


def inside(folder: UPath, name: str) -> UPath:
    """Returns `folder / name`; raises ValueError if the name leads out of the folder, which a link in it may do."""
    is_plain = isinstance(name, str) and not re.search(r"[\x00-\x1f\x7f:\\]", name)
    if not is_plain or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError(f"{name!r:.120} is not the name of a file inside its folder")
    return folder / name


def children(folder: UPath) -> list[UPath]:
    """Returns the entries of a folder, sorted by name; none if it does not exist."""
    try:
        return sorted(folder.iterdir(), key=lambda path: path.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Turns what the client of a bucket raises when it has given up, no subclass of OSError, into an OSError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] not in CLIENTS:
            raise
        raise OSError(f"the bucket does not answer: {error or type(error).__name__}") from error


@contextlib.contextmanager
def refusing(what: str, fix: str) -> Iterator[None]:
    """Turns what a file system or a bucket raises into the InputError "{what} ({reason}); {fix}."."""
    try:
        with os_errors():
            yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what} ({getattr(error, 'strerror', None) or error}); {fix}.") from error


def sizes(folder: UPath) -> dict[str, int]:
    """Returns {name: bytes} of the files in a folder, none if there is no such folder; raises InputError."""
    with refusing(f"{folder}: {platform.node()} can't list it", "start the same command again"):
        if not is_remote(folder):  # fsspec takes a link to a folder, and one to nothing, for a file
            return {path.name: path.stat().st_size for path in children(folder) if path.is_file()}
        try:
            entries = folder.fs.ls(folder.path, detail=True)
        except FileNotFoundError:
            return {}
    return {
        posixpath.basename(entry["name"]): entry["size"]
        for entry in entries
        if entry["type"] != "directory"
    }


def write_text(path: UPath, text: str) -> None:
    """Writes a file whole or not at all, replacing an existing one."""
    if is_remote(path):
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_secret(path: UPath | Path, text: str) -> None:
    """Writes a file that on a disk only its owner can read."""
    if not is_remote(path):
        path.unlink(missing_ok=True)
        path.touch(0o600, exist_ok=False)
    path.write_text(text, encoding="utf-8")


def put_file(file: Path, target: UPath) -> None:
    """Moves a finished local file to its place, whole or not at all; on a disk, within one file system."""
    if is_remote(target):
        target.fs.put_file(str(file), target.path)
        file.unlink()
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    file.replace(target)


def move(folder: UPath, target: UPath, *, first: str) -> None:
    """Renames a folder; in a bucket, copies its files, then deletes them: `first`, which makes it complete, first."""
    if not is_remote(folder):
        folder.rename(target)
        return
    files = sorted(folder.fs.find(folder.path), key=lambda name: name != f"{folder.path}/{first}")
    for name in files:
        folder.fs.copy(name, target.path + name.removeprefix(folder.path))
    for name in files:
        folder.fs.rm_file(name)


def remove(folder: UPath) -> None:
    """Removes a folder and its contents, if it exists."""
    if not is_remote(folder):
        shutil.rmtree(str(folder), ignore_errors=True)
    elif folder.exists():
        folder.fs.rm(folder.path, recursive=True)


@of_a_command
@functools.cache
def local_folder(folder: str) -> str:
    """Returns `folder`, or a local copy of its files until the next command, for libraries without gs://."""
    if not is_remote(folder):
        return folder
    target = tempfile.mkdtemp(prefix="mlm-copy-")
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    files = [path for path in children(UPath(folder)) if path.is_file()]
    if not files:
        raise FileNotFoundError(f"{folder}: there is no such folder, or no file in it")
    for path in files:
        path.fs.get_file(path.path, str(inside(UPath(target), path.name)))
    return target


def staging_folder(folder: UPath) -> Path:
    """Returns a local folder for a library that can't write to a bucket; `upload` moves its files to `folder`."""
    return Path(tempfile.mkdtemp(prefix="mlm-new-")) if is_remote(folder) else Path(str(folder))


def upload(staging: Path, folder: UPath) -> None:
    """Moves the files of a `staging_folder` to their folder in a bucket; on a disk they are there already."""
    if is_remote(folder):
        for file in sorted(path for path in staging.rglob("*") if path.is_file()):
            put_file(file, folder / file.relative_to(staging).as_posix())
        shutil.rmtree(staging)


def is_begun(folder: UPath, *, last: str) -> bool:
    """Returns whether `replacing` was interrupted between two files, so that the folder may be replaced."""
    return (folder / f"{last}.begun").is_file()


def copy_files(source: UPath, target: UPath) -> None:
    """Copies the files of a folder, if it has some, into another one, which is created."""
    for file in children(source):
        if file.is_file():
            make_folder(target)
            (target / file.name).write_bytes(file.read_bytes())


@contextlib.contextmanager
def replacing(folder: UPath, *, last: str) -> Iterator[Path]:
    """Yields the path of a local folder to create, which replaces `folder` unless an exception is raised.

    In a bucket, and in a mounted volume, which can't be renamed, the files are replaced one by one, the file `last` at
    the end; `last` + ".begun" exists until then.
    """
    target = Path(canonical(str(folder)))  # of a link, what it leads to
    if is_remote(folder) or os.path.ismount(target):
        beside = None if is_remote(folder) else target
        with tempfile.TemporaryDirectory(prefix=".mlm-new-", dir=beside) as parent:
            new = Path(parent, folder.name)
            yield new
            begun = folder / f"{last}.begun"
            begun.write_text("begun\n")
            (folder / last).unlink(missing_ok=True)
            for file in sorted(new.iterdir(), key=lambda file: file.name == last):
                put_file(file, folder / file.name)
            begun.unlink()
        return
    temporary = target.with_name(f".{target.name}.tmp")
    old = temporary / "old"
    if old.exists() and not target.exists():
        old.rename(target)  # a process was killed between the two renames below
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary / "new"
        if target.exists():
            target.rename(old)
        (temporary / "new").rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(temporary, ignore_errors=True)
