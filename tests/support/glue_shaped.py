"""Tables of the shapes of GLUE's tasks, of made-up texts, as the Hub has them: test rows have the label -1."""

import pathlib

import numpy as np

from mlm.glue.tasks import AX, TASKS, Task
from tests.support.labelled_texts import LABELS, rows, write_jsonl


def write(folder: pathlib.Path) -> str:
    """Writes all splits of all tasks; returns them as --data takes them."""
    for seed, (name, task) in enumerate(TASKS.items()):
        (folder / name).mkdir(parents=True)
        tests = [split for split, _ in task.tests if split != AX]
        for number, split in enumerate(["train", *task.validation, *tests]):
            count = 48 if split == "train" else 16
            table = made_up(task, count, 10 * seed + number, is_test=split in tests)
            write_jsonl(folder / name / f"{split}.jsonl", table)
    (folder / AX).mkdir()
    write_jsonl(folder / AX / "test.jsonl", made_up(TASKS["mnli"], 11, 99, is_test=True))
    return f"jsonl:{folder}"


def made_up(task: Task, count: int, seed: int, *, is_test: bool) -> list[dict]:
    """The class follows from the first word, but for one row in ten; the number from the colours."""
    rng = np.random.default_rng(seed)
    table = []
    for number, row in enumerate(rows(count, seed)):
        others = rows(len(task.text) - 1, int(rng.integers(10**6)))
        texts = [row["text"], *(other["text"] for other in others)]
        label = 5 * row["score"]
        if is_test:
            label = -1
        elif task.labels:
            is_clear = rng.random() < 0.9
            label = (LABELS.index(row["label"]) if is_clear else number) % len(task.labels)
        table.append(dict(zip(task.text, texts, strict=True)) | {"label": label, "idx": number})
    return table
