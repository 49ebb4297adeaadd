"""The runs that a run came from by train.branch_from, and the tokens read on the way. No jax."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from mlm import config as configs
from mlm.data.stages import branch_start, make_stages
from mlm.paths import UPath


class Run(NamedTuple):
    """A run, perhaps a branch."""

    root: UPath
    config: ConfigDict | None  # None if there is none
    parent: UPath | None  # the folder of the run that it branched off from, if it is still there
    start: int  # the parent's step after which it starts, 0 without one


def read(root: UPath) -> Run:
    """Returns the run in a workdir."""
    config = configs.read(root / "config.json")
    name, start = ("", 0) if config is None else (config.train.branch_from.rpartition("@")[0], branch_start(config))
    candidates = (UPath(name).absolute(), root.parent / UPath(name).name)  # the second if it was started elsewhere
    parent = next((folder for folder in candidates if start and (folder / "checkpoints").is_dir()), None)
    return Run(root, config, parent, start)


def ancestry(root: UPath) -> list[Run]:
    """Returns the run in a workdir, then the runs that it branched off from, nearest first."""
    runs, run = [], read(root)
    while run and run not in runs:
        runs.append(run)
        run = run.parent and read(run.parent)
    return runs


def tokens_read(ancestry: Sequence[Run], step: int) -> int | None:
    """Returns the tokens read up to a step of the first run of an ancestry, in rows as long as those of each run.

    None if unknown: of a classifier, without a config, or where a run that it came from is gone.
    """
    runs = [run.config for run in ancestry]
    if None in runs or ancestry[-1].start or runs[0].classify.train:
        return None
    # Where rows are short, and when a run of epochs ends, changes no number of rows, so their records don't matter.
    return sum(
        make_stages(run.config, records=1).own_rows_read(end) * run.config.shards.length
        for run, end in _ends(ancestry, step)
    )


def _ends(ancestry: Sequence[Run], step: int) -> list[tuple[Run, int]]:
    """Returns each run of an ancestry with the last of its steps on the way to `step` of the first."""
    starts = [run.start for run in ancestry[:-1]]
    return list(zip(ancestry, itertools.accumulate([step, *starts], min), strict=True))
