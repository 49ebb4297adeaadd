"""The milestones of a run, and the branches that leave it and its ancestors, as a tree. Nothing here imports jax."""

import contextlib
from collections.abc import Iterator, Sequence

from mlm import logs
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, children
from mlm.pretrained import locate
from mlm.report import summary
from mlm.report.summary import Run
from mlm.workdir import Workdir

INDENT = "\u2003"


def tree(ancestry: Sequence[Run]) -> list[tuple[str, ...]]:
    """Returns head and rows: the first run, its milestones, and below each step the branches that leave there.

    Branches are looked for beside the runs of the ancestry. None of a run alone without downstream scores.
    """
    first = ancestry[-1]._replace(parent=None)  # a folder of the name that it came from may lead back to it
    runs = {run.root: run for run in (*ancestry[:-1], first)}
    runs |= {run.root: run for run in _branches(runs)}
    scores = {folder: summary.downstream(folder) for folder in runs}
    names = sorted({name for steps in scores.values() for by_name in steps.values() for name in by_name})

    def rows(run: Run, depth: int) -> Iterator[tuple[str, ...]]:
        branches = [branch for branch in runs.values() if branch.parent == run.root]
        workdir, lineage = Workdir(str(run.root), create=False), summary.ancestry(run.root)
        losses = {line["step"]: line["loss"] for line in logs.read(workdir.metrics, "eval")}
        yield (INDENT * depth + run.root.name, "", "", *("" for _ in names), _changes(run, runs.get(run.parent)))
        steps = {*locate.milestones(workdir), *scores[run.root], *(branch.start for branch in branches)}
        for step in sorted({*steps, *list(losses)[-1:]}):
            loss, tokens = losses.get(step), summary.tokens_read(lineage, step)
            by_name = scores[run.root].get(step, {})
            shown = (f"{by_name[name]:.1%}" if name in by_name else "" for name in names)
            numbers = ("" if tokens is None else f"{tokens:,}", "" if loss is None else f"{loss:.4f}")
            yield (f"{INDENT * (depth + 1)}step {step:,}", *numbers, *shown, "")
            for branch in branches:
                if branch.start == step:
                    yield from rows(branch, depth + 2)

    table = list(rows(first, 0))
    return [("", "tokens read", "loss, nats", *names, "changes"), *table] if len(table) > 2 or names else []


def _branches(runs: dict[UPath, Run]) -> list[Run]:
    """Returns the runs in folders beside some runs that branched off from these, or from one another."""
    folders = {path for root in runs for path in children(root.parent) if (path / "config.json").is_file()}
    others, branches, roots = [], [], set(runs)
    for folder in sorted(folders - roots, key=str):
        with contextlib.suppress(InputError, DamageError):  # config.json may be of something else
            others.append(summary.read_run(folder))
    while more := [run for run in others if run.parent in roots and run.root not in roots]:
        branches += more
        roots |= {run.root for run in more}
    return branches


def _changes(run: Run, parent: Run | None) -> str:
    """Returns what a branch changed as it started; of one without its parent or a checkpoint, where it came from."""
    if parent and (branch := locate.metadata(str(run.root)).get("branch")):  # the parent may have changed since
        return ", ".join(branch["config_changes"])
    return f"from {run.config.train.branch_from}" if run.config and run.config.train.branch_from else ""
