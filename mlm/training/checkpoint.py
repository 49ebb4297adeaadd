"""Writes and restores checkpoints: orbax writes them, and hashes written after the commit verify them."""

import concurrent.futures
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, CustomSteps, LatestN

from mlm import cluster
from mlm.errors import InputError
from mlm.paths import UPath, children, is_remote, make_folder, remove
from mlm.pretrained.checkpoint_files import complete_steps, set_aside, step_folders, write_hashes
from mlm.training.sharding import named_leaves

COMMITTED = "commit_success.txt"  # in a bucket, orbax writes this file last
INCOMPLETE = re.compile(r"incomplete\.([0-9]+)(\.[0-9]+)?")  # a step that was not fully written or hashed
logger = logging.getLogger(__name__)


class Checkpoints(AbstractContextManager):
    """The checkpoints of one run; a context manager that ends when, on every host, all of them are complete."""

    def __init__(self, folder: UPath, *, keep: int, milestones: Iterable[int] = ()):
        """Keeps the newest `keep` checkpoints, the one of lowest score, and `milestones`; hides incomplete ones."""
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
            best_fn=lambda m: -m["loss"],  # without it the scores are not written, which the policy needs on restart
            preservation_policy=AnyPreservationPolicy([LatestN(keep), best, CustomSteps(list(milestones))]),
            cleanup_tmp_directories=True,
            enable_background_delete=False,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(str(folder), options=options, item_handlers=handlers)
        sys.unraisablehook = _ignore_closed_loops
        self._worker = concurrent.futures.ThreadPoolExecutor(1)
        self._saving: int | None = None  # the step that orbax is writing
        self._hashing: concurrent.futures.Future | None = None

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.finish()
        finally:
            self._worker.shutdown()
            self._manager.close()
        if kind is None:
            cluster.barrier("checkpoints complete")  # the first host hashes them, and all read them next

    def save(self, step: int, state: Any, meta: dict, score: float | None) -> None:
        """Starts to save, with the score if the step was evaluated; raises InputError for a full disk."""
        self.finish()
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        with _writing(self.folder):
            self._manager.save(step, args=args, metrics=None if score is None else {"loss": score}, force=True)
        self._saving = step

    def poll(self) -> None:
        """Hashes a checkpoint that was written since the last call."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            step, self._saving = self._saving, None
            with _writing(self.folder):
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
                if not (self.folder / str(step)).is_dir():  # orbax reports a full disk at the next save
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


def saved_leaves(folder: UPath, step: int) -> dict[str, Any]:
    """Returns {name: metadata, with its shape and dtype} of a saved state."""
    found = ocp.StandardCheckpointHandler().metadata(epath.Path(str(folder / str(step) / "state")))
    return dict(named_leaves(found.tree))


def restore(folder: UPath, step: int, shapes: Any) -> Any:
    """Returns the state of a step of a run's checkpoints, with the shardings of the abstract state `shapes`."""
    trees = (saved_leaves(folder, step), dict(named_leaves(shapes)))
    old, new = ({name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in tree.items()} for tree in trees)
    for name in sorted(old.keys() | new.keys()):  # orbax would cast a dtype silently
        there, here = old.get(name, "absent"), new.get(name, "absent")
        if there != here:
            what = f"{name} is {there} there and {here} in this config"
            raise InputError(f"{folder}/{step} is of another model: {what}.")
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(str(folder / str(step) / "state"), shapes)


def _complete(folder: UPath, step: int) -> None:
    """Hashes a step, then removes the incomplete steps up to it."""
    write_hashes(folder, step)
    for path in children(folder):
        match = INCOMPLETE.fullmatch(path.name)
        ours = match and int(match[1]) <= step and (is_remote(path) or not path.is_symlink())
        if not ours or not (path / COMMITTED).is_file():
            continue
        try:
            for part in children(path):
                if part.name != COMMITTED:  # removed last, so that an interrupted removal is taken up again
                    remove(part) if part.is_dir() else part.unlink()
            remove(path)
        except Exception as error:  # a bucket's client raises its own; the next checkpoint tries again
            logger.warning("%s can't be removed (%s).", path, error)


@contextmanager
def _writing(folder: UPath) -> Iterator[None]:
    """Turns an error of the file system into an InputError."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, OSError) and "No space left" not in text and "RESOURCE_EXHAUSTED" not in text:
            raise
        what = f"the checkpoint could not be written ({text.splitlines()[0][:200]}); the earlier ones are untouched"
        raise InputError(f"{folder}: {what}: make room, and start the same command again.") from error


def _ignore_closed_loops(unraisable: Any) -> None:
    """Hides the many errors after a failed save: tensorstore still answers an event loop that orbax has closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
