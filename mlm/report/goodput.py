"""What a run's wall-clock time was spent on, from timing.jsonl. Nothing here imports jax."""

import dataclasses
import itertools
from typing import Any

Line = dict[str, Any]  # of timing.jsonl: step, kind, time (seconds since 1970), and for most kinds seconds


@dataclasses.dataclass(frozen=True)
class Session:
    """One start of the run."""

    lines: list[Line]  # the first is of kind "start"
    kept: float  # the last step that no later start repeated

    @property
    def seconds(self) -> float:
        """From the start to the last line."""
        return self.lines[-1]["time"] - self.lines[0]["time"]

    @property
    def devices(self) -> str:
        """Their number and kind, such as "8 x TPU v4"."""
        return f"{self.lines[0].get('devices', '?')} x {self.lines[0].get('device', 'unknown device')}"

    def kept_lines(self, kind: str) -> list[Line]:
        """Returns the lines of a kind up to the last step that was kept."""
        return [line for line in self.lines if line["kind"] == kind and line["step"] <= self.kept]


@dataclasses.dataclass
class TimeUse:
    """Seconds; they add up to the time from the first start to the last line of the log."""

    training: float = 0.0  # steps that were kept, the wait for their input included
    evaluation: float = 0.0  # while the steps waited for it
    checkpoints: float = 0.0  # likewise
    start: float = 0.0  # from a start, or a line "compile", to the end of its first step: input, compilation
    redone: float = 0.0  # steps, evaluations and checkpoints that a later start repeated
    down: float = 0.0  # from the last line before a start to that start: not running, or not logging

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(dataclasses.astuple(self))

    @property
    def goodput(self) -> float:
        """Share of the wall-clock spent on steps that were kept."""
        return self.training / self.total if self.total else 0.0


def split_sessions(timing: list[Line], until: float = float("inf")) -> list[Session]:
    """Returns the starts of a run up to a step, in order, without those at the end that logged nothing."""
    timing = list(timing)
    while timing and (timing[-1]["kind"] == "start" or timing[-1]["step"] > until):
        timing.pop()
    starts = [index for index, line in enumerate(timing) if line["kind"] == "start"]
    groups = [timing[start:end] for start, end in itertools.pairwise([*starts, None])]
    begins = [lines[0]["step"] for lines in groups]
    return [Session(lines, min(begins[index + 1 :], default=float("inf"))) for index, lines in enumerate(groups)]


def use_of_time(sessions: list[Session]) -> TimeUse:
    """Returns how the time of the sessions was spent.

    Steps between two lines of the log took the time between them, less the evaluation or checkpoint that the second
    line reports. If only some of these steps were kept, the time is divided in proportion.
    """
    use = TimeUse()
    for session in sessions:
        for before, line in itertools.pairwise(session.lines):
            seconds, is_kept = max(line["time"] - before["time"], 0.0), line["step"] <= session.kept
            if line["kind"] == "first_step":
                use.start += seconds
                continue
            part = max(session.kept - before["step"], 0) / max(line["step"] - before["step"], 1)
            kept = 1.0 if is_kept else part
            paused = min(line["seconds"], seconds) if line["kind"] in ("eval", "checkpoint") else 0.0
            use.training += kept * (seconds - paused)
            use.redone += (1 - kept) * (seconds - paused) + (0.0 if is_kept else paused)
            if is_kept and line["kind"] == "eval":
                use.evaluation += paused
            elif is_kept:
                use.checkpoints += paused
    for session, later in itertools.pairwise(sessions):
        use.down += max(later.lines[0]["time"] - session.lines[-1]["time"], 0.0)
    return use
