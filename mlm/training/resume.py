"""Where a run starts: anew, from its newest checkpoint, or as a branch of another run."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from mlm import cluster, entry
from mlm import config as configs
from mlm.data import stages
from mlm.errors import InputError
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.training import branch, checkpoint
from mlm.training.budget import read_replay
from mlm.training.task import Task, TrainState
from mlm.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Start:
    """The step after which a run starts, and what it takes from there."""

    step: int
    meta: dict[str, Any]  # of the run's checkpoints, without what differs between them
    checkpoints: UPath
    source: branch.Source | None = None  # of a new branch
    milestones: frozenset[int] = frozenset()  # that were reached
    share: float = 0.0  # of train.hours, used
    replay: dict[int, int] | None = None

    def restore(self, task: Task) -> TrainState:
        """Returns the state to start from."""
        if self.source:
            return branch.restore(self.source, task.abstract_state, task.initial_state)
        if self.step:
            return checkpoint.restore(self.checkpoints, self.step, task.abstract_state)
        return task.initial_state()


def find_start(config: ConfigDict, workdir: Workdir, task: Task) -> Start:
    """Returns where a run starts; raises InputError if it can't resume, or branch off, with this config or data."""
    meta = {
        "format": checkpoint_files.FORMAT,
        "config": config,
        "config_fingerprint": configs.fingerprint(config),
        "data_fingerprint": task.data_fingerprint,
        "dataset": task.metadata,
        "class": entry.describe(type(task)),
    }
    newest = checkpoint_files.choose(workdir.checkpoints, on_damage=config.checkpoint.on_damage)
    saved, source, step = {}, None, newest or 0
    if newest is not None:
        saved = _check_resume(workdir, newest, meta)
    elif config.train.branch_from:
        source = branch.open_source(meta, workdir, task.stages)
        saved, step = source.inherited, source.step
    if "branch" in saved:
        meta["branch"] = saved["branch"]
        branch.check_milestones(meta)
    return Start(
        step,
        meta,
        workdir.checkpoints,
        source,
        frozenset(saved.get("milestones", ())),
        saved.get("share", 0.0),
        read_replay(config.train.replay, step) if config.train.replay else None,
    )


def _check_resume(workdir: Workdir, step: int, meta: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint's metadata; raises InputError if it was made with another config or other data."""
    folder, where = workdir.checkpoints, workdir.checkpoints / str(step)
    saved = checkpoint_files.read_meta(folder, step)
    if changes := configs.diff(saved["config"], meta["config"]):
        fix = "a resumed run can't change these keys; set them back, or use another --workdir"
        raise InputError(f"{where} was made with another config; {fix}:\n  " + "\n  ".join(changes))
    stages.check_skipped(
        saved["config"].data.skip_batches,
        meta["config"].data.skip_batches,
        step=step,
        steps=checkpoint_files.complete_steps(folder),
        where=str(folder),
    )
    entry.check_resume(saved["class"], meta["class"], str(where), f"{workdir.root}@{step}")
    if saved["data_fingerprint"] != meta["data_fingerprint"]:
        what = "was made from other shards or rows, or other proportions of them (their fingerprint differs)"
        raise InputError(f"{where} {what}; put the old data back, or use another --workdir.")
    return saved
