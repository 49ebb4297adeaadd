"""Tables of the shapes of GLUE's tasks, of made-up texts, as the Hub has them: test rows have the label -1."""

import json
import pathlib

import numpy as np

from mlm.glue.tasks import AX, TASKS
from tests.support.labelled_texts import rows


def write(folder: pathlib.Path, *, train: int = 48, held_out: int = 16) -> str:
    """Writes all splits of all tasks; returns them as --data takes them."""
    for seed, (name, task) in enumerate(TASKS.items()):
        tests = [split for split, _ in task.tests if split != AX]
        for number, split in enumerate(["train", *task.validation, *tests]):
            write_split(
                folder,
                name,
                split,
                train if split == "train" else held_out,
                seed=10 * seed + number,
            )
    write_split(folder, "mnli", "test", 11, seed=99, target=folder / AX)
    return f"jsonl:{folder}"


def write_split(
    folder: pathlib.Path,
    name: str,
    split: str,
    count: int,
    *,
    seed: int,
    target: pathlib.Path | None = None,
) -> None:
    """The class follows from the first word; the number from the colours."""
    task = TASKS[name]
    rng = np.random.default_rng(seed)
    found = []
    for number, row in enumerate(rows(count, seed)):
        texts = [
            row["text"],
            *(each["text"] for each in rows(len(task.text) - 1, int(rng.integers(10**6)))),
        ]
        label = ["animal", "money", "weather"].index(row["label"]) % max(1, len(task.labels))
        label = (
            5 * row["score"]
            if not task.labels
            else label
            if rng.random() < 0.9
            else number % len(task.labels)
        )
        if split.startswith("test") or target:
            label = -1
        found.append(dict(zip(task.text, texts, strict=True)) | {"label": label, "idx": number})
    target = target or folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
