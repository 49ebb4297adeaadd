"""What a classifier confuses with what: the file that `classify` and `evaluate` leave, for a person. Without jax."""

from __future__ import annotations

from typing import Any

from mlm import logs
from mlm.workdir import Workdir


def read(workdir: Workdir) -> dict[str, Any]:
    """Returns what the file holds, nothing if there is none; raises DamageError if it is not JSON."""
    return logs.read_object(workdir.classification)


def pairs(content: dict[str, Any], most: int) -> list[tuple[str, str, int, int]]:
    """Returns (true, predicted, how often, rows of the true class) of the pairs most often confused, worst first."""
    table, labels = content.get("confusion", []), content.get("labels", [])
    cells = [
        (labels[true], labels[other], count, sum(row))
        for true, row in enumerate(table)
        for other, count in enumerate(row)
        if true != other and count
    ]
    return sorted(cells, key=lambda cell: -cell[2])[:most]
