"""Why a run ends, as its processes tell each other, and leave it in cause.json. Without jax."""

import dataclasses
import json
from typing import Self

from mlm.text import printable

PHASES = ("start", "input", "compile", "step", "evaluate", "save", "done")  # in the order of a step
VERBS = {"exception": "failed: ", "signal": "was asked to end: ", "hang": "hung: "}


@dataclasses.dataclass(frozen=True)
class Termination:
    """Why a run ends: which process ends it, when, where it was, and the exit code of all processes, never 0."""

    process: int  # -1: somebody who is none of the run's processes
    host: str
    kind: str  # one of VERBS
    code: int
    what: str  # a sentence
    time: float = 0.0  # unix seconds
    step: int | None = None
    phase: str = "start"

    @property
    def sentence(self) -> str:
        """The message that other processes show."""
        return f"host {self.process} ({self.host}) {VERBS[self.kind]}{self.what}"

    @property
    def position(self) -> tuple[int, int]:
        """How far the process had come, to be compared."""
        phase = PHASES.index(self.phase) if self.phase in PHASES else 0
        return -1 if self.step is None else self.step, phase

    @property
    def text(self) -> str:
        """What `read` returns this from."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """Returns the end that a text stands for, whoever wrote it; nothing in it can reach a terminal raw."""
        try:
            values = json.loads(text)
            fields = [values[field.name] for field in dataclasses.fields(cls)]
            end = cls(*(printable(one) if isinstance(one, str) else one for one in fields))
            if end.kind in VERBS and 0 < end.code < 256 and end.position:
                return end
        except Exception:  # whatever a stranger may write
            pass
        return cls(-1, "a stranger", "exception", 1, printable(text)[:2000])
