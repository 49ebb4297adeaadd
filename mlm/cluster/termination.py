"""Why a run ends, as its processes tell each other. Without jax."""

import dataclasses
import json
from typing import Self

from mlm.text import printable

PHASES = ("start", "input", "compile", "step", "evaluate", "save", "done")  # in the order of a step
VERBS = {"exception": "failed: ", "signal": "was asked to end: ", "hang": "hung: ", "lost": ""}
MAX_TEXT = 2000  # characters


@dataclasses.dataclass(frozen=True)
class Termination:
    """Why a run ends: which process ends it, where it was, and the exit code of all processes, never 0."""

    process: int  # -1: somebody who is none of the run's processes
    host: str
    kind: str  # one of VERBS; "lost": killed, stopped or cut off; or "peer", never told: it ends because another did
    code: int
    what: str  # a sentence; for "lost" the predicate of one that begins with the host
    step: int | None = None
    phase: str = "start"

    @property
    def sentence(self) -> str:
        """The message that other processes show."""
        return f"host {self.process} ({self.host}) {VERBS[self.kind]}{self.what}"

    @property
    def position(self) -> tuple[int, int]:
        """How far the process had come, to be compared."""
        return (-1 if self.step is None else self.step), PHASES.index(self.phase) if self.phase in PHASES else 0

    @property
    def text(self) -> str:
        """What `read` returns this from."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """Returns the end that a text stands for, whoever wrote it; nothing in it can reach a terminal raw."""
        try:
            values = json.loads(text)
            process, code = int(values["process"]), int(values["code"])
            step = None if values["step"] is None else int(values["step"])
            host, kind, what, phase = (printable(values[name])[:MAX_TEXT] for name in ("host", "kind", "what", "phase"))
        except Exception:
            kind, code = "", 0
        if kind in VERBS and 0 < code < 256:
            return cls(process, host, kind, code, what, step, phase)
        return cls(-1, "a stranger", "exception", 1, printable(text)[:MAX_TEXT])
