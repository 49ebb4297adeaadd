"""The runs that a run came from by train.branch_from, and the tokens read on the way. No jax."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlm import config as configs
from mlm import logs
from mlm.paths import UPath
from mlm.training import recipe


class Run(NamedTuple):
    """A run, perhaps a branch."""

    root: UPath
    config: dict[str, Any]  # flattened
    parent: UPath | None  # the folder of the run that it branched off from, if it is still there
    start: int  # the step of the parent where it begins


def read(root: UPath) -> Run:
    """Returns the run in a workdir."""
    config = configs.flatten(logs.read_object(root / "config.json"))
    name, _, step = str(config.get("train.branch_from", "")).rpartition("@")
    candidates = (UPath(name).absolute(), root.parent / UPath(name).name)  # the second if it was started elsewhere
    parent = next((each for each in candidates if step.isdecimal() and (each / "checkpoints").is_dir()), None)
    return Run(root, config, parent, int(step) if parent else 0)


def line(root: UPath) -> list[Run]:
    """Returns the run in a workdir, the one that it branched off from, and so on up to the first."""
    found, run = [], read(root)
    while run and run not in found:
        found.append(run)
        run = run.parent and read(run.parent)
    return found


def tokens_read(line: Sequence[Run], step: int) -> int:
    """Returns the tokens read up to a step of the first run of a line, in rows as long as those of each run."""
    total = 0
    for run in line:
        rows = recipe.rows_read(run.config, max(step, run.start)) - recipe.rows_read(run.config, run.start)
        total, step = total + rows * run.config["shards.length"], min(step, run.start)
    return total
