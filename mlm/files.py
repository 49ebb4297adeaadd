"""Files by their names and patterns, local or gs://; a link is the file or folder that it leads to."""

import functools
import glob
import os
import re
import stat
from pathlib import Path
from typing import IO, Any, NamedTuple

from mlm.paths import UPath, is_remote, of_a_command


class File(NamedTuple):
    """A file that can be read."""

    name: str  # its path, absolute or gs://
    size: int
    stamp: str  # changes with the file


def read_stat(name: str) -> File | None:
    """Returns the file of a name, None if it is a folder or the like; raises OSError, of a link that leads nowhere."""
    if is_remote(name):
        path = UPath(name)
        return _remote_file(name, path.fs.info(path.path))
    try:
        status = Path(name).stat()
    except FileNotFoundError:
        if not Path(name).is_symlink():
            raise
        fix = "fetch that file (as with git annex get or dvc pull), or remove the link"
        raise FileNotFoundError(
            f"{name} is a link to {Path(name).readlink()}, which is not there; {fix}"
        ) from None
    stamp = f"{status.st_size} {status.st_mtime}"
    return File(name, status.st_size, stamp) if stat.S_ISREG(status.st_mode) else None


def open_file(name: str) -> IO[bytes]:
    """Opens a file, local or gs://, to read bytes."""
    return UPath(name).open("rb")


def _remote_file(name: str, info: dict[str, Any]) -> File | None:
    version = next(
        (info[key] for key in ("generation", "etag", "ETag", "mtime") if key in info), ""
    )
    return (
        None
        if info["type"] == "directory"
        else File(name, info["size"], f"{info['size']} {version}")
    )


def split_pattern(pattern: str) -> tuple[str, str]:
    """Returns (folder, pattern within it), absolute or gs://; a name that exists is no pattern, whatever is in it."""
    if not is_remote(pattern):
        pattern = str(Path(pattern).absolute())
    parts = pattern.split("/")
    for number, part in enumerate(parts):
        name = "/".join(parts[: number + 1])
        if glob.has_magic(part) and not (
            UPath(name).exists() if is_remote(name) else os.path.lexists(name)
        ):
            return "/".join(parts[:number]), "/".join(parts[number:])
    return "/".join(parts[:-1]), glob.escape(parts[-1])


def find_files(pattern: str) -> list[File]:
    """Returns the files that match a pattern, sorted by name, without folders; raises OSError if there are none.

    As in shells, Python's glob and `datasets`, no wildcard matches a dot at the start of a name: .env, the partial
    copies of rsync and .ipynb_checkpoints are read by a pattern that has the dot itself.
    """
    folder, rest = split_pattern(pattern)
    if is_remote(pattern):
        root = UPath(folder)
        infos = root.fs.glob(f"{glob.escape(root.path)}/{rest}", detail=True)
        names = {name.removeprefix(f"{root.path}/"): info for name, info in infos.items()}
    elif "**" in rest:  # which follows no link, as in bash
        local = Path(folder or "/")
        paths = local.glob(f"{rest}/*" if rest.endswith("**") else rest)
        names = {str(path.relative_to(local)): None for path in paths}
    else:
        names = dict.fromkeys(glob.glob(rest, root_dir=folder or "/"))
    files = [
        _remote_file(f"{folder}/{name}", info) if info else read_stat(f"{folder}/{name}")
        for name, info in names.items()
        if _hidden_parts(name) == _hidden_parts(rest)
    ]
    if not files:
        raise FileNotFoundError("no such file; wildcards match no name that begins with a dot")
    if not any(files):
        raise OSError(
            f"it is a folder, or no regular file; name the files in it, as in {pattern.rstrip('/')}/*"
        )
    return sorted(file for file in files if file is not None)


def _hidden_parts(path: str) -> int:
    return sum(part.startswith(".") for part in path.split("/"))


@of_a_command
@functools.cache
def split_field(rest: str) -> tuple[str, str]:
    """Returns (pattern, field) of PATTERN[#FIELD]; names of files may hold a # themselves."""
    cuts = [match.start() for match in re.finditer("#", rest)]
    for cut in [len(rest), *cuts[:0:-1]] if cuts else []:
        try:
            find_files(rest[:cut])
        except OSError:
            continue
        return rest[:cut], rest[cut + 1 :]
    pattern, _, field = rest.partition("#")
    return pattern, field


def files_below(folder: UPath) -> dict[str, UPath]:
    """Returns {path within the folder: path} of all files below it."""
    if is_remote(folder):
        names = [name.removeprefix(f"{folder.path}/") for name in folder.fs.find(folder.path)]
    else:
        names = [
            str(Path(parent, name).relative_to(str(folder)))
            for parent, _, files in os.walk(folder, followlinks=True)
            for name in files
        ]
    return {name: folder / name for name in names}
