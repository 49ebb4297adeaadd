"""Where a run starts: anew, from its newest checkpoint, or as a branch of another run."""

import bisect
import dataclasses
import sys
from typing import Any

from ml_collections import ConfigDict

from mlm import cluster, entry
from mlm import config as configs
from mlm.config_rules import parse_words
from mlm.data import stages
from mlm.errors import InputError
from mlm.model import keys
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.text import say
from mlm.training import branch, checkpoint
from mlm.training.task import Task, TrainState
from mlm.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Start:
    """The step after which a run starts, and what it takes from there."""

    step: int
    meta: dict[str, Any]  # of the run's checkpoints, without what differs between them
    checkpoints: UPath
    newest: int | None  # checkpoint of the run itself
    source: branch.Source | None  # of a new branch
    milestones: set[int]  # the steps to keep for good

    @property
    def saves_initial_state(self) -> bool:
        """Whether checkpoint.milestones has 0, and there is no checkpoint yet."""
        return 0 in self.milestones and self.newest is None and self.source is None

    def restore(self, task: Task) -> TrainState:
        """Returns the state to start from."""
        if self.source:
            return branch.restore(self.source, task.abstract_state, task.initial_state)
        if self.newest is not None:
            return checkpoint.restore(self.checkpoints, self.newest, task.abstract_state)
        return task.initial_state()

    def metadata(self, task: Task, step: int) -> dict[str, Any]:
        """Returns the metadata of the checkpoint of a step."""
        reached = sorted(milestone for milestone in self.milestones if milestone <= step)
        flops = self.meta.get("branch", {}).get("useful_flops", 0.0) + task.useful_flops(step)
        return self.meta | {"step": step, "milestones": reached, "useful_flops": flops}


def find_start(config: ConfigDict, workdir: Workdir, task: Task) -> Start:
    """Returns where a run starts; raises InputError if it can't resume, or branch off, with this config or data."""
    meta = {
        "format": checkpoint_files.FORMAT,
        "config": config,
        "config_fingerprint": configs.fingerprint(config),
        "data_fingerprint": task.data_fingerprint,
        "dataset": task.metadata,
        "class": entry.describe(type(task)),
        "numerics": keys.unstated(),
    }
    newest = checkpoint_files.choose(workdir.checkpoints, on_damage=config.checkpoint.on_damage)
    saved: dict[str, Any] = {}
    source = None
    step = newest or 0
    if newest is not None:
        saved = _check_resume(workdir, newest, meta)
    elif config.train.branch_from:
        source = branch.open_source(meta, task.stages)
        saved = {"branch": source.lineage}
        step = source.step
    if "branch" in saved:
        meta["branch"] = saved["branch"]
    same_rows = saved.get("branch", {"same_rows": True})["same_rows"]
    milestones = find_milestones(config, task, same_rows=same_rows)
    milestones.update(saved.get("milestones", ()))
    return Start(step, meta, workdir.checkpoints, newest, source, milestones)


def _check_resume(workdir: Workdir, step: int, meta: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint's metadata; raises InputError if it was made with another config or other data."""
    folder = workdir.checkpoints
    where = folder / str(step)
    saved = checkpoint_files.read_meta(folder, step)
    configs.check_version(saved["config"], str(where))
    if changes := configs.diff(saved["config"], meta["config"]):
        fix = "a resumed run can't change these keys; set them back, or use another --workdir"
        if all(configs.branch_may_change(change.partition(":")[0]) for change in changes):
            fix += f", and to go on from here with them, --config.train.branch_from={workdir.root}@{step}"
        raise InputError(f"{where} was made with another config; {fix}:\n  " + "\n  ".join(changes))
    stages.check_skipped(
        saved["config"].data.skip_batches,
        meta["config"].data.skip_batches,
        step=step,
        steps=checkpoint_files.complete_steps(folder),
        where=str(folder),
    )
    entry.check_resume(saved["class"], meta["class"], str(where), f"{workdir.root}@{step}")
    for name, value in saved.get("numerics", {}).items():
        now = meta["numerics"].get(name)
        if now != value:
            raise InputError(
                f"{where}: was made with {name} = {value!r}, which changes the numbers, and it is {now!r} now; set it "
                "back, or use another --workdir."
            )
    if cluster.is_primary():
        for change in entry.changes(saved["class"], meta["class"]):
            say(f"{where}: resumes with other code; {change}")
    if saved["data_fingerprint"] != meta["data_fingerprint"]:
        raise InputError(
            f"{where} was made from other shards or rows, or other proportions of them (their fingerprint differs); "
            "put the old data back, or use another --workdir."
        )
    return saved


def find_milestones(config: ConfigDict, task: Task, *, same_rows: bool) -> set[int]:
    """Returns the steps of checkpoint.milestones; raises InputError for one past the end of the run.

    Words can't be counted if a branch's source did not read the `same_rows`.
    """
    milestones: set[int] = set()
    for text in map(str, config.checkpoint.milestones):
        kind, _, value = text.rpartition(":")
        if kind == "words" and not same_rows:
            raise InputError(
                f"config.checkpoint.milestones: {config.train.branch_from} read different rows, so words can't be "
                "counted across both runs; give them in steps."
            )
        if kind == "words":
            steps = _steps_of_words(task, parse_words(value))
        elif kind == "every":
            steps = [int(value), *range(2 * int(value), task.stages.steps + 1, int(value))]
        else:
            steps = [int(value)]
        if max(steps) > task.stages.steps:
            raise InputError(
                f"config.checkpoint.milestones: {text} is reached at step {max(steps):,}, but the run ends after step "
                f"{task.stages.steps:,}; remove it, or train longer."
            )
        milestones.update(steps)
    return milestones


def _steps_of_words(task: Task, counts: range) -> list[int]:
    """Returns the first step after which each number of words has been read, and prints them."""
    words_per_row = task.words_per_row()
    steps = [
        bisect.bisect_left(range(sys.maxsize), words / words_per_row, key=task.stages.rows_read)
        for words in counts
    ]
    if cluster.is_primary():
        reached = ", ".join(
            f"{words:,} at step {step:,}" for words, step in zip(counts, steps, strict=True)
        )
        say(f"milestones, at {words_per_row:,.1f} words per row: {reached}")
    return steps
