"""Files that tasks leave for one another, in a folder that all workers reach: a disk, a shared one, or a bucket.

A file appears whole under its name, which says what it was made from; so a task is done when its last file is there.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import json
import platform
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mlm.errors import DamageError, InputError
from mlm.paths import UPath, is_remote, make_folder, os_errors, put_file

THREADS = 16  # that read or write files of a process at the same time
Item = TypeVar("Item")
Result = TypeVar("Result")


def key(*content: Any) -> str:
    """Returns the SHA-256 of what a file is made from, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def written(target: UPath, name: Callable[[], str] | None = None) -> Iterator[Path]:
    """Yields a local file to write, which becomes `target`, or takes its `name()`; InputError for lack of room."""
    parent = target.parent
    temporary = f".{uuid.uuid4().hex}.tmp"
    try:
        make_folder(parent)
        file = (
            Path(tempfile.gettempdir(), f"mlm-{temporary}")
            if is_remote(target)
            else Path(str(parent), temporary)
        )
        try:
            with os_errors():
                yield file
                put_file(file, parent / name() if name else target)
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        fix = "make room there, or choose another shards.dir, and start again: what is written is kept"
        reason = error.strerror or error
        raise InputError(
            f"{target}: can't be written on {platform.node()} ({reason}); {fix}."
        ) from error


def save(target: UPath, *arrays: np.ndarray) -> None:
    """Writes the bytes of some arrays, one after the other."""
    with written(target) as file, file.open("wb") as out:
        for array in arrays:
            out.write(np.ascontiguousarray(array).data)


def save_json(target: UPath, content: Any) -> None:
    """Writes an object as JSON."""
    save(target, np.frombuffer(json.dumps(content).encode(), np.uint8))


def load_json(file: UPath) -> Any:
    """Returns the object of a file that `save_json` has written."""
    try:
        return json.loads(load(file, np.uint8).tobytes())
    except ValueError:
        raise _damaged(file) from None


def load(
    file: UPath, dtype: np.dtype | type, first: int = 0, count: int = -1, *, after: int = 0
) -> np.ndarray:
    """Returns `count` items (-1: to the end) from item `first` on, of a file with `after` bytes before them."""
    dtype = np.dtype(dtype)
    start = after + first * dtype.itemsize
    stop = None if count < 0 else start + count * dtype.itemsize
    try:
        with os_errors():
            data = file.fs.cat_file(file.path, start or None, stop) if stop != start else b""
    except OSError as error:
        # it ends before `start`
        if isinstance(error, FileNotFoundError) or getattr(error.__cause__, "code", 0) == 416:
            raise _damaged(file) from None
        reason = f"{platform.node()} can't read it ({error.strerror or error})"
        raise InputError(f"{file}: {reason}; start the same command again.") from error
    if (stop is not None and len(data) != stop - start) or len(data) % dtype.itemsize:
        raise _damaged(file)
    return np.frombuffer(data, dtype)


def _damaged(file: UPath) -> DamageError:
    fix = f"remove {file.parent}/{file.stem}.*, and start the same command again"
    return DamageError(f"{file}: is missing, or is not what was written; {fix}.")


def save_cut(target: UPath, items: np.ndarray, numbers: np.ndarray, pieces: int) -> None:
    """Writes items in so many pieces, for `load_cut`; `numbers`, sorted, are the piece of each."""
    save(target, np.searchsorted(numbers, np.arange(pieces + 1)).astype(np.uint64), items)


def load_cut(
    file: UPath, dtype: np.dtype | type, pieces: int, first: int, stop: int
) -> list[np.ndarray]:
    """Returns the items of pieces `first` up to `stop`, of a file of so many pieces."""
    cuts = load(file, np.uint64, first, stop - first + 1).astype(np.int64)
    items = load(file, dtype, int(cuts[0]), int(cuts[-1] - cuts[0]), after=8 * (pieces + 1))
    return np.split(items, cuts[1:-1] - cuts[0])


def at_once(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields function(item) for each item, in order; several run at the same time, since a bucket is slow to answer."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        waiting: collections.deque[concurrent.futures.Future] = collections.deque()
        for item in items:
            if len(waiting) == THREADS:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, item))
        while waiting:
            yield waiting.popleft().result()
