"""The runs that a run came from by train.branch_from, and the tokens read and FLOPs on the way. No jax."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from mlm import config as configs
from mlm import logs
from mlm.paths import UPath
from mlm.pretrained import locate
from mlm.training import recipe


class Run(NamedTuple):
    """A run, perhaps a branch."""

    root: UPath
    config: dict[str, Any]  # flattened
    parent: UPath | None  # the folder of the run that it branched off from, if it is still there
    start: int  # the parent's step after which it starts, 0 without one


def read(root: UPath) -> Run:
    """Returns the run in a workdir."""
    config = configs.flatten(logs.read_object(root / "config.json"))
    name, start = str(config.get("train.branch_from", "")).rpartition("@")[0], recipe.branch_start(config)
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
    known = all({"data.global_batch", "shards.length"} <= run.config.keys() for run in ancestry)
    if not known or ancestry[-1].start or ancestry[0].config.get("classify.train"):
        return None
    return sum(
        recipe.own_rows_read(run.config, end) * run.config["shards.length"] for run, end in _ends(ancestry, step)
    )


def useful_flops(ancestry: Sequence[Run], vocab_size: int, step: int, meta: dict[str, Any]) -> float | None:
    """Returns the useful FLOPs up to a step of the first run of an ancestry, with metadata `meta`; None if unknown."""
    metas, total = [meta, *(locate.metadata(str(run.root)) for run in ancestry[1:])], 0.0
    if tokens_read(ancestry, step) is None or not all(metas):
        return None
    for (run, end), run_meta in zip(_ends(ancestry, step), metas, strict=True):
        steps = recipe.total_steps(run.config, run_meta["dataset"]["records"])
        if share := run_meta.get("share"):  # of train.hours
            steps = round(run_meta["step"] / share)
        total += recipe.useful_flops(run.config, vocab_size, step=end, steps=steps)
    return total


def _ends(ancestry: Sequence[Run], step: int) -> list[tuple[Run, int]]:
    """Returns each run of an ancestry with the last of its steps on the way to `step` of the first."""
    starts = [run.start for run in ancestry[:-1]]
    return list(zip(ancestry, itertools.accumulate([step, *starts], min), strict=True))
