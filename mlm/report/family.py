"""The family of a run: the runs that it branched off from, their milestones and branches as a tree. No jax."""

import contextlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from mlm import config as configs
from mlm import logs
from mlm.data.stages import branch_start, make_stages
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, children
from mlm.pretrained import locate
from mlm.report.plots import Points
from mlm.workdir import Workdir

PAIRS = re.compile(r"(pairs .+), step ([0-9]+)")  # of evaluation.json
INDENT = "\u2003"
Scores = dict[int, dict[str, float]]  # step -> name -> from 0 to 1


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
    if run:  # what the last one came from is gone, and a folder that leads back to it has the same name
        runs[-1] = runs[-1]._replace(parent=None)
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


def downstream(root: UPath) -> Scores:
    """Returns the average of GLUE, and the accuracy on minimal pairs within words, of the checkpoints of a run."""
    scores: Scores = defaultdict(dict)
    for step, table in logs.read_object(Workdir(str(root), create=False).glue).items():
        if table["average"] is not None:
            scores[int(step)][f"GLUE {table['protocol']}"] = table["average"]
    for key, values in logs.read_object(root / logs.RESULTS).items():
        if match := PAIRS.fullmatch(key):
            scores[int(match[2])][match[1]] = values["within_word"]["accuracy"]
    return scores


class Family:
    """A run, its ancestors, and the branches of all of these in the folders beside them."""

    def __init__(self, workdir: Workdir):
        """Reads their configs."""
        self.ancestry, others = ancestry(workdir.root), []
        self.runs = {run.root: run for run in self.ancestry}
        folders = {path for root in self.runs for path in children(root.parent) if (path / "config.json").is_file()}
        for root in sorted(folders - self.runs.keys(), key=str):
            with contextlib.suppress(InputError, DamageError):  # config.json may be of something else
                others.append(read(root))
        while branches := [run for run in others if run.parent in self.runs and run.root not in self.runs]:
            self.runs |= {run.root: run for run in branches}
        self.scores = {root: downstream(root) for root in self.runs}
        self.ancestries = {root: ancestry(root) for root in self.runs}

    def curves(self) -> dict[str, Points]:
        """Returns {name: (tokens read, scores in %)} of the run, with those of the runs that it came from."""
        percents, end = defaultdict(dict), math.inf
        for run in self.ancestry:
            for step, scores in self.scores[run.root].items():
                tokens = tokens_read(self.ancestries[run.root], step)
                for name, value in scores.items() if step <= end and tokens is not None else ():
                    percents[name][tokens] = 100 * value
            end = run.start
        return {name: tuple(zip(*sorted(by_tokens.items()), strict=True)) for name, by_tokens in percents.items()}

    def table(self) -> list[tuple[str, ...]]:
        """Returns head and rows: the first run, its milestones, and below each step the branches that leave there."""
        names = sorted({name for steps in self.scores.values() for scores in steps.values() for name in scores})
        rows = list(self._rows(self.ancestry[-1], names, 0))
        return [("", "tokens read", "loss, nats", *names, "changes"), *rows] if len(rows) > 2 or names else []

    def _rows(self, run: Run, names: list[str], depth: int) -> Iterator[tuple[str, ...]]:
        parent = self.runs.get(run.parent)
        changes = []
        if run.config and run.config.train.branch_from:
            changes = [f"from {run.config.train.branch_from}"]
        if parent:
            changes = configs.diff(parent.config, run.config, re.compile(r"train\.branch_from"))
        branches = [branch for branch in self.runs.values() if branch.parent == run.root]
        workdir, scores = Workdir(str(run.root), create=False), self.scores[run.root]
        losses = {line["step"]: line["loss"] for line in logs.read(workdir.metrics, "eval")}
        steps = {*locate.milestones(workdir), *scores, *(branch.start for branch in branches), *list(losses)[-1:]}
        yield (INDENT * depth + run.root.name, "", "", *("" for _ in names), ", ".join(changes))
        for step in sorted(steps):
            loss, tokens = losses.get(step), tokens_read(self.ancestries[run.root], step)
            shown = (f"{scores[step][name]:.1%}" if name in scores.get(step, ()) else "" for name in names)
            cells = ("" if tokens is None else f"{tokens:,}", "" if loss is None else f"{loss:.4f}", *shown, "")
            yield (f"{INDENT * (depth + 1)}step {step:,}", *cells)
            for branch in branches:
                if branch.start == step:
                    yield from self._rows(branch, names, depth + 2)
