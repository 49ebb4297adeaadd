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
    part: str, candidates: dict[str, Repeat], seconds: float, *, intervals: int = 1, calls: int = 0
) -> Rates:
    """Times the candidates in turn for `seconds` in all; returns each one's calls per second, round by round.

    A timing is of `calls`, without a warm-up; if 0, of as many as take about so many intervals.
    """
    say(f"bench: {part}: measuring for about {seconds:g} s")
    limit = intervals * INTERVAL
    counts = {name: calls or _calibrate(repeat, limit) for name, repeat in candidates.items()}
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
        lines = []
        for name in filter(NAMES.get, rows):
            row = rows[name]
            mfu = row.get("mfu")
            memory = row.get("memory_bytes")
            ratio = rows["ratios"].get(name)
            lines.append(
                [
                    NAMES[name],
                    f"{row['tokens_per_second']:,.0f}",
                    f"{row['milliseconds']:,.1f}",
                    "-" if mfu is None else f"{mfu:.1%}",
                    "-" if memory is None else f"{memory / 1e6:,.0f} MB",
                    "" if ratio is None else f"the first is {ratio:.3g} times as fast",
                ]
            )
        parts.append(table(part, ">tokens/s", ">ms", ">MFU", ">memory", "", rows=lines))
        if row := rows.get("torch"):
            parts.append(
                f"PyTorch {row['torch']}, transformers {row['transformers']}, {row['device']}, {row['dtype']}."
            )
    return parts


class Worker:
    """A candidate in its own process, with torch_step.py's protocol; `ready` is its first answer."""

    def __init__(self, command: list[str], settings: dict[str, Any], *, name: str):
        """Waits until it is ready; raises InputError if it can't be run or fails."""
        self._name = name
        # a pipe would fill up
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
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
            print(json.dumps(message), file=self._process.stdin, flush=True)
        if answer := self._process.stdout.readline():
            return json.loads(answer)
        self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip() or "no output on stderr").splitlines()[-1]
        self.close()
        raise InputError(f"{self._name}: the process failed: {last.rstrip('.')}.")

    def close(self) -> None:
        """Ends its input, on which it exits."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()
