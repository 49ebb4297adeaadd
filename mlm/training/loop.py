"""The training loop. A run of steps or epochs gives the same numbers however often it is stopped and restarted."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import cluster, entry, logs
from mlm import config as configs
from mlm.cluster import distributed
from mlm.data import skip_batches
from mlm.errors import InputError, NumericsError, PreemptedError
from mlm.model.module import Params
from mlm.monitor.metrics_hooks import MetricsHook
from mlm.paths import staging_folder, upload, write_text
from mlm.pretrained import checkpoint_files
from mlm.training import branch, checkpoint, recipe, sharding
from mlm.training.budget import Budget, read_replay
from mlm.training.metrics import Log
from mlm.training.state import TrainState
from mlm.training.step import TrainStep
from mlm.workdir import Workdir


class Task(Protocol):
    """The data and objective of a run, a class in mlm/tasks/; holds no device arrays."""

    mesh: Mesh
    steps: int  # in total; with train.hours, those of the schedules
    train_step: TrainStep
    shapes: TrainState  # abstract, with shardings, from `state.jit_init`
    metadata: dict[str, Any]  # of data and model, as JSON: saved with a checkpoint, for those who load it
    data_fingerprint: str  # a run can't resume on other data
    expected_compiles: int = 1  # of a train step: one for each row length of its batches

    def step_at(self, step: int, position: int | None = None) -> TrainStep:
        """Returns the jitted train step of `step`, from 1 up; `position` is its schedule step if that differs."""
        return self.train_step

    def rows_at(self, step: int) -> int:
        """Returns the rows of the global batch of a step, counted from 1."""

    def tokens_read(self, step: int) -> float:
        """Returns the tokens that the steps up to `step` read, for the throughput."""

    def initial_state(self) -> TrainState:
        """Returns the state before the first step."""

    def batches(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        """Returns this host's rows of the batches after step `start`."""

    def evaluate(self, params: Params) -> dict[str, Any]:
        """Returns the scores of the validation split, "loss" among them; the same on every host."""

    def is_epoch_end(self, step: int) -> bool:
        """Returns whether to evaluate and save after this step, whatever the config's intervals are."""
        return False

    def minimized_metric(self, scores: dict[str, Any]) -> float:
        """Returns the score that the best checkpoint minimizes."""
        return scores["loss"]

    def flops_per_token(self, step: int) -> float:
        """Returns the useful FLOPs of a step per token, for MFU."""

    def words_per_row(self) -> float:
        """Returns the words of training text in a row, for milestones."""
        raise InputError("config.checkpoint.milestones: only pretraining can count words; give them in steps.")

    def make_hooks(self, notify: Callable[[str], None]) -> list[MetricsHook]:
        """Returns the metrics hooks of the run, on the first host; `notify` prints a message."""
        return []


def run_task(config: ConfigDict, workdir: Workdir, task: Task) -> dict[str, float]:
    """Trains from the newest checkpoint, or that of train.branch_from, to the last step; returns the last scores."""
    meta = {
        "format": checkpoint_files.FORMAT,
        "config": configs.flatten(config),
        "config_fingerprint": configs.fingerprint(config),
        "data_fingerprint": task.data_fingerprint,
        "dataset": task.metadata,
        "class": entry.describe(type(task)),
    }
    found = checkpoint_files.choose(workdir.checkpoints, on_damage=config.checkpoint.on_damage)
    saved, source = {} if found is None else _check_resume(workdir, found, meta), None
    if found is None and config.train.branch_from:
        source = branch.open_source(meta, workdir, task.steps)
        saved = source.inherited
    if "branch" in saved:
        meta["branch"] = saved["branch"]
        branch.check_milestones(meta)
    start = source.step if source else found or 0
    replay = read_replay(config.train.replay, start) if config.train.replay else None  # before anything is written
    milestones = recipe.milestone_steps(meta["config"], task.steps, task.words_per_row)
    milestones = {*milestones, *saved.get("milestones", ())}
    if cluster.is_primary():
        write_text(workdir.config, config.to_json(indent=1) + "\n")
    with checkpoint.Checkpoints(workdir.checkpoints, keep=config.checkpoint.keep, milestones=milestones) as checkpoints:
        if source:
            state = branch.restore(source, task.shapes, task.initial_state)
        elif found is None:
            state = task.initial_state()
        else:
            state = checkpoint.restore(workdir.checkpoints, found, task.shapes)
        hours, share = config.train.hours, saved.get("share", 0.0)
        sizes = {"steps": None if hours else task.steps, "tokens_read": task.tokens_read}
        with Log(workdir.root, meta["config"], start=start, **sizes) as log, distributed.StopSignal() as stop:
            if cluster.is_primary():
                log.hooks += task.make_hooks(log.notify)
            budget = Budget(hours, replay, start=start, share=share, log=log) if hours else None
            return Loop(config, task, checkpoints, log, meta, stop, workdir, milestones, budget).run_from(start, state)


@dataclasses.dataclass
class Loop:
    """The objects that the loop uses; `run_from` is the loop."""

    config: ConfigDict
    task: Task
    checkpoints: checkpoint.Checkpoints
    log: Log
    meta: dict
    stop: distributed.StopSignal
    workdir: Workdir
    milestones: set[int]
    budget: Budget | None  # with train.hours
    trace: Path | None = None  # folder of the profile being recorded

    def run_from(self, start: int, state: TrainState) -> dict[str, float]:
        """Runs the steps after `start`; returns the scores after the last, from the log if it was run before."""
        task, steps, budget, used = self.task, self.task.steps, self.budget, set()
        if budget.share >= 1 if budget else start >= steps:
            if not (lines := logs.read(self.workdir.metrics, "eval")):
                what = "the run is finished, but its evaluations are missing here"
                raise InputError(f"{self.workdir.metrics}: {what}; restore the file, or use `evaluate`.")
            return lines[-1]
        batches = task.batches(start)
        pending: tuple[int, Any] | None = None  # metrics of a step, read when the next one is dispatched
        scores: dict[str, float] | None = None
        train_step: TrainStep | None = None
        metrics: dict[str, jax.Array] | None = None
        for step in itertools.count(start + 1):
            self._profile(step, state)
            share = budget and budget.start_step(step, metrics)
            position = step if share is None else max(round(share * steps), 1)
            before, train_step = train_step, task.step_at(step, position)
            first = train_step is not before  # the first call opens the data, or compiles
            if first and pending:
                pending = self._read(*pending)
            cluster.progress("start" if first else "input", step)
            columns = next(batches)
            if budget:
                columns["share"] = np.full(len(columns["epoch"]), share, np.float32)
            batch = sharding.put_batch(columns, task.mesh, task.rows_at(step))
            cluster.progress("compile" if first else "step", step)
            distributed.compile_together(train_step, state, batch)
            with jax.profiler.StepTraceAnnotation("train", step_num=step), jax.transfer_guard("disallow"):
                state, metrics = train_step(state, batch)
            if first:
                used.add(train_step)
                self.log.flops_per_token = task.flops_per_token(position)
                with self.log.paused("first_step", step):
                    jax.block_until_ready(metrics)
                self.log.restart_clock(step)
                if budget:
                    budget.restart_clock()
            if pending:
                self._read(*pending)
            last = step >= steps if share is None else share >= 1
            pending = (step, metrics) if last or step % self.config.log.every == 0 else None
            stopped = self.stop.requested(step)
            ends = last or task.is_epoch_end(step) or step in self.milestones
            evaluates = ends or _is_due(step, self.config.evaluate.every)
            saves = ends or stopped or _is_due(step, self.config.checkpoint.every)
            if pending and (evaluates or saves):
                pending = self._read(*pending)
            scores = self._evaluate(step, state) if evaluates else None
            if saves:
                self._save(step, state, metrics, scores)
            self.checkpoints.poll()
            if self.trace and (last or stopped):
                self._end_profile(state)
            if stopped and not last:
                self.checkpoints.finish()
                of = f"{share:.1%} of train.hours" if budget else str(steps)
                raise PreemptedError(f"stopped after step {step} of {of}, and saved; run the same command to continue.")
            if last:
                break
        compiles = max(made._cache_size() for made in used)
        if compiles > task.expected_compiles:
            self.log.notify(f"warning: the step was compiled {compiles} times; its inputs changed shape or sharding.")
        return scores

    def _read(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Logs the metrics of a step; raises NumericsError if the nonfinite guard stops the run."""
        self.log.train(step, metrics)
        if self.budget:
            self.budget.record()
        nonfinite = int(metrics["consecutive_nonfinite"])
        if nonfinite >= self.config.train.guard_limit:
            what = f"{nonfinite} steps in a row were not finite (train.guard_limit = {self.config.train.guard_limit})"
            fix = "start a new --workdir or a branch (train.branch_from) with a lower learning rate or a longer warmup"
            raise NumericsError(f"step {step}: {what}, the last good one was {step - nonfinite}; {fix}.")

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        cluster.progress("evaluate", step)
        jax.block_until_ready(state.step)  # training, so not part of the pause
        with self.log.paused("eval", step):
            scores = self.task.evaluate(state.best_params)
        self.log.evaluation(step, scores)
        return scores

    def _save(self, step: int, state: TrainState, metrics: dict, scores: dict[str, float] | None) -> None:
        if int(metrics["consecutive_nonfinite"]) >= self.config.train.guard_limit:
            self._read(step, metrics)  # raises
        cluster.progress("save", step)
        own = {"step": step, "milestones": sorted(milestone for milestone in self.milestones if milestone <= step)}
        if self.budget:
            self.budget.record()
            own["share"] = self.budget.share
        self.log.flush()
        with self.log.paused("checkpoint", step):
            metric = scores and self.task.minimized_metric(scores)
            self.checkpoints.save(step, state, self.meta | own, metric)

    def _profile(self, step: int, state: TrainState) -> None:
        first = self.config.log.profile_start
        if first and step == first:
            self.trace = staging_folder(self.workdir.root / "profile")
            jax.profiler.start_trace(str(self.trace))
        if self.trace and step == first + self.config.log.profile_steps:
            self._end_profile(state)

    def _end_profile(self, state: TrainState) -> None:
        jax.block_until_ready(state.step)
        jax.profiler.stop_trace()
        upload(self.trace, self.workdir.root / "profile")
        self.trace = None


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _check_resume(workdir: Workdir, step: int, meta: dict) -> dict[str, Any]:
    """Returns the checkpoint's metadata; raises InputError if it was made with another config or other data."""
    folder, where = workdir.checkpoints, workdir.checkpoints / str(step)
    saved = checkpoint_files.read_meta(folder, step)
    changed = configs.diff(saved["config"], meta["config"])
    if changed:
        fix = "a resumed run can't change these keys; set them back, or use another --workdir"
        raise InputError(f"{where} was made with another config; {fix}:\n  " + "\n  ".join(changed))
    skipped = (saved["config"].get("data.skip_batches", ()), meta["config"]["data.skip_batches"])
    steps = checkpoint_files.complete_steps(folder)
    skip_batches.check_resume(*skipped, step=step, steps=steps, where=str(folder))
    remark = entry.check_resume(saved.get("class", {}), meta["class"], str(where), f"{workdir.root}@{step}")
    if remark and cluster.is_primary():
        print(remark, file=sys.stderr, flush=True)
    if saved["data_fingerprint"] != meta["data_fingerprint"]:
        what = "was made from other shards or rows, or other proportions of them (their fingerprint differs)"
        raise InputError(f"{where} {what}; put the old data back, or use another --workdir.")
    return saved
