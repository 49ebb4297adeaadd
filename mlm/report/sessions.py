"""The starts of a run, and the steps of each that were kept, from timing.jsonl.

Nothing here imports jax.
"""

import dataclasses
import math
from typing import Any

# Of timing.jsonl: step, kind, time (since 1970), elapsed (since the start), for most seconds
Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Session:
    """One start of the run."""

    lines: list[Line]  # the first is of kind "start"
    kept: float  # the last step that no later start repeated

    @property
    def seconds(self) -> float:
        """From the start to the last line."""
        last = self.lines[-1]
        # An older log has the time of day alone
        return last.get("elapsed", last["time"] - self.lines[0]["time"])

    @property
    def devices(self) -> str:
        """Their number and kind, such as "8 x TPU v4"."""
        return f"{self.lines[0]['devices']} x {self.lines[0]['device']}"

    def kept_lines(self, *kinds: str) -> list[Line]:
        """Returns the lines of some kinds up to the last step that was kept."""
        return [line for line in self.lines if line["kind"] in kinds and line["step"] <= self.kept]


def split_sessions(timing: list[Line], until: float = math.inf) -> list[Session]:
    """Returns the starts of a run up to a step, in order, without those at the end that logged nothing."""
    timing = list(timing)
    while timing and (timing[-1]["kind"] == "start" or timing[-1]["step"] > until):
        timing.pop()
    sessions: list[Session] = []
    kept = math.inf
    while timing:
        start = max(n for n, line in enumerate(timing) if line["kind"] == "start")
        sessions.insert(0, Session(timing[start:], kept))
        kept = min(kept, timing[start]["step"])
        del timing[start:]
    return sessions
