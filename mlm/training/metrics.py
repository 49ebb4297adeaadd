"""What a run says while it trains: two logs, TensorBoard, Weights & Biases, and a progress bar.

metrics.jsonl  what was computed: the same lines, to the bit, however often the run was restarted
timing.jsonl   what it cost: when the run started, how fast each stretch was; only ever appended to
"""

from __future__ import annotations

import math
import platform
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from mlm import cluster, logs
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, is_remote, write_text

SHOWN = {"loss": ".4f", "accuracy": ".1%", "f1": ".1%", "pearson": ".4f", "spearman": ".4f"}  # of an evaluation


class Log:
    """Writes the logs of one run; on every host but the first it writes nothing."""

    def __init__(
        self,
        workdir: UPath,
        *,
        start: int,
        steps: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
        tensorboard: bool,
        wandb: str,
        config: dict,
    ):
        """Opens the logs, and drops from metrics.jsonl what lies after `start`: those updates will come again.

        Args:
          workdir: holds the logs.
          start, steps: updates made so far, and in all.
          tokens_per_step, flops_per_token, peak_flops: for throughput and MFU; the peak of all devices in FLOP/s.
          tensorboard: write event files.
          wandb: project name of Weights & Biases; "" for none.
          config: to show there.
        """
        self.last_scores: dict[str, float] = {}
        self._writes = cluster.is_primary()
        self.flops_per_token = flops_per_token  # of the updates to come: it depends on the length of their rows
        self._tokens_per_step, self._peak = tokens_per_step, peak_flops
        self._sinks: list[Any] = []
        if self._writes:
            logs.cut(workdir / "metrics.jsonl", start)
            logs.cut(workdir / "timing.jsonl", sys.maxsize)  # a line torn by a kill alone: the next must not join it
            self._metrics, self._timing = (logs.Lines(workdir / name) for name in ("metrics.jsonl", "timing.jsonl"))
            if tensorboard:
                self._sinks.append(_TensorBoard(workdir / "tensorboard", start))
            if wandb:
                self._sinks.append(_Wandb(wandb, workdir, config))
        shown = self._writes and sys.stderr.isatty()
        self._bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True, disable=not shown)
        self._clock, self._clock_step = time.monotonic(), start
        self.time("start", start, host=platform.node(), devices=jax.device_count(), device=jax.devices()[0].device_kind)

    def add_sink(self, sink: Any) -> None:
        """Gives every later line of metrics.jsonl to `sink` too, as TensorBoard gets them: write, flush, close."""
        self._sinks.append(sink)

    def restart_clock(self, step: int) -> None:
        """Leaves what came before `step` (a compilation) out of the throughput."""
        self._clock, self._clock_step = time.monotonic(), step

    @contextmanager
    def paused(self, kind: str, step: int) -> Iterator[None]:
        """Leaves what happens within (an evaluation, a checkpoint) out of the throughput, and notes its seconds."""
        begin = time.monotonic()
        yield
        seconds = time.monotonic() - begin
        self._clock += seconds
        self.time(kind, step, seconds=round(seconds, 3))

    def train(self, step: int, metrics: dict[str, Any]) -> None:
        """Logs a stretch of updates that ended with `step`; waits for the device if it isn't there yet."""
        values = {key: value.item() for key, value in jax.device_get(metrics).items()}
        del values["bad_in_row"]
        now = time.monotonic()
        seconds, count = now - self._clock, step - self._clock_step
        self._clock, self._clock_step = now, step
        self.line("train", step, values)
        if count <= 0:
            return
        rate = count * self._tokens_per_step / max(seconds, 1e-9)
        timing = {"seconds": round(seconds, 3), "tokens_per_second": round(rate)}
        if self._peak:
            timing["mfu"] = round(rate * self.flops_per_token / self._peak, 4)
        self.time("train", step, **timing)
        self._show(step, values, rate, timing.get("mfu"))

    def evaluation(self, step: int, scores: dict[str, Any]) -> None:
        """Logs the scores of an evaluation at `step`."""
        self.last_scores = scores
        self.line("eval", step, scores)
        self.flush()
        known = [f"{name} {scores[name]:{spec}}" for name, spec in SHOWN.items() if name in scores]
        self.say(f"step {step}: evaluation {', '.join(known)}")

    def line(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl and tells TensorBoard and Weights & Biases."""
        if not self._writes:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._metrics.append({"step": step, "kind": kind, **finite})
        for sink in self._sinks:
            sink.write(kind, step, {k: v for k, v in finite.items() if isinstance(v, int | float)})

    def time(self, kind: str, step: int, **values: Any) -> None:
        """Appends a line to timing.jsonl."""
        if self._writes:
            self._timing.append({"step": step, "kind": kind, "time": round(time.time(), 3), **values})

    def say(self, text: str) -> None:
        """Shows a sentence to the person at the terminal, or in the log of the job."""
        if self._writes:
            tqdm.write(text, file=sys.stderr)

    def _show(self, step: int, values: dict[str, Any], rate: float, mfu: float | None) -> None:
        text = f"loss {values['loss']:.3f}, {_short(rate)} tokens/s" + (f", MFU {mfu:.1%}" if mfu else "")
        if self._bar.disable:
            left = (self._bar.total - step) * self._tokens_per_step / rate
            self.say(f"step {step}/{self._bar.total}: {text}, {tqdm.format_interval(left)} left")
        else:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)

    def flush(self) -> None:
        """Returns when what was logged is where a kill leaves it; must come before a checkpoint that it leads up to."""
        if self._writes:
            self._metrics.flush()
            self._timing.flush()
            for sink in self._sinks:
                sink.flush()

    def close(self) -> None:
        """Writes what is left, and closes the bar and the event files."""
        self.flush()
        self._bar.close()
        for sink in self._sinks:
            sink.close()


def _short(number: float) -> str:
    return tqdm.format_sizeof(number) if number >= 1000 else f"{number:.0f}"


class _TensorBoard:
    def __init__(self, folder: UPath, start: int):
        from tensorboardX import SummaryWriter

        self._target = folder if is_remote(folder) else None
        self._local = tempfile.mkdtemp(prefix="mlm-events-") if self._target else str(folder)
        self._writer = SummaryWriter(self._local, purge_step=start + 1)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(f"{kind}/{key}", value, step)
        if self._target is None:
            self._writer.flush()

    def flush(self) -> None:
        """Writes what there is; in a bucket, the events of this start are one file that is put there anew each time."""
        self._writer.flush()
        if self._target is not None:
            for file in Path(self._local).iterdir():
                (self._target / file.name).write_bytes(file.read_bytes())

    def close(self) -> None:
        self.flush()
        self._writer.close()
        if self._target is not None:
            shutil.rmtree(self._local, ignore_errors=True)


class _Wandb:
    def __init__(self, project: str, workdir: UPath, config: dict):
        try:
            import wandb
        except ImportError:
            raise InputError(
                f"config.log.wandb = {project!r}: the wandb package is missing; install it, or leave the key empty."
            ) from None
        # Resumed, the run keeps the lines that it has: those that come again are the same. Some keys may change.
        known = {"id": _wandb_id(workdir / "wandb_id"), "resume": "allow", "allow_val_change": True}
        self._run = wandb.init(project=project, name=workdir.name, config=config, **known)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._run.log({f"{kind}/{key}": value for key, value in values.items()}, step=step)

    def flush(self) -> None:
        """Weights & Biases sends its lines itself."""

    def close(self) -> None:
        self._run.finish()


def _wandb_id(file: UPath) -> str:
    """Returns the id of the workdir's run on Weights & Biases; made when first asked for."""
    if not file.is_file():
        write_text(file, uuid.uuid4().hex + "\n")
    text = file.read_bytes().decode(errors="replace").strip()
    if not re.fullmatch(r"[\w-]{1,128}", text, re.ASCII):
        raise DamageError(f"{file}: is not the id of a run; put a good copy in its place, or remove it for a new run.")
    return text
