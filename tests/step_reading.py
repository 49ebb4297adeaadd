"""How much one reads to understand a training step: `python -m tests.step_reading`.

It trains a tiny RoBERTa by the command's own way until its step is traced, and looks at every function of mlm that is
called for that: their files, the lines of these functions, and the lines of these files. The way from the command to
the loss is the chain of calls between both; a climb is a call of a file in a room above that of its caller.
"""

import itertools
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from mlm import config as configs
from mlm.data.manifest import DatasetInfo
from mlm.errors import PreemptedError
from mlm.tasks.pretraining import Pretraining
from mlm.testing import SMALL, VOCABULARY, write_shards
from mlm.training import train
from mlm.workdir import Workdir

PACKAGE = Path(train.__file__).parents[1]
ROOMS = ["data", "model", "pretrained", "monitor", "training", "tasks", "inference", "commands"]  # from the bottom


def room(file: str) -> int:
    """Returns the place of a file's room; files beside the rooms are below all."""
    name = Path(file).relative_to(PACKAGE).parts[0]
    return ROOMS.index(name) if name in ROOMS else -1


def measure() -> dict[str, Any]:
    """Returns the counts, and the names of the files and of the functions on the way."""
    called: dict[Any, None] = {}
    way: list[Any] = []
    tracing = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal tracing
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return
        is_step = code.co_name == "step" and code.co_filename == train.__file__
        if is_step and event == "return":  # what is traced needn't be compiled
            raise PreemptedError("traced")
        tracing = tracing or (is_step and event == "call")
        if tracing and event == "call":
            called.setdefault(code)
            if code.co_name == "masked_cross_entropy" and not way:
                caller: FrameType | None = frame
                while caller:
                    if caller.f_code.co_filename.startswith(str(PACKAGE)):
                        way.insert(0, caller.f_code)
                    caller = caller.f_back

    with tempfile.TemporaryDirectory() as folder:
        config = configs.replace(configs.load(str(configs.BASE), []), SMALL)
        manifest = write_shards(Path(folder, "shards"), vocab_size=VOCABULARY, length=config.shards.length)
        workdir = Workdir(f"{folder}/run")
        task = Pretraining(config, DatasetInfo.from_manifest(manifest), workdir=workdir, manifest=manifest)
        sys.setprofile(profile)
        try:
            train.train(config, workdir, task)
        except PreemptedError:
            pass
        finally:
            sys.setprofile(None)
    files = sorted({code.co_filename for code in called})
    functions = {(code.co_filename, code.co_firstlineno): code for code in called if not code.co_name.startswith("<")}
    lines = {(code.co_filename, line) for code in functions.values() for *_, line in code.co_lines() if line}
    rooms = [room(code.co_filename) for code in way]
    return {
        "files": [str(Path(file).relative_to(PACKAGE)) for file in files],
        "lines of these functions": len(lines),
        "lines of these files": sum(len(Path(file).read_text().splitlines()) for file in files),
        "way": [code.co_qualname for code in way],
        "climbs": sum(there > here for here, there in itertools.pairwise(rooms)),
    }


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name}: {len(value)}: {', '.join(value)}" if isinstance(value, list) else f"{name}: {value}")
