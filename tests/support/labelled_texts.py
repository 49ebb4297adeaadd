"""Labelled texts that a tiny model can learn in seconds, as files, and a run on them."""

import csv
import json
import pathlib

import numpy as np

from tests.support.tiny import TINY

COLOURS = ("red", "green", "blue", "white", "black")
LABELS = ("animal", "money", "weather")
WORDS = {
    "animal": "cat dog horse bird fish",
    "money": "card bank coin price bill",
    "weather": "rain snow wind sun fog",
}
SETTINGS = (
    *(setting for setting in TINY if not setting.startswith(("train.steps", "shards."))),
    "train.steps=0",
    "train.epochs=3",
    "data.lanes=4",
    "classify.length=24",
    "shards.length=32",
    "checkpoint.every=0",
    "evaluate.every=0",
)


def rows(count: int, seed: int = 0) -> list[dict]:
    """Texts of one to about thirty tokens: the label follows from the first word, the number from the next four."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        label = LABELS[rng.integers(3)]
        colours = [COLOURS[n] for n in rng.integers(5, size=rng.integers(0, 12))]
        text = " ".join([rng.choice(WORDS[label].split()), *colours])
        found.append({"text": text, "label": label, "score": colours[:4].count("red") / 4})
    return found


def write_csv(path: pathlib.Path, table: list[dict]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return f"csv:{path}"


def write_jsonl(path: pathlib.Path, table: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return f"jsonl:{path}"


def settings(folder: pathlib.Path, tokenizer_folder: str, *overrides: str) -> list[str]:
    """Overrides of configs/base.py for a run on rows written into `folder`: 83 to train on, 29 held out."""
    sources = (
        f"classify.train={write_csv(folder / 'train.csv', rows(83))}",
        f"classify.validation={write_csv(folder / 'validation.csv', rows(29, seed=1))}",
        f"tokenizer.path={tokenizer_folder}",
    )
    return [*SETTINGS, *sources, *overrides]


def sentences(count: int, seed: int = 0) -> list[dict]:
    """Words and their labels, in a list each: an animal, of one or two words, and money; the word alone says which."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        words = []
        tags = []
        for _ in range(rng.integers(1, 4)):
            kind = LABELS[rng.integers(3)]
            words += [COLOURS[rng.integers(5)], rng.choice(WORDS[kind].split())]
            tags += ["O", {"animal": "B-LIFE", "money": "B-CASH", "weather": "O"}[kind]]
            if kind == "animal" and rng.random() < 0.5:
                words.append(rng.choice(WORDS[kind].split()))
                tags.append("I-LIFE")
        found.append({"tokens": list(map(str, words)), "ner_tags": tags})
    return found


TOKENS = ("classify.kind=tokens", "classify.text=('tokens',)", "classify.label=ner_tags")


def word_settings(folder: pathlib.Path) -> tuple[str, ...]:
    """Overrides of `settings` for a run on sentences."""
    source = write_conll(folder / "train.conll", sentences(120))
    held_out = write_jsonl(folder / "validation.jsonl", sentences(29, seed=1))
    sources = (f"classify.train={source}", f"classify.validation={held_out}")
    return (*TOKENS, *sources, "classify.length=32")


def write_conll(path: pathlib.Path, table: list[dict]) -> str:
    """As CoNLL-2003 is: four columns, and -DOCSTART- lines."""
    blocks = [
        "".join(f"{w} NN B-NP {t}\n" for w, t in zip(*row.values(), strict=True)) for row in table
    ]
    path.write_text("-DOCSTART- -X- -X- O\n\n" + "\n".join(blocks), encoding="utf-8")
    return f"conll:{path}"
