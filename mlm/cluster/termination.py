"""Why a run ends, as its processes tell each other. Without jax."""

import dataclasses
import json
from typing import Self

from mlm.text import printable

PHASES = ("start", "input", "compile", "step", "evaluate", "save", "done")  # in the order of a step
VERBS = {"exception": "failed: ", "signal": "was asked to end: ", "hang": "hung: "}
MAX_TEXT = 2000  # characters


@dataclasses.dataclass(frozen=True)
class Termination:
    """Why a run ends: which process ends it, where it was, and the exit code of all processes, never 0."""

    process: int  # -1: somebody who is none of the run's processes
    host: str
    kind: str  # one of VERBS; or "peer", never told: it ends because another did
    code: int
    what: str  # a sentence
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
            end = cls(
                int(values["process"]),
                printable(values["host"])[:MAX_TEXT],
                values["kind"],
                int(values["code"]),
                printable(values["what"])[:MAX_TEXT],
                None if values["step"] is None else int(values["step"]),
                printable(values["phase"])[:MAX_TEXT],
            )
            if end.kind in VERBS and 0 < end.code < 256:
                return end
        except Exception:  # whatever a stranger may write
            pass
        return cls(-1, "a stranger", "exception", 1, printable(text)[:MAX_TEXT])
