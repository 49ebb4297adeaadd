"""Measurements in turns: on a shared machine only what ran side by side can be compared, and only as ratios."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from mlm.errors import InputError

TURN = 1.0  # seconds that a turn takes, about
ROUNDS = 3  # at least
PATIENCE = 10.0  # seconds that a partner has to end by itself

Turn = Callable[[int], None]
Rates = dict[str, list[float]]


def alternate(turns: dict[str, Turn], seconds: float, *, length: float = 1.0, calls: int = 0) -> Rates:
    """Lets each function take its turn, round after round.

    Args:
      turns: by name; each makes as many calls as it is told to, and returns when the last is done.
      seconds: of all rounds together; there are ROUNDS at least.
      length: of a turn, in TURNs.
      calls: of a turn, where a first one need not be left out; 0 for as many as take `length`, by a trial.

    Returns:
      The calls per second of each turn, by name, in the order of the rounds.
    """
    counts = {name: calls or _calls(turn, length * TURN) for name, turn in turns.items()}
    rates: Rates = {name: [] for name in turns}
    begin = time.monotonic()
    while min(map(len, rates.values())) < ROUNDS or time.monotonic() - begin < seconds:
        for name, turn in turns.items():
            start = time.monotonic()
            turn(counts[name])
            rates[name].append(counts[name] / (time.monotonic() - start))
    return rates


def _calls(turn: Turn, seconds: float) -> int:
    """Returns how many calls take so many seconds, after one that may compile, and beyond what was prefetched."""
    turn(1)
    calls = 1
    while True:
        begin = time.monotonic()
        turn(calls)
        taken = time.monotonic() - begin
        if taken >= seconds / 2:
            return max(1, round(calls * seconds / taken))
        calls *= 2


def measure(part: str, turns: dict[str, Turn], seconds: float, **settings: float) -> Rates:
    """As `alternate`, with words on what is being measured."""
    say(f"{part}: measuring in turns, for about {seconds:g} s")
    return alternate(turns, seconds, **settings)


def summary(rates: Rates, tokens: int) -> dict[str, Any]:
    """Returns the medians.

    Args:
      rates: of `alternate`.
      tokens: of a call.

    Returns:
      {name: {"tokens_per_second", "milliseconds" of a call}, "ratios": {other: how many times as fast as that the
      first is, by the median of the ratios of each round}}.
    """
    found: dict[str, Any] = {}
    for name, column in rates.items():
        rate = statistics.median(column)
        found[name] = {"tokens_per_second": tokens * rate, "milliseconds": 1e3 / rate}
    first, *others = rates.items()
    found["ratios"] = {
        name: statistics.median(one / other for one, other in zip(first[1], column, strict=True))
        for name, column in others
    }
    return found


def say(words: str) -> None:
    """Writes a line of progress to stderr."""
    print(f"bench: {words}", file=sys.stderr, flush=True)


class Partner:
    """A process that takes turns when it is asked to, and otherwise waits for its input: no CPU is used then.

    It reads its settings, a line of JSON, and writes one when it is ready; then it reads one, {"calls": N}, before each
    turn, and writes one after it. It ends when its input does, as it does if this process dies.

    Attributes:
      ready, answer: what it wrote first, and last.
    """

    def __init__(self, command: list[str], settings: dict[str, Any], *, name: str):
        """Starts it and waits until it is ready.

        Args:
          command: to run.
          settings: that it reads.
          name: of it, in the sentences that say what went wrong.

        Raises:
          InputError: it can't be run, or ends before it is ready; its exit code 2 says why in its last line.
        """
        self._name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe would fill up)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
            )
        except OSError as error:
            self._errors.close()
            raise InputError(f"{name}: can't be run ({error.strerror}); name a Python interpreter.") from None
        self.ready = self._ask(settings)
        self.answer: dict[str, Any] = {}

    def turn(self, calls: int) -> None:
        """Lets it make so many calls, and waits.

        Raises:
          InputError: it ended; the sentence holds the last line that it wrote to stderr.
        """
        self.answer = self._ask({"calls": calls})

    def _ask(self, words: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        try:
            return dict(json.loads(self._process.stdout.readline()))
        except (ValueError, TypeError):
            self._end()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        self.close()
        if self._process.returncode == 2:
            raise InputError(f"{self._name}: {lines[-1]}")
        raise InputError(f"{self._name}: the step can't be measured there ({lines[-1]}).")

    def close(self) -> None:
        """Ends it."""
        self._end()
        self._process.stdout.close()
        self._errors.close()

    def _end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Partner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
