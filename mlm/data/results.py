"""Files that tasks leave for one another, in a folder that all workers reach: a disk, a shared one, or a bucket.

A file appears whole under its name, which begins with a hash of what it was made from. So a task is done when its last
file is there.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mlm.engine.engine import Engine
from mlm.errors import InputError
from mlm.paths import UPath, is_remote, make_folder, os_errors, put_file, sizes

THREADS = 16  # that read files of a process at the same time
TEMPORARY = ".*.tmp"  # files that are not yet whole
Item = TypeVar("Item")
Result = TypeVar("Result")


def key(*content: Any) -> str:
    """Returns the SHA-256 of what a file is made from, in hexadecimal digits."""

    def plain(value: Any) -> Any:
        return value.hex() if isinstance(value, bytes) else dataclasses.asdict(value)

    return hashlib.sha256(json.dumps(content, sort_keys=True, default=plain).encode()).hexdigest()


@contextlib.contextmanager
def written(target: UPath, name: Callable[[], str] | None = None) -> Iterator[Path]:
    """Yields a local file to write, which becomes `target`, or takes its `name()`."""
    make_folder(target.parent)
    # on a disk in the target's folder, since a rename can't cross file systems
    folder = tempfile.gettempdir() if is_remote(target) else str(target.parent)
    file = Path(folder, f".{uuid.uuid4().hex}.tmp")
    fix = "make room there, or choose another shards.dir, and start again: what is written is kept"
    try:
        with os_errors():
            yield file
            put_file(file, target.parent / name() if name else target)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{target}: can't be written ({reason}); {fix}.") from error
    finally:
        file.unlink(missing_ok=True)


def save(target: UPath, *arrays: np.ndarray) -> None:
    """Writes the bytes of some arrays, one after the other."""
    with written(target) as file, file.open("wb") as out:
        for array in arrays:
            out.write(np.ascontiguousarray(array).data)


def load(
    file: UPath, dtype: np.dtype | type, first: int = 0, count: int = -1, *, after: int = 0
) -> np.ndarray:
    """Returns `count` items (-1: to the end) from item `first` on, of a file with `after` bytes before them."""
    size = np.dtype(dtype).itemsize
    start = after + first * size
    stop = None if count < 0 else start + count * size
    # a bucket answers a range of no bytes with an error
    data = file.fs.cat_file(file.path, start or None, stop) if stop != start else b""
    return np.frombuffer(data, dtype)


def run(
    engine: Engine,
    function: Callable[..., Any],
    items: Iterable[dict[str, Any]],
    *,
    folder: UPath,
    label: str,
    **shared: Any,
) -> list[tuple[str, Any]]:
    """Returns (base, function(base, **item, **shared)) for each item; does what is not done yet.

    The names of a task's files begin with `base`. The last one is {base}.json, what the function returned.
    """
    of_all = key(function.__name__, shared)
    bases = {f"{folder}/{key(of_all, item)}": item for item in items}
    done = sizes(folder)
    missing = [pair for pair in bases.items() if f"{pair[0].rpartition('/')[2]}.json" not in done]
    for _ in engine.each(functools.partial(_run, function, shared), missing, label=label):
        pass
    notes = at_once(load_json, (UPath(f"{base}.json") for base in bases))
    return list(zip(bases, notes, strict=True))


def _run(
    function: Callable[..., Any], shared: dict[str, Any], task: tuple[str, dict[str, Any]]
) -> None:
    base, item = task
    save_json(UPath(f"{base}.json"), function(base, **item | shared))


def save_json(target: UPath, content: Any) -> None:
    """Writes an object as JSON."""
    save(target, np.frombuffer(json.dumps(content).encode(), np.uint8))


def load_json(file: UPath) -> Any:
    """Returns the object of a file of JSON."""
    return json.loads(file.read_bytes())


def load_each(bases: Iterable[str], kind: str, dtype: np.dtype | type) -> Iterator[np.ndarray]:
    """Yields what is in the file {base}.{kind} of each of some tasks."""
    return at_once(lambda base: load(UPath(f"{base}.{kind}"), dtype), bases)


def save_cut(target: UPath, items: np.ndarray, numbers: np.ndarray, pieces: int) -> None:
    """Writes items in so many pieces, for `load_cuts`; `numbers`, sorted, are the piece of each."""
    save(target, np.searchsorted(numbers, np.arange(pieces + 1)).astype(np.uint64), items)


def load_cuts(
    bases: Iterable[str], kind: str, dtype: np.dtype, *, pieces: int, first: int, stop: int
) -> Iterator[np.ndarray]:
    """Yields the items of the pieces `first` up to `stop`, of so many, in the files {base}.{kind} of some tasks."""

    def load_range(base: str) -> np.ndarray:
        file = UPath(f"{base}.{kind}")
        cuts = load(file, np.uint64, first, stop - first + 1)
        return load(file, dtype, int(cuts[0]), int(cuts[-1] - cuts[0]), after=8 * (pieces + 1))

    return at_once(load_range, bases)


def at_once(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields function(item) for each item, in order; several run at the same time, since a bucket is slow to answer."""
    items = iter(items)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        while batch := list(itertools.islice(items, THREADS)):
            yield from pool.map(function, batch)
