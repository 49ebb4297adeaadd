"""One kind of path for local files and gs:// alike: `pathlib`'s interface, by universal_pathlib over fsspec.

An object of a bucket appears whole or not at all, can't be appended to and can't be renamed, and a bucket has no
folders; so what is written under a temporary name and renamed on a disk is put in one go there. All that differs
between the two is here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
from upath import UPath

__all__ = ["UPath", "children", "inside", "is_begun", "is_remote", "local_folder", "local_place", "make_folder"]
__all__ += ["move", "put_file", "put_tree", "remove", "replacing", "sizes", "write_text"]

# gcsfs keeps what it has listed: other hosts write into the same folders.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)


def is_remote(path: UPath | Path | str) -> bool:
    """Returns whether a path is of a bucket or the like, and not of a file system of this machine."""
    return "://" in str(path)


def make_folder(folder: UPath) -> None:
    """Makes a folder and those above it; a bucket needs none, and a bucket that is missing is never made."""
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)


def inside(folder: UPath, name: str, *, links: bool = False) -> UPath:
    """Returns `folder / name` for a name that a file or a listing gives, which may be hostile.

    Args:
      folder: local or gs://.
      name: of a file below it, its parts separated by "/".
      links: allow symbolic links that point elsewhere, as the cache of the Hugging Face Hub has them.

    Raises:
      ValueError: the name is absolute, has a drive, a scheme or a control character, or leads out of the folder.
    """
    good = isinstance(name, str) and not re.search(r"[\x00-\x1f\x7f:\\]", name)
    if not good or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError(f"{name!r:.120} is not the name of a file inside its folder")
    path = folder / name
    if not links and not is_remote(folder):
        root = os.path.realpath(str(folder))
        if os.path.commonpath([root, os.path.realpath(str(path))]) != root:
            raise ValueError(f"{name!r:.120} is a symbolic link that leaves its folder")
    return path


def children(folder: UPath) -> list[UPath]:
    """Returns what lies in a folder, by name; nothing if there is no such folder."""
    try:
        return sorted(folder.iterdir(), key=lambda path: path.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def sizes(folder: UPath) -> dict[str, int]:
    """Returns {name: bytes} of the files in a folder, from one listing; nothing if there is no such folder."""
    try:
        if is_remote(folder):
            entries = folder.fs.ls(folder.path, detail=True)
            return {e["name"].rpartition("/")[2]: e["size"] for e in entries if e["type"] == "file"}
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    except FileNotFoundError:
        return {}


def write_text(path: UPath, text: str) -> None:
    """Writes a file whole or not at all; one that is there is replaced."""
    if is_remote(path):
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def put_file(file: Path, target: UPath) -> None:
    """Moves a finished local file to its place, whole or not at all; on a disk both are on the same file system."""
    if is_remote(target):
        target.fs.put_file(str(file), target.path)
        file.unlink()
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    file.replace(target)


def move(folder: UPath, target: UPath, *, first: str) -> None:
    """Renames a folder.

    In a bucket, its files are copied and then deleted, the file `first` before the others: a folder that is complete
    with that file alone never looks so when the move was cut short.
    """
    if not is_remote(folder):
        folder.rename(target)
        return
    files = sorted(folder.fs.find(folder.path), key=lambda name: name != f"{folder.path}/{first}")
    for name in files:
        folder.fs.copy(name, target.path + name.removeprefix(folder.path))
    for name in files:
        folder.fs.rm_file(name)


def remove(folder: UPath) -> None:
    """Removes a folder with all that lies in it, if it is there."""
    if is_remote(folder):
        if folder.exists():
            folder.fs.rm(folder.path, recursive=True)
    else:
        shutil.rmtree(str(folder), ignore_errors=True)


def local_folder(folder: str) -> str:
    """Returns a folder on this machine with the files of `folder`: itself, or a copy that lives as long as the process.

    For libraries that read local files alone, and folders that don't change. Folders within it are left out.
    """
    return _fetched(folder) if is_remote(folder) else folder


@functools.cache
def _fetched(folder: str) -> str:
    target = tempfile.mkdtemp(prefix="mlm-copy-")
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    files = [path for path in children(UPath(folder)) if path.is_file()]
    if not files:
        raise FileNotFoundError(f"{folder}: there is no such folder, or no file in it")
    for path in files:
        path.fs.get_file(path.path, str(inside(UPath(target), path.name)))
    return target


def is_begun(folder: UPath, *, last: str) -> bool:
    """Returns whether `replacing` was cut short in a bucket, and left a folder that may be replaced."""
    return is_remote(folder) and (folder / f"{last}.begun").is_file()


def local_place(folder: UPath) -> Path:
    """Returns a local folder for a library that can't write to a bucket; `put_tree` brings its files to `folder`."""
    return Path(tempfile.mkdtemp(prefix="mlm-new-")) if is_remote(folder) else Path(str(folder))


def put_tree(place: Path, folder: UPath) -> None:
    """Moves all files of a `local_place` to their folder in a bucket; on a disk they are there."""
    if not is_remote(folder):
        return
    for file in sorted(path for path in place.rglob("*") if path.is_file()):
        put_file(file, folder / file.relative_to(place).as_posix())
    shutil.rmtree(place)


@contextlib.contextmanager
def replacing(folder: UPath, *, last: str) -> Iterator[Path]:
    """Yields the path of a local folder that is to be made, and becomes `folder`, unless something was raised.

    In a bucket the files are put in their place, the file `last` at the end; `last` + ".begun" lies there until then.
    """
    if not is_remote(folder):
        temporary = Path(str(folder.with_name(folder.name + ".tmp")))
        shutil.rmtree(temporary, ignore_errors=True)
        yield temporary
        temporary.rename(str(folder))
        return
    with tempfile.TemporaryDirectory(prefix="mlm-new-") as place:
        new = Path(place, folder.name)
        yield new
        begun = folder / f"{last}.begun"
        begun.write_text("begun\n")
        if (folder / last).is_file():
            (folder / last).unlink()
        for file in sorted(new.iterdir(), key=lambda file: file.name == last):
            put_file(file, folder / file.name)
        begun.unlink()
