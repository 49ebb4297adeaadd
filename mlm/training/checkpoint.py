"""Checkpoints: orbax writes them, hashes written after the commit prove them.

    checkpoints/{step}/            orbax's, with the state and the metadata that it needs ("meta")
    checkpoints/{step}/hashes.json {file: [bytes, SHA-256]}, written last: a step without it was never completed

orbax checks no payload on restore, and takes any folder with a number for a name as a step; so steps are chosen here.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from mlm import cluster
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, children, is_remote, make_folder, move, remove, write_text
from mlm.training.sharding import named_leaves

FORMAT = 2  # of the metadata
HASHES = "hashes.json"
COMMITTED = "commit_success.txt"  # in a bucket, orbax writes a step under its name and this file last
INCOMPLETE = re.compile(r"incomplete\.([0-9]+)(\.[0-9]+)?")  # a step whose write, or whose hashing, was cut short
logger = logging.getLogger(__name__)


class Checkpoints:
    """Writes and restores the checkpoints of one run; a context manager that waits for what is being written."""

    def __init__(self, folder: UPath, *, keep: int):
        """Opens the folder, and moves steps that were never completed out of orbax's sight.

        Args:
          folder: absolute; made if missing.
          keep: newest checkpoints kept, beside the one with the lowest score.
        """
        self.folder = folder
        if cluster.is_primary():
            make_folder(folder)
            for step in sorted(set(_step_folders(folder)) - set(complete_steps(folder))):
                if is_remote(folder) and not (folder / str(step) / COMMITTED).is_file():
                    remove(folder / str(step))
                else:
                    set_aside(folder, step, "incomplete")
        cluster.barrier("checkpoints opened")
        best = BestN(get_metric_fn=lambda m: -m["loss"], n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            best_fn=lambda m: -m["loss"],  # so that the scores are written, for the policy after a restart
            preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
            cleanup_tmp_directories=True,
            enable_background_delete=False,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(str(folder), options=options, item_handlers=handlers)
        sys.unraisablehook = _without_closed_loops
        self._worker = concurrent.futures.ThreadPoolExecutor(1)
        self._saving: int | None = None  # written by orbax at this moment
        self._hashing: concurrent.futures.Future | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.finish()
        finally:
            self._worker.shutdown()
            self._manager.close()

    def save(self, step: int, state: Any, meta: dict, score: float | None) -> None:
        """Starts to save; returns when the state has been copied.

        Args:
          step: the number of updates made.
          state: a tree of arrays.
          meta: JSON.
          score: the evaluation loss at this step, or another number, if it was evaluated; the lowest is kept.

        Raises:
          InputError: an earlier checkpoint could not be written (a full disk, say).
        """
        self.finish()
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        with _writing(self.folder):
            self._manager.save(step, args=args, metrics=None if score is None else {"loss": score}, force=True)
        self._saving = step

    def poll(self) -> None:
        """Hashes a checkpoint whose write has ended since the last call; costs nothing otherwise."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            step, self._saving = self._saving, None
            with _writing(self.folder):
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
                if not (self.folder / str(step)).is_dir():  # orbax tells of a full disk at the next save only
                    raise OSError(f"step {step} was not committed, as on a full disk")
            if cluster.is_primary():
                self._hashing = self._worker.submit(_complete, self.folder, step)

    def finish(self) -> None:
        """Waits until the last checkpoint is written and hashed."""
        with _writing(self.folder):
            self._manager.wait_until_finished()
        self.poll()
        if self._hashing is not None:
            with _writing(self.folder):
                self._hashing.result()
            self._hashing = None

    def restore(self, step: int, shapes: Any) -> Any:
        """Returns the state of a step, placed as `shapes` (placed `ShapeDtypeStruct`s) says."""
        saved = self._manager.item_metadata(step)["state"]
        _check_shapes(f"{self.folder}/{step}", saved, shapes)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        return self._manager.restore(step, args=args)["state"]


def choose(folder: UPath, *, on_damage: str, best: bool = False) -> int | None:
    """Returns the newest complete step, verified; None if there is none.

    Args:
      folder: of the checkpoints.
      best: the one with the lowest score instead, of several the newest; one that was not evaluated comes last.
      on_damage: "stop", or "fallback" to the newest good step; damaged ones are set aside.

    Raises:
      DamageError: a file of the newest step is not what was written, and `on_damage` is "stop".
    """
    steps = complete_steps(folder)[::-1]
    for step in sorted(steps, key=lambda step: _score(folder, step)) if best else steps:
        damage = find_damage(folder, step)
        if damage is None:
            return step
        if on_damage != "fallback":
            raise DamageError(
                f"{folder / str(step)}: {damage}; restore that folder from a copy, or go on from the newest good "
                "checkpoint with --config.checkpoint.on_damage=fallback."
            )
        logger.warning("%s: %s; falling back to the checkpoint before it.", folder / str(step), damage)
        if cluster.is_primary():
            set_aside(folder, step, "damaged")
    return None


def _score(folder: UPath, step: int) -> float:
    """Returns the score that `save` was given, infinite if none."""
    file = folder / str(step) / "metrics" / "metrics"
    try:
        score = json.loads(file.read_text())["loss"] if file.is_file() else None
        return math.inf if score is None or math.isnan(score) else score
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):  # damaged: its hash will say so
        return -math.inf


def _step_folders(folder: UPath) -> list[int]:
    return [int(path.name) for path in children(folder) if path.name.isdecimal() and path.is_dir()]


def complete_steps(folder: UPath) -> list[int]:
    """Returns the steps whose hashes were written, in order; none if there is no such folder."""
    return sorted(step for step in _step_folders(folder) if (folder / str(step) / HASHES).is_file())


def set_aside(folder: UPath, step: int, why: str) -> None:
    """Renames a step's folder to "{why}.{step}", where orbax does not see it."""
    target = folder / f"{why}.{step}"
    number = 1
    while target.exists():
        number += 1
        target = folder / f"{why}.{step}.{number}"
    until = " until a later one is complete" if why == "incomplete" else ""
    logger.warning("%s is %s; it is kept as %s%s.", folder / str(step), why, target.name, until)
    move(folder / str(step), target, first=HASHES)


def write_hashes(folder: UPath, step: int) -> None:
    """Writes hashes.json into a step's folder, whole or not at all."""
    root = folder / str(step)
    hashes = {name: [path.stat().st_size, _sha256(path)] for name, path in sorted(_files(root).items())}
    write_text(root / HASHES, json.dumps(hashes, indent=0))


def _complete(folder: UPath, step: int) -> None:
    """Hashes a step, then removes the incomplete steps up to it: it stands in for them."""
    write_hashes(folder, step)
    for path in children(folder):
        match = INCOMPLETE.fullmatch(path.name)
        if match and int(match[1]) <= step and (is_remote(path) or not path.is_symlink()):
            try:
                _remove_committed(path)
            except Exception as error:  # a bucket's client raises its own; the next step tries again
                logger.warning("%s can't be removed (%s).", path, error)


def _remove_committed(folder: UPath) -> None:
    """Removes a folder that orbax has committed, and no other."""
    if not (folder / COMMITTED).is_file():
        return
    for part in children(folder):
        if part.name != COMMITTED:  # it goes last, so that a removal that was cut short is taken up again
            remove(part) if part.is_dir() else part.unlink()
    remove(folder)


def find_damage(folder: UPath, step: int) -> str | None:
    """Returns what is wrong with a step, naming the file; None if every file is as it was written."""
    root = folder / str(step)
    try:
        hashes = json.loads((root / HASHES).read_text())
        files = _files(root)
        for name, (size, digest) in hashes.items():
            if name not in files:
                return f"the file {name} is missing"
            if files[name].stat().st_size != size:
                return f"the file {name} has {files[name].stat().st_size} bytes where {size} were written"
            if _sha256(files[name]) != digest:
                return f"the file {name} is not what was written (its SHA-256 differs)"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return f"{HASHES} can't be read"
    return None


def read_meta(folder: UPath, step: int) -> dict:
    """Returns the metadata of a step: config, fingerprints, what is known of its data.

    Raises:
      InputError: this code can't read a checkpoint of that format.
    """
    found = json.loads((folder / str(step) / "meta" / "metadata").read_text())
    if found.get("format") != FORMAT:
        words = f"its format is {found.get('format')!r}, this code reads {FORMAT}; use the code that wrote it."
        raise InputError(f"{folder / str(step)}: {words}")
    return found


def restore_params(folder: UPath, step: int, shapes: Any, name: str) -> Any:
    """Returns one part of a saved state alone, "params" or "ema", placed as `shapes` says."""
    item = {name: shapes}
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(str(folder / str(step) / "state"), args=args)[name]


def _files(root: UPath) -> dict[str, UPath]:
    """Returns {path within the step: path} of all files but the hashes."""
    files = (path for path in root.rglob("*") if path.is_file() and not path.name.startswith(HASHES))
    return {path.relative_to(root).as_posix(): path for path in files}


def _sha256(path: UPath) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_shapes(where: str, saved: Any, shapes: Any) -> None:
    """Raises InputError naming the first array that differs: orbax would cast a dtype without a word."""
    old = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in named_leaves(saved)}
    new = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in named_leaves(shapes)}
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise InputError(
                f"{where} is of another model: {name} is {_words(old.get(name))} there "
                f"and {_words(new.get(name))} in this config."
            )


def _words(array: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if array is None else f"{array[1]}{list(array[0])}"


@contextmanager
def _writing(folder: UPath) -> Iterator[None]:
    """Turns an error of the file system during a save into a sentence."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, OSError) and "No space left" not in text and "RESOURCE_EXHAUSTED" not in text:
            raise
        raise InputError(
            f"{folder}: the checkpoint could not be written ({text.splitlines()[0][:200]}); the earlier ones are "
            "untouched: make room, and start the same command again."
        ) from error


def _without_closed_loops(unraisable: Any) -> None:
    """Drops what a failed save brings by the dozen: orbax has closed the event loop that tensorstore still answers."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
