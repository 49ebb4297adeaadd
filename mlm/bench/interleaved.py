"""Interleaved timing: on a shared machine only the ratios between what ran side by side mean anything."""

import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import RenderableType

from mlm.errors import InputError
from mlm.text import say, table

INTERVAL = 1.0  # approximate seconds of a timing
ROUNDS = 3  # at least
TIMEOUT = 10.0  # seconds until a worker that does not exit is killed
NAMES = {
    "mlm": "mlm",
    "by_mlm": "the same by mlm's modules",
    "baseline": "run_mlm_flax.py",
    "torch": "run_mlm.py (PyTorch)",
    "tf_tpu_example": "TF-TPU example",
    "one_batch": "one batch reused",
    "real_batches": "batches of the run",
}

Repeat = Callable[[int], None]  # makes that many calls and waits for the last
Rates = dict[str, list[float]]


def measure(
    part: str, candidates: dict[str, Repeat], seconds: float, interval: float | None = None, calls=0
) -> Rates:
    """Times the candidates in turn for `seconds` in all; returns each one's calls per second, round by round.

    A timing is of `calls`, without a warm-up; if 0, of as many as take about `interval` seconds.
    """
    say(f"bench: {part}: measuring for about {seconds:g} s")
    interval = interval or INTERVAL
    counts = {name: calls or _calibrate(repeat, interval) for name, repeat in candidates.items()}
    rates: Rates = {name: [] for name in candidates}
    begin = time.monotonic()
    while len(next(iter(rates.values()))) < ROUNDS or time.monotonic() - begin < seconds:
        for name, repeat in candidates.items():
            start = time.monotonic()
            repeat(counts[name])
            rates[name].append(counts[name] / (time.monotonic() - start))
    return rates


def _calibrate(repeat: Repeat, seconds: float) -> int:
    """Returns how many calls take `seconds`; the first call may compile, and the next use up what was prefetched."""
    repeat(1)
    calls = 1
    while True:
        begin = time.monotonic()
        repeat(calls)
        taken = time.monotonic() - begin
        if taken >= seconds / 2:
            return max(1, round(calls * seconds / taken))
        calls *= 2


def summary(rates: Rates, tokens: int) -> dict[str, Any]:
    """Returns medians over the rounds of `measure`, where a call works on `tokens`.

    {name: {"tokens_per_second", "milliseconds" of a call}, "ratios": {other: how many times as fast the first is}}.
    """
    first, *others = rates
    ratios = {name: statistics.median(np.divide(rates[first], rates[name])) for name in others}
    medians = {name: statistics.median(column) for name, column in rates.items()}
    rows = {
        name: {"tokens_per_second": tokens * rate, "milliseconds": 1e3 / rate}
        for name, rate in medians.items()
    }
    return {"ratios": ratios} | rows


def render(results: dict[str, Any]) -> list[RenderableType]:
    """Returns a table for each part; its ratios are of the first row to the others."""
    parts: list[RenderableType] = []
    for part, rows in results.items():
        if parts:
            parts.append("")
        heads = (">MFU", ">memory") if part == "step" else ()
        cells = [_cells(part, name, rows) for name in rows if name in NAMES]
        parts.append(table(part, ">tokens/s", ">ms", *heads, "", rows=cells))
        if row := rows.get("torch"):
            parts.append(
                f"PyTorch {row['torch']}, transformers {row['transformers']}, {row['device']}, {row['dtype']}."
            )
    return parts


def _cells(part: str, name: str, rows: dict[str, Any]) -> list[str]:
    row = rows[name]
    ratio = rows["ratios"].get(name)
    cells = [NAMES[name], f"{row['tokens_per_second']:,.0f}", f"{row['milliseconds']:,.1f}"]
    if part == "step":
        cells.append("-" if row["mfu"] is None else f"{row['mfu']:.1%}")
        cells.append(f"{row['memory_bytes'] / 1e6:,.0f} MB" if "memory_bytes" in row else "-")
    return [*cells, "" if ratio is None else f"the first is {ratio:.3g} times as fast"]


class Worker:
    """A candidate in its own process, with torch_step.py's protocol; `ready` is its first answer."""

    def __init__(self, command: list[str], settings: dict[str, Any], *, name: str):
        """Waits until it is ready; raises InputError if it can't be run or fails."""
        self._name = name
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (a pipe would fill up)
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True
            )
        except OSError as error:
            self._errors.close()
            raise InputError(
                f"{name}: can't be run ({error.strerror}); name a Python interpreter."
            ) from None
        self.ready = self.ask(settings)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a message; raises InputError if there is none."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        try:
            return dict(json.loads(self._process.stdout.readline()))
        except (ValueError, TypeError):
            last = self.close()
        error = (
            last if self._process.returncode == 2 else f"the process failed: {last.rstrip('.')}."
        )
        raise InputError(f"{self._name}: {error}")

    def close(self) -> str:
        """Stops it; returns its last line on stderr."""
        if self._errors.closed:
            return ""
        try:
            self._process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        with self._errors as errors:
            errors.seek(0)
            return (errors.read().strip() or "no output on stderr").splitlines()[-1]
