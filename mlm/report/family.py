"""The family of a run: milestones and branches as a tree, with their scores on other tasks. No jax."""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator

from mlm import config as configs
from mlm import logs
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, children
from mlm.pretrained import locate
from mlm.report import lineage, plots
from mlm.report.lineage import Run
from mlm.workdir import Workdir

PAIRS = re.compile(r"(pairs .+), step ([0-9]+)")  # of evaluation.json
INDENT = "\u2003"
Scores = dict[int, dict[str, float]]  # step -> name -> from 0 to 1


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
        self.ancestry, others = lineage.ancestry(workdir.root), []
        self.runs = {run.root: run for run in self.ancestry}
        folders = {path for root in self.runs for path in children(root.parent) if (path / "config.json").is_file()}
        for root in sorted(folders - self.runs.keys(), key=str):
            with contextlib.suppress(InputError, DamageError):  # config.json may be of something else
                others.append(lineage.read(root))
        while branches := [run for run in others if run.parent in self.runs and run.root not in self.runs]:
            self.runs |= {run.root: run for run in branches}
        self.scores = {root: downstream(root) for root in self.runs}
        self.ancestries = {root: lineage.ancestry(root) for root in self.runs}

    def tokens(self, run: Run, step: int) -> int | None:
        """Returns the tokens read up to a step of a run, as `lineage.tokens_read`."""
        return lineage.tokens_read(self.ancestries[run.root], step)

    def curves(self) -> dict[str, plots.Points]:
        """Returns {name: (tokens read, scores in %)} of the run, with those of the runs that it came from."""
        percents, end = defaultdict(dict), math.inf
        for run in self.ancestry:
            for step, scores in self.scores[run.root].items():
                tokens = self.tokens(run, step)
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
            loss, tokens = losses.get(step), self.tokens(run, step)
            shown = (f"{scores[step][name]:.1%}" if name in scores.get(step, ()) else "" for name in names)
            cells = ("" if tokens is None else f"{tokens:,}", "" if loss is None else f"{loss:.4f}", *shown, "")
            yield (f"{INDENT * (depth + 1)}step {step:,}", *cells)
            for branch in branches:
                if branch.start == step:
                    yield from self._rows(branch, names, depth + 2)
