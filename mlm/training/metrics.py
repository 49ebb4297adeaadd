"""The logs of a run while it trains, its TensorBoard and Weights & Biases, and the progress bar.

metrics.jsonl  what was computed: the same lines, to the bit, however often the run was restarted
norms.jsonl    likewise, the norms by parameter (log.norms_every)
timing.jsonl   what it cost: when the run started, how fast it was, compilations; only ever appended to
"""

import math
import platform
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict
from tqdm import tqdm

from mlm import cluster, logs
from mlm import config as configs
from mlm.model import flops
from mlm.model.module import Params
from mlm.monitor.loss_spikes import MetricsHook
from mlm.paths import UPath, is_remote, staging_folder, upload, write_text
from mlm.text import can_draw
from mlm.training import xla_metrics
from mlm.training.task import Task

# of an evaluation
SHOWN = {"loss": ".4f", "accuracy": ".1%", "f1": ".1%", "pearson": ".4f", "spearman": ".4f"}


class Log(AbstractContextManager):
    """Writes the logs of a run on the first host, and nothing on the others; a context manager."""

    def __init__(
        self, workdir: UPath, task: Task, compilations: xla_metrics.Compilations, *, start: int
    ):
        """Opens the logs, and drops the lines after step `start`, but for timing.jsonl: these steps will come again."""
        config = task.config
        self.waits = xla_metrics.Waits()
        self._task = task
        self._compilations = compilations
        self._writes = cluster.is_primary()
        self._bar = tqdm(
            total=task.stages.steps,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            disable=not (self._writes and can_draw(sys.stderr)),
        )
        self._began = time.monotonic()
        # of steps, without pauses: the time, and that for which devices waited
        self._timed = Counter[str]()
        self._files: dict[str, logs.Lines] = {}
        self._hooks: list[MetricsHook] = []
        if self._writes:
            # of timing, only a torn line
            for name, last in (("metrics", start), ("norms", start), ("timing", sys.maxsize)):
                logs.cut(workdir / f"{name}.jsonl", last)
                self._files[name] = logs.Lines(workdir / f"{name}.jsonl")
            if config.log.tensorboard:
                self._hooks.append(_TensorBoard(workdir / "tensorboard", config, start))
            if config.log.wandb:
                self._hooks.append(_Wandb(workdir, config))
            self._hooks += task.make_hooks(self.notify)
        self.restart_clock(start)
        device = jax.devices()[0].device_kind
        self.timing(
            "start",
            start,
            {"host": platform.node(), "devices": jax.device_count(), "device": device},
        )

    def __exit__(self, *exception: object) -> None:
        self.waits.running.put(None)
        if seconds := self._timed["seconds"]:
            counts = self._compilations.counts
            waits = [self._timed[name] / seconds for name in ("input_wait", "host_wait")]
            self.notify(
                f"compiled {counts['programs']} programs in {counts['seconds']:.1f} s, {counts['from_cache']} of them "
                f"from the cache; devices waited {waits[0]:.1%} of the time for input, {waits[1]:.1%} for process 0; "
                f"{time.monotonic() - self._began:,.0f} s in all"
            )
        self.flush()
        self._bar.close()
        for hook in self._hooks:
            hook.close()

    def restart_clock(self, step: int) -> dict[str, float]:
        """Leaves what came before `step` (a compilation) out of the throughput; returns the waits before it."""
        self._clock = time.monotonic()
        self._clock_step = step
        self.waits.add("host_wait")
        waited = self.waits.seconds
        self.waits.seconds = dict.fromkeys(waited, 0.0)
        return waited

    @contextmanager
    def paused(self, kind: str, step: int) -> Iterator[None]:
        """Times an evaluation or a checkpoint, and leaves it out of the throughput."""
        begin = time.monotonic()
        self.waits.add("host_wait")
        yield
        self.waits.idle_since = time.monotonic()
        seconds = time.monotonic() - begin
        self._clock += seconds
        self.timing(kind, step, {"seconds": round(seconds, 3)})

    def train(self, step: int, metrics: dict[str, Any]) -> None:
        """Logs the metrics of a step, for which it waits, and the throughput since the last logged step."""
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        del values["consecutive_nonfinite"]
        seconds = max(time.monotonic() - self._clock, 1e-9)
        before = self._clock_step
        waited = self.restart_clock(step)
        self._metrics("train", step, values)
        if step <= before:
            return
        task = self._task
        tokens_per_second = (task.tokens_read(step) - task.tokens_read(before)) / seconds
        rows_per_second = (task.stages.rows_read(step) - task.stages.rows_read(before)) / seconds
        self._timed.update(waited, seconds=seconds)
        timing = {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens_per_second),
            "rows_per_second": round(rows_per_second, 2),
            "compiled_seconds": round(self._compilations.counts["seconds"], 3),  # since the start
            **{name: round(wait / seconds, 4) for name, wait in waited.items()},
        }
        epoch = task.epoch(step)
        shown = [] if epoch is None else [f"epoch {epoch:.2f}"]
        shown += [
            f"loss {values['loss']:.3f}",
            f"{_short(tokens_per_second)} tokens/s",
            f"{_short(rows_per_second)} rows/s",
            *logs.show_own_metrics(values),
        ]
        useful = tokens_per_second * task.flops_per_token(task.stages.stage_at(step).length)
        mfu = flops.mfu(useful, jax.devices())
        if mfu is not None:
            timing["mfu"] = round(mfu, 4)
            shown.append(f"MFU {mfu:.1%}")
        self.timing("train", step, timing)
        if not self._bar.disable:
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        total = task.stages.steps
        left = (task.tokens_read(total) - task.tokens_read(step)) / tokens_per_second
        self.notify(f"step {step}/{total}: {', '.join(shown)}, {tqdm.format_interval(left)} left")

    def evaluation(self, step: int, scores: dict[str, Any]) -> None:
        """Logs the scores of an evaluation."""
        self._metrics("eval", step, scores)
        self.flush()
        for set_name, values in logs.by_set(scores).items():
            shown = [
                f"{name} {values[name]:{spec}}" for name, spec in SHOWN.items() if name in values
            ]
            shown += logs.show_own_metrics(values)
            if values.get("predictions") == 0:
                shown = [
                    "no token was masked, so there is no score; raise masking.rate, or give it more text"
                ]
            set_label = f"of {set_name}: " if set_name else ""
            self.notify(f"step {step}: evaluation {set_label}{', '.join(shown)}")

    def _metrics(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl."""
        values = logs.finite(values)
        epoch = self._task.epoch(step)
        if epoch is not None:
            values["epoch"] = round(epoch, 6)
        self._append("metrics", {"step": step, "kind": kind, **values})
        self._notify_hooks(kind, step, values)

    def timing(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends a line to timing.jsonl."""
        # the time of day may be set back meanwhile
        elapsed = round(time.monotonic() - self._began, 3)
        times = {"time": round(time.time(), 3), "elapsed": elapsed}
        self._append("timing", {"step": step, "kind": kind, **times, **values})
        self._notify_hooks(f"timing/{kind}", step, values)

    def norms(self, step: int, names: list[str], norms: dict[str, jax.Array]) -> None:
        """Appends a line to norms.jsonl, with a row of logs.NORMS for each of the names."""
        # nine digits are the float32, to the bit
        columns = [
            [float(f"{x:.9g}") if math.isfinite(x) else None for x in column]
            for column in jax.device_get([norms[kind] for kind in logs.NORMS])
        ]
        rows = dict(zip(names, zip(*columns, strict=True), strict=True))
        self._append("norms", {"step": step, "kind": "norms", "parameters": rows})
        for kind, column in zip(logs.NORMS, columns, strict=True):
            self._notify_hooks(kind, step, dict(zip(names, column, strict=True)))

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self._writes:
            self._files[name].append(line)

    def _notify_hooks(self, kind: str, step: int, values: dict[str, Any]) -> None:
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for hook in self._hooks:
            hook.on_metrics(kind, step, numbers)

    def notify(self, message: str) -> None:
        """Prints a message on stderr, above the progress bar."""
        if self._writes:
            tqdm.write(message, file=sys.stderr)

    def flush(self) -> None:
        """Returns when a kill can't lose what was logged."""
        for log in (*self._files.values(), *self._hooks):
            log.flush()


def _short(rate: float) -> str:
    return tqdm.format_sizeof(rate) if rate >= 1000 else f"{rate:.3g}"


def param_norms(before: Params, after: Params, gradient_norms_P: jax.Array) -> dict[str, jax.Array]:
    """Returns `logs.NORMS`, float32 [P], in the order of `sharding.named_leaves`.

    They are those of the gradient, as given, of the parameters before a step, and of its updates over them.
    """
    updates = jax.tree.map(jnp.subtract, after, before)
    norms_P, updates_P = (
        jnp.stack([optax.tree.norm(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (before, updates)
    )
    return dict(zip(logs.NORMS, (gradient_norms_P, norms_P, updates_P / norms_P), strict=True))


class _TensorBoard(MetricsHook):
    """Writes event files; to a bucket, the local file of this start is copied at each flush."""

    def __init__(self, folder: UPath, config: ConfigDict, start: int):
        from tensorboardX import SummaryWriter

        self._folder = folder
        self._local = staging_folder(folder)
        self._writer = SummaryWriter(str(self._local), purge_step=start + 1)
        lines = [f"    {key} = {value!r}" for key, value in configs.flatten(config).items()]
        self._writer.add_text("config", "\n".join(lines), start)

    def on_metrics(self, kind: str, step: int, values: dict[str, Any]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(f"{kind}/{key}", value, step)
        self._writer.flush()

    def flush(self) -> None:
        if is_remote(self._folder):
            for file in self._local.iterdir():
                (self._folder / file.name).write_bytes(file.read_bytes())

    def close(self) -> None:
        self._writer.close()
        upload(self._local, self._folder)


class _Wandb(MetricsHook):
    def __init__(self, workdir: UPath, config: ConfigDict):
        import wandb

        file = workdir / "wandb_id"
        if not file.is_file():
            write_text(file, uuid.uuid4().hex + "\n")
        # A resumed run sends the lines after its checkpoint again, the same ones; some config keys may change.
        self._run = wandb.init(
            project=config.log.wandb,
            name=workdir.name,
            config=configs.flatten(config),
            id=file.read_text().strip(),
            resume="allow",
            allow_val_change=True,
        )

    def on_metrics(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._run.log({f"{kind}/{key}": value for key, value in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()
