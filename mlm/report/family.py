"""The runs that a run branched off from: tokens read on the way, scores of their checkpoints. Nothing imports jax."""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from mlm import config as configs
from mlm import logs
from mlm.data.stages import branch_start, make_stages
from mlm.paths import UPath
from mlm.pretrained import locate
from mlm.report.plots import Points
from mlm.workdir import Workdir

PAIRS = re.compile(r"(pairs .+), step ([0-9]+)")  # of evaluation.json


class Run(NamedTuple):
    """A run, perhaps a branch."""

    root: UPath
    config: ConfigDict | None  # None if there is none
    parent: UPath | None  # the folder of the run that it branched off from, if it is still there
    start: int  # the parent's step after which it starts, 0 without one
    real_share: float = 1.0  # of the tokens in its rows, without padding


def read(root: UPath) -> Run:
    """Returns the run in a workdir."""
    config = configs.read(root / "config.json")
    name, start = ("", 0) if config is None else (config.train.branch_from.rpartition("@")[0], branch_start(config))
    candidates = (UPath(name).absolute(), root.parent / UPath(name).name)  # the second if it was started elsewhere
    parent = next((folder for folder in candidates if start and (folder / "checkpoints").is_dir()), None)
    dataset = locate.metadata(str(root)).get("dataset", {})
    return Run(root, config, parent, start, dataset.get("real_share", 1.0))


def ancestry(root: UPath) -> list[Run]:
    """Returns the run in a workdir, then the runs that it branched off from, nearest first."""
    runs, run = [], read(root)
    while run and run not in runs:
        runs.append(run)
        run = run.parent and read(run.parent)
    return runs


def tokens_read(ancestry: Sequence[Run], step: int) -> int | None:
    """Returns the tokens read up to a step of the first run of an ancestry, without the padding of each run's rows.

    None if unknown: of a classifier, without a config, or where a run that it came from is gone.
    """
    run_configs = [run.config for run in ancestry]
    if None in run_configs or ancestry[-1].start or run_configs[0].classify.train:
        return None
    last_steps = itertools.accumulate([step, *(run.start for run in ancestry[:-1])], min)  # on the way to `step`
    # Where rows are short, and when a run of epochs ends, changes no number of rows, so their records don't matter.
    return sum(
        round(make_stages(run.config, records=1).own_rows_read(last) * run.config.shards.length * run.real_share)
        for run, last in zip(ancestry, last_steps, strict=True)
    )


def downstream(root: UPath) -> dict[int, dict[str, float]]:
    """Returns {step: {name: score}} of a run: averages of GLUE, and accuracies on minimal pairs within words."""
    scores: dict[int, dict[str, float]] = defaultdict(dict)
    for step, table in logs.read_object(Workdir(str(root), create=False).glue).items():
        if table["average"] is not None:
            scores[int(step)][f"GLUE {table['protocol']}"] = table["average"]
    for key, values in logs.read_object(root / logs.RESULTS).items():
        if match := PAIRS.fullmatch(key):
            scores[int(match[2])][match[1]] = values["within_word"]["accuracy"]
    return scores


def curves(ancestry: Sequence[Run]) -> dict[str, Points]:
    """Returns {name: (tokens read, downstream scores in %)} of the first run of an ancestry, on the way to its end."""
    percents, end = defaultdict(dict), math.inf
    for generation, run in enumerate(ancestry):
        for step, scores in downstream(run.root).items():
            tokens = tokens_read(ancestry[generation:], step)
            for name, value in scores.items() if step <= end and tokens is not None else ():
                percents[name][tokens] = 100 * value
        end = run.start
    return {name: tuple(zip(*sorted(by_tokens.items()), strict=True)) for name, by_tokens in percents.items()}
