"""The training loop: batches in, a model out, and the same numbers however often it is stopped and started."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from mlm import cluster, logs
from mlm import config as configs
from mlm.cluster import distributed
from mlm.data import skip_batches
from mlm.errors import InputError, NumericsError, PreemptedError
from mlm.model import flops
from mlm.paths import staging_folder, upload, write_text
from mlm.pretrained import checkpoint_files
from mlm.training import checkpoint, sharding
from mlm.training.metrics import Log
from mlm.training.state import TrainState
from mlm.training.task import Task
from mlm.workdir import Workdir


def run_task(config: ConfigDict, workdir: Workdir, task: Task) -> dict[str, float]:
    """Trains to the task's last step from wherever the workdir's checkpoints are; returns the last scores.

    Raises:
      InputError: the config, the data and the checkpoint do not fit together.
      DamageError: a checkpoint is not what was written.
      NumericsError: too many non-finite updates in a row.
      PreemptedError: SIGTERM or Ctrl-C came; the state is saved.
    """
    meta = {
        "format": checkpoint_files.FORMAT,
        "config": configs.flatten(config),
        "config_fingerprint": configs.fingerprint(config),
        "data_fingerprint": task.data_fingerprint,
        "dataset": task.metadata,
    }
    found = checkpoint_files.choose(workdir.checkpoints, on_damage=config.checkpoint.on_damage)
    if found is not None:
        _refuse_changes(workdir, found, meta)
    if cluster.is_primary():
        write_text(workdir.config, configs.to_json(config) + "\n")
    with checkpoint.Checkpoints(workdir.checkpoints, keep=config.checkpoint.keep) as checkpoints:
        state = task.initial_state() if found is None else checkpoints.restore(found, task.shapes)
        log = _open_log(config, workdir, task, found or 0)
        try:
            task.attach_hooks(log)
            with distributed.StopSignal() as stop:
                loop = Loop(config, task, checkpoints, log, meta, stop, workdir)
                return loop.run_from(found or 0, state)
        finally:
            log.close()


@dataclasses.dataclass
class Loop:
    """The loop's fixed surroundings; `run_from` is the loop."""

    config: ConfigDict
    task: Task
    checkpoints: checkpoint.Checkpoints
    log: Log
    meta: dict
    stop: distributed.StopSignal
    workdir: Workdir
    trace: Path | None = None  # a profile is being taken, into this folder

    def run_from(self, start: int, state: TrainState) -> dict[str, float]:
        """Makes the updates `start` + 1 to the last; returns the scores after the last, at once if it was made."""
        task, steps, rows = self.task, self.task.steps, self.config.data.global_batch
        if start >= steps:
            return logs.read(self.workdir.metrics, "eval")[-1]
        input_ = task.batches(start)
        pending: tuple[int, Any] | None = None  # metrics of a step, read when the next one is under way
        scores: dict[str, float] | None = None
        for step in range(start + 1, steps + 1):
            self._profile(step, state)
            train_step = task.step_at(step)
            first = step == start + 1 or train_step is not task.step_at(step - 1)  # it opens the data, or compiles
            if first and pending:
                pending = self._read(*pending)
            cluster.progress("start" if first else "input", step)
            batch = sharding.put_batch(next(input_), task.mesh, rows)
            cluster.progress("compile" if first else "step", step)
            distributed.compile_together(train_step, state, batch)
            with jax.profiler.StepTraceAnnotation("train", step_num=step), jax.transfer_guard("disallow"):
                state, metrics = train_step(state, batch)
            if first:
                self._first_step_done(step, metrics)
            if pending:
                self._read(*pending)
            last = step == steps
            pending = (step, metrics) if last or step % self.config.log.every == 0 else None
            stopped = self.stop.requested(step)
            ends = last or task.is_epoch_end(step)
            evaluates = ends or _due(step, self.config.evaluate.every)
            saves = ends or stopped or _due(step, self.config.checkpoint.every)
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
                raise PreemptedError(f"stopped after step {step} of {steps}, saved; start the same command to go on.")
        self._check_traces()
        return scores

    def _first_step_done(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self.log.flops_per_token = self.task.flops_per_token(step)
        begin = time.monotonic()
        jax.block_until_ready(metrics)
        self.log.time("first_step", step, seconds=round(time.monotonic() - begin, 3))
        self.log.restart_clock(step)

    def _read(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Logs the metrics of `step`; raises NumericsError if the guard has closed."""
        self.log.train(step, metrics)
        bad = int(metrics["bad_in_row"])
        if bad >= self.config.train.guard_limit:
            raise NumericsError(
                f"step {step}: {bad} updates in a row were not finite (train.guard_limit = "
                f"{self.config.train.guard_limit}), the last good one was {step - bad}; lower the learning rate or "
                "lengthen the warmup, and start again from the last checkpoint."
            )

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        cluster.progress("evaluate", step)
        with self.log.paused("eval", step):
            scores = self.task.evaluate(state.best_params)
        self.log.evaluation(step, scores)
        return scores

    def _save(self, step: int, state: TrainState, metrics: dict, scores: dict[str, float] | None) -> None:
        if int(metrics["bad_in_row"]) >= self.config.train.guard_limit:
            self._read(step, metrics)  # says what happened, and saves nothing
        cluster.progress("save", step)
        self.log.flush()
        with self.log.paused("checkpoint", step):
            self.checkpoints.save(
                step, state, self.meta | {"step": step}, scores and self.task.minimized_metric(scores)
            )

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

    def _check_traces(self) -> None:
        compiled = max(made._cache_size() for made in map(self.task.step_at, (1, self.task.steps)))
        if compiled > self.task.expected_compiles:
            self.log.say(f"warning: the step was compiled {compiled} times; its inputs changed shape or sharding.")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _refuse_changes(workdir: Workdir, step: int, meta: dict) -> None:
    """Raises InputError if this config or these shards are not those that the checkpoint was made with."""
    where = workdir.checkpoints / str(step)
    saved = checkpoint_files.read_meta(workdir.checkpoints, step)
    changed = configs.diff(saved["config"], meta["config"])
    if changed:
        raise InputError(
            f"{where} was made with another config; a run can't change these keys, use another --workdir, or set them "
            "back:\n  " + "\n  ".join(changed)
        )
    skip_batches.check_resume(
        saved["config"].get("data.skip_batches", ()),
        meta["config"]["data.skip_batches"],
        step=step,
        steps=checkpoint_files.complete_steps(workdir.checkpoints),
        where=str(workdir.checkpoints),
    )
    if saved["data_fingerprint"] != meta["data_fingerprint"]:
        raise InputError(
            f"{where} was made from other shards or rows (their fingerprint differs); use another --workdir, or put "
            "the old ones back."
        )


def _open_log(config: ConfigDict, workdir: Workdir, task: Task, start: int) -> Log:
    peak = flops.peak_flops(jax.devices()[0].device_kind)
    return Log(
        workdir.root,
        start=start,
        steps=task.steps,
        tokens_per_step=task.tokens_per_step,
        flops_per_token=task.flops_per_token(start + 1),
        peak_flops=peak and peak * jax.device_count(),
        tensorboard=config.log.tensorboard,
        wandb=config.log.wandb,
        config=configs.flatten(config),
    )
