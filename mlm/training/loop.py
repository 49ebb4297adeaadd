"""The training loop: batches in, a model out, and the same numbers however often it is stopped and started."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import config as configs
from mlm import distributed, flops, logs, watch
from mlm.data import batches
from mlm.data.manifest import Manifest
from mlm.errors import DamageError, InputError, NumericsError, PreemptedError
from mlm.paths import local_place, put_tree, write_text
from mlm.training import build, checkpoint, evaluation, sharding
from mlm.training.metrics import Log
from mlm.training.state import TrainState
from mlm.workdir import Workdir


def train(config: ConfigDict, workdir: Workdir, manifest: Manifest) -> dict[str, float]:
    """Trains to the config's last step from wherever the workdir's checkpoints are; returns the last scores.

    Raises:
      InputError: the config, the data and the checkpoint do not fit together.
      DamageError: a checkpoint is not what was written.
      NumericsError: too many non-finite updates in a row.
      PreemptedError: SIGTERM or Ctrl-C came; the state is saved.
    """
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    facts = facts_of(manifest)
    run = build.build_run(config, facts, mesh)
    sharding.check_batch(mesh, rows=config.evaluate.batch, key="evaluate.batch")
    meta = {
        "format": 1,
        "config": configs.flatten(config),
        "config_fingerprint": configs.fingerprint(config),
        "data_fingerprint": manifest.fingerprint,
        "facts": dataclasses.asdict(facts),
    }
    found = checkpoint.choose(workdir.checkpoints, on_damage=config.checkpoint.on_damage)
    if found is not None:
        _refuse_changes(workdir, found, meta)
    if jax.process_index() == 0:
        write_text(workdir.config, configs.to_json(config) + "\n")
    with checkpoint.Checkpoints(workdir.checkpoints, keep=config.checkpoint.keep) as checkpoints:
        state = _fresh(config, manifest, run) if found is None else checkpoints.restore(found, run.shapes)
        log = _open_log(config, workdir, run, facts, found or 0)
        try:
            with distributed.StopSignal() as stop:
                loop = Loop(config, manifest, run, checkpoints, log, meta, stop, workdir)
                return loop.run_from(found or 0, state)
        finally:
            log.close()


@dataclasses.dataclass
class Loop:
    """The loop's fixed surroundings; `run_from` is the loop."""

    config: ConfigDict
    manifest: Manifest
    run: build.Run
    checkpoints: checkpoint.Checkpoints
    log: Log
    meta: dict
    stop: distributed.StopSignal
    workdir: Workdir
    trace: Path | None = None  # a profile is being taken, into this folder

    def run_from(self, start: int, state: TrainState) -> dict[str, float]:
        """Makes the updates `start` + 1 to the last; returns the scores after the last, at once if it was made."""
        steps, rows = self.run.steps, self.config.data.global_batch
        if start >= steps:
            return logs.read(self.workdir.metrics, "eval")[-1]
        input_ = train_batches(self.config, self.manifest, self.run.mesh, start)
        pending: tuple[int, Any] | None = None  # metrics of a step, read when the next one is under way
        scores: dict[str, float] | None = None
        for step in range(start + 1, steps + 1):
            self._profile(step, state)
            first = step == start + 1  # it opens the shards and compiles
            watch.at("start" if first else "input", step)
            batch = sharding.put_batch(next(input_), self.run.mesh, rows)
            watch.at("compile" if first else "step", step)
            distributed.compile_together(self.run.train_step, state, batch)
            with jax.profiler.StepTraceAnnotation("train", step_num=step), jax.transfer_guard("disallow"):
                state, metrics = self.run.train_step(state, batch)
            if first:
                self._first_step_done(step, metrics)
            if pending:
                self._read(*pending)
            last = step == steps
            pending = (step, metrics) if last or step % self.config.log.every == 0 else None
            stopped = self.stop.requested(step)
            evaluates = last or _due(step, self.config.evaluate.every)
            saves = last or stopped or _due(step, self.config.checkpoint.every)
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
        watch.at("evaluate", step)
        with self.log.paused("eval", step):
            run = self.run
            scores = evaluate_split(
                self.config, self.manifest, run.mesh, run.eval_step, state.best_params, "validation"
            )
        self.log.evaluation(step, scores)
        return scores

    def _save(self, step: int, state: TrainState, metrics: dict, scores: dict[str, float] | None) -> None:
        if int(metrics["bad_in_row"]) >= self.config.train.guard_limit:
            self._read(step, metrics)  # says what happened, and saves nothing
        watch.at("save", step)
        self.log.flush()
        with self.log.paused("checkpoint", step):
            self.checkpoints.save(step, state, self.meta | {"step": step}, scores and scores["loss"])

    def _profile(self, step: int, state: TrainState) -> None:
        first = self.config.log.profile_start
        if first and step == first:
            self.trace = local_place(self.workdir.root / "profile")
            jax.profiler.start_trace(str(self.trace))
        if self.trace and step == first + self.config.log.profile_steps:
            self._end_profile(state)

    def _end_profile(self, state: TrainState) -> None:
        jax.block_until_ready(state.step)
        jax.profiler.stop_trace()
        put_tree(self.trace, self.workdir.root / "profile")
        self.trace = None

    def _check_traces(self) -> None:
        compiled = self.run.train_step._cache_size()
        if compiled > 1:
            self.log.say(f"warning: the step was compiled {compiled} times; its inputs changed shape or sharding.")


def train_batches(config: ConfigDict, manifest: Manifest, mesh: Mesh, start: int) -> Iterator[dict[str, np.ndarray]]:
    """Returns this host's rows of the batches that the updates after `start` consume."""
    rows = config.data.global_batch
    return batches.train_batches(
        manifest,
        split="train",
        seed=config.data.seed,
        global_batch=rows,
        lanes=config.data.lanes,
        start_step=start,
        rows=sharding.local_rows(mesh, rows),
    )


def evaluate_split(
    config: ConfigDict, manifest: Manifest, mesh: Mesh, eval_step: Callable, params: Any, split: str
) -> dict[str, float]:
    """Returns the scores of a split (see `evaluation.score`)."""
    rows = config.evaluate.batch
    facts = manifest.splits[split]
    return evaluation.score(
        eval_step,
        params,
        watch.beats(batches.eval_batches(manifest, split=split, batch=rows, rows=sharding.local_rows(mesh, rows))),
        mesh=mesh,
        rows=rows,
        tokens_per_byte=facts.tokens / facts.text_bytes if facts.text_bytes else None,
    )


def facts_of(manifest: Manifest) -> build.DataFacts:
    """Returns what the model needs to know of the data."""
    return build.DataFacts(
        vocab_size=manifest.vocab_size,
        special_ids=dict(manifest.special_ids),
        all_special_ids=tuple(manifest.all_special_ids),
        length=manifest.length,
        records=manifest.splits["train"].records,
    )


def _fresh(config: ConfigDict, manifest: Manifest, run: build.Run) -> TrainState:
    if config.model.init == "stock":
        return run.init()
    counts_V = np.zeros(run.model.config.vocab_size, np.float32)
    counts_V[: manifest.vocab_size] = batches.count_tokens(manifest, split="train")
    return run.init(counts_V)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _refuse_changes(workdir: Workdir, step: int, meta: dict) -> None:
    """Raises InputError if this config or these shards are not those that the checkpoint was made with."""
    where = workdir.checkpoints / str(step)
    saved = checkpoint.read_meta(workdir.checkpoints, step)
    if saved.get("format") != meta["format"]:
        raise DamageError(f"{where}: its format is {saved.get('format')!r}, this code reads {meta['format']}.")
    changed = configs.diff(saved["config"], meta["config"])
    if changed:
        raise InputError(
            f"{where} was made with another config; a run can't change these keys, use another --workdir, or set them "
            "back:\n  " + "\n  ".join(changed)
        )
    if saved["data_fingerprint"] != meta["data_fingerprint"]:
        raise InputError(
            f"{where} was made from other shards (their manifest's fingerprint differs); use another --workdir, or put "
            "the old shards back."
        )


def _open_log(config: ConfigDict, workdir: Workdir, run: build.Run, facts: build.DataFacts, start: int) -> Log:
    peak = flops.peak_flops(jax.devices()[0].device_kind)
    return Log(
        workdir.root,
        start=start,
        steps=run.steps,
        tokens_per_step=config.data.global_batch * facts.length,
        flops_per_token=build.flops_per_token(config, facts),
        peak_flops=peak and peak * jax.device_count(),
        tensorboard=config.log.tensorboard,
        wandb=config.log.wandb,
        config=configs.flatten(config),
    )
