"""Writes and restores checkpoints: orbax writes them, and the hashes written after the commit prove them."""

from __future__ import annotations

import concurrent.futures
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from mlm import cluster
from mlm.errors import InputError
from mlm.paths import UPath, children, is_remote, make_folder, remove
from mlm.pretrained.checkpoint_files import complete_steps, set_aside, step_folders, write_hashes
from mlm.training.sharding import named_leaves

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
            for step in sorted(set(step_folders(folder)) - set(complete_steps(folder))):
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
