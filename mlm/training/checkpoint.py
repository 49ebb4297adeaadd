"""Writes and restores checkpoints: orbax writes them, and once they are read back, hashes verify them."""

import concurrent.futures
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from ml_collections import ConfigDict
from orbax.checkpoint import v1
from orbax.checkpoint.checkpoint_managers import LatestN

from mlm import cluster
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, children, is_remote, remove
from mlm.pretrained.checkpoint_files import (
    complete_steps,
    reading,
    remove_steps,
    set_aside,
    step_folders,
    write_hashes,
)
from mlm.training.sharding import named_leaves

COMMITTED = "commit_success.txt"  # orbax writes this file last
# a step that was not fully written or hashed
INCOMPLETE = re.compile(r"incomplete\.([0-9]+)(\.[0-9]+)?")
# step -> further steps to keep; on the first host, in a thread
OnComplete = Callable[[int], Iterable[int | None]]
READ_BACK = 32  # arrays that are read back at once
SMALLEST_SLICE_BYTES = 2**16
logger = logging.getLogger(__name__)

# Of an array that several devices hold, each saves a slice, and compiles a program to cut it. For the many small arrays
# of a model that took seconds at the first save; one device saves those whole.
ORBAX_LOGGER = logging.getLogger("absl")
ORBAX_LOGGER.disabled = True  # it would warn at each start that its own handler is replaced
ocp.type_handlers.register_type_handler(
    jax.Array,
    ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=SMALLEST_SLICE_BYTES,
        # as in orbax's own handler: without it a random key is restored as its numbers
        array_metadata_store=v1.options.ArrayOptions.Saving().array_metadata_store,
    ),
    override=True,
)
ORBAX_LOGGER.disabled = False


class Checkpoints(AbstractContextManager):
    """The checkpoints of one run; a context manager that ends when, on every host, all of them are complete."""

    def __init__(
        self,
        folder: UPath,
        *,
        keep: int,
        milestones: Iterable[int] = (),
        on_complete: OnComplete | None = None,
    ):
        """Keeps the newest `keep` checkpoints, the one of lowest score, and `milestones`; hides incomplete ones."""
        self.folder = folder
        self._keep = keep
        self._milestones = list(milestones)
        self._on_complete = on_complete
        if cluster.is_primary():
            for step in sorted(set(step_folders(folder)) - set(complete_steps(folder))):
                # to move it in a bucket is to copy it
                if is_remote(folder) and not (folder / str(step) / COMMITTED).is_file():
                    remove(folder / str(step))
                else:
                    set_aside(folder, step, "incomplete")
        cluster.barrier("checkpoints opened")
        options = ocp.CheckpointManagerOptions(
            best_fn=lambda m: -m["loss"],  # without it the scores are not written
            # all: an older one goes when a newer one is complete
            preservation_policy=LatestN(None),
            cleanup_tmp_directories=True,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(str(folder), options=options, item_handlers=handlers)
        sys.unraisablehook = _ignore_closed_loops
        self._worker = concurrent.futures.ThreadPoolExecutor(1)
        self._saving: concurrent.futures.Future | None = None

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.finish()
        finally:
            self._worker.shutdown()
            with _writing(self.folder):  # orbax raises again what went wrong
                self._manager.close()
        if kind is None:
            # the first host hashes them, and all read them next
            cluster.barrier("checkpoints complete")

    def save(self, step: int, state: Any, meta: dict, score: float | None) -> None:
        """Starts to save, with the score if the step was evaluated; raises InputError for a full disk."""
        self.finish()
        meta = {
            key: value.to_dict() if isinstance(value, ConfigDict) else value
            for key, value in meta.items()
        }
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        with _writing(self.folder):
            score = math.nan if score is None else score  # orbax warns of a step without a score
            self._manager.save(step, args=args, metrics={"loss": score}, force=True)
        self._saving = self._worker.submit(self._complete, step, _describe(state), meta)

    def poll(self) -> None:
        """Raises what went wrong with a checkpoint that was written since the last call."""
        if self._saving is not None and self._saving.done():
            self.finish()

    def finish(self) -> None:
        """Waits until the last checkpoint is written and hashed."""
        if self._saving is not None:
            saving = self._saving
            self._saving = None
            with _writing(self.folder):
                saving.result()

    def _complete(self, step: int, arrays: dict[str, str], meta: dict) -> None:
        """Waits for orbax, then reads the step back and hashes it, and removes older and incomplete ones."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        # orbax reports a full disk at the next save
        if not (self.folder / str(step)).is_dir():
            raise OSError(f"step {step} was not committed, as on a full disk")
        if not cluster.is_primary():
            return
        _read_back(self.folder, step, arrays, meta)
        write_hashes(self.folder, step)
        needed = self._on_complete(step) if self._on_complete else ()
        remove_steps(self.folder, keep=self._keep, milestones=[*self._milestones, *needed])
        _remove_incomplete(self.folder, step)


def saved_tree(folder: UPath, step: int) -> Any:
    """Returns a saved state with the metadata of each array, its shape and dtype, in its place."""
    return (
        ocp.StandardCheckpointHandler().metadata(epath.Path(str(folder / str(step) / "state"))).tree
    )


def _describe(tree: Any) -> dict[str, str]:
    """Returns the dtype and shape of each array as it is saved: of a random key, those of its numbers."""

    def saved(leaf: Any) -> Any:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf

    return {
        name: f"{saved(leaf).dtype}{list(saved(leaf).shape)}" for name, leaf in named_leaves(tree)
    }


def _difference(saved: dict[str, str], wanted: dict[str, str]) -> str:
    """Returns what the first array is that differs, "" if none does; orbax would cast a dtype."""
    for name in sorted(saved.keys() | wanted.keys()):
        there = saved.get(name, "absent")
        here = wanted.get(name, "absent")
        if there != here:
            return f"{name} is {there} there, and {here} here"
    return ""


def restore(folder: UPath, step: int, shapes: Any) -> Any:
    """Returns the state of a step of a run's checkpoints, with the shardings of the abstract state `shapes`."""
    if difference := _difference(_describe(saved_tree(folder, step)), _describe(shapes)):
        raise InputError(
            f"{folder}/{step} is of another model or optimizer than this run's: {difference}."
        )
    with reading(folder, step), ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(str(folder / str(step) / "state"), shapes)


def _read_back(folder: UPath, step: int, arrays: dict[str, str], meta: dict) -> None:
    """Raises DamageError unless a step can be opened, holds what was saved, and each of its arrays can be read."""
    try:
        tree = saved_tree(folder, step)
        if difference := _difference(_describe(tree), arrays):
            raise ValueError(difference)
        if json.loads((folder / str(step) / "meta" / "metadata").read_text()) != json.loads(
            json.dumps(meta)
        ):
            raise ValueError("its metadata is not what was saved")
        leaves, structure = jax.tree.flatten(tree)
        kinds = structure.unflatten([ocp.RestoreArgs(restore_type=np.ndarray)] * len(leaves))
        # some at once: a pod's state may fit no single host
        for start in range(0, len(leaves), READ_BACK):
            chosen = [
                np.zeros((), leaf.dtype) if start <= n < start + READ_BACK else ocp.PLACEHOLDER
                for n, leaf in enumerate(leaves)
            ]
            args = ocp.args.PyTreeRestore(item=structure.unflatten(chosen), restore_args=kinds)
            # a new one: it has nothing in its cache
            with closing(ocp.PyTreeCheckpointHandler()) as handler:
                handler.restore(epath.Path(str(folder / str(step) / "state")), args=args)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise DamageError(
            f"{folder / str(step)}: can't be read back after it was saved ({reason}); the earlier checkpoints are "
            "untouched: check the disk, and start the same command again."
        ) from error


def _remove_incomplete(folder: UPath, step: int) -> None:
    """Removes the incomplete steps up to a complete one, if orbax committed them: others may hold a person's files."""
    for path in children(folder):
        match = INCOMPLETE.fullmatch(path.name)
        if not (match and int(match[1]) <= step and (path / COMMITTED).is_file()):
            continue
        try:
            remove(path)
        # a bucket's client raises its own errors; the next checkpoint tries again
        except Exception as error:
            logger.warning("%s can't be removed (%s).", path, error)


@contextmanager
def _writing(folder: UPath) -> Iterator[None]:
    """Turns an error of the file system into an InputError."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, OSError) and not re.search(
            "No space left|RESOURCE_EXHAUSTED", text
        ):
            raise
        raise InputError(
            f"{folder}: the checkpoint could not be written ({text.splitlines()[0][:200]}); the earlier ones are "
            "untouched: make room, and start the same command again."
        ) from error


def _ignore_closed_loops(unraisable: Any) -> None:
    """Hides dozens of tracebacks after a failed save, which would bury the sentence that says what to do.

    tensorstore's threads still answer the event loop that orbax's failed write has closed; neither has a setting for
    it, and the errors are raised where no caller can catch them.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
