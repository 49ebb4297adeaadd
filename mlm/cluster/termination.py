"""Why a run ends, as its processes tell each other. Without jax."""

import dataclasses
import json
from typing import Self

from mlm.text import printable

PHASES = ("start", "input", "compile", "step", "evaluate", "save", "done")  # in the order of a step
OWN_KINDS = ("exception", "signal", "hang")  # of termination, that a process reports of itself
MAX_TEXT = 2000  # characters


@dataclasses.dataclass(frozen=True)
class Termination:
    """Why a run ends: which process ends it, where it was, and the exit code of all processes, never 0."""

    process: int
    host: str
    kind: str  # one of OWN_KINDS, or "lost": killed, stopped or cut off
    code: int
    what: str  # a sentence; for "lost" the predicate of one that begins with the host
    step: int | None = None
    phase: str = "start"

    @property
    def sentence(self) -> str:
        """The message that other processes show."""
        verb = {"hang": "hung: ", "signal": "was asked to end: ", "exception": "failed: "}.get(self.kind, "")
        return f"host {self.process} ({self.host}) {verb}{self.what}"

    @property
    def position(self) -> tuple[int, int]:
        """How far the process had come, to be compared."""
        return (-1 if self.step is None else self.step), PHASES.index(self.phase) if self.phase in PHASES else 0

    @classmethod
    def read(cls, text: str) -> Self:
        """Returns what `json.dumps` has made of the fields; nothing in it can reach a terminal raw."""
        values = json.loads(text)
        values = [values[field.name] for field in dataclasses.fields(cls)]
        return cls(*(printable(value)[:MAX_TEXT] if isinstance(value, str) else value for value in values))
