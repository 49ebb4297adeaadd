"""The look for what comes twice, against plain Python on rows that were made for it."""

from collections import Counter

import numpy as np
import pytest

from mlm.data.manifest import Manifest, load_manifest
from mlm.data.stretches import STRETCH
from mlm.doctor import scan
from tests.support.refusals import foreign

CLS = 0
SEP = 2
LENGTH = 48
SPECIAL = (0, 1, 2, 3, 4)


def write(folder, tokenizer_folder: str, splits: dict[str, np.ndarray], shards: int) -> Manifest:
    foreign(folder, shards, **splits)
    return load_manifest(str(folder), tokenizer_folder=tokenizer_folder)


def stream(count: int, seed: int, pool: int) -> np.ndarray:
    """Rows cut from documents put end to end, of 3 to 40 tokens; `pool` different ones."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(5, 600, rng.integers(3, 41)) for _ in range(pool)]
    tokens: list[int] = []
    while len(tokens) < count * LENGTH:
        tokens += [CLS, *texts[rng.integers(pool)], SEP]
    return np.array(tokens[: count * LENGTH]).reshape(count, LENGTH)


def whole_documents(ids: np.ndarray) -> list[tuple[int, ...]]:
    found = []
    for row in ids.tolist():
        begin = None
        for place, token in enumerate(row):
            if token == SEP and begin is not None and place - begin >= scan.SHORTEST:
                found.append(tuple(row[begin:place]))
            begin = place + 1 if token == CLS else None if token == SEP else begin
    return found


def grams(row: list[int]) -> list[tuple[int, ...]]:
    pieces = (tuple(row[n : n + STRETCH]) for n in range(len(row) - STRETCH + 1))
    return [piece for piece in pieces if not set(piece) & set(SPECIAL)]


@pytest.fixture(scope="module")
def splits() -> dict[str, np.ndarray]:
    train = stream(1300, 0, pool=900)
    validation = stream(90, 1, pool=1000)
    validation[10, 2:40] = train[700, 5:43]  # moved
    validation[50] = max(train, key=lambda row: len(grams(row.tolist())))  # the same
    validation[60, :12] = train[3, :12]  # too short to be anything
    return {"train": train, "validation": validation}


@pytest.fixture(scope="module")
def found(splits, tokenizer_folder, tmp_path_factory) -> scan.Repeats:
    manifest = write(tmp_path_factory.mktemp("scan"), tokenizer_folder, splits, shards=3)
    return scan.find_repeats(manifest, max_rows=10_000)


def test_repeated_documents_are_those_counted_one_by_one(found, splits):
    texts = whole_documents(splits["train"])
    assert found.share == 1
    assert found.documents == len(texts) > 1000
    assert found.repeated == len(texts) - len(set(texts)) > 100
    frequent, _ = Counter(texts).most_common(1)[0]
    assert str(list(frequent))[1:-1] in str(splits["train"][found.example].tolist())


def test_overlapping_rows_are_those_counted_one_by_one(found, splits):
    known = {piece for row in splits["train"].tolist() for piece in grams(row)}
    judged = []
    over = []
    for number, row in enumerate(splits["validation"].tolist()):
        pieces = grams(row)
        if len(pieces) >= scan.LEAST_STRETCHES:
            judged.append(number)
            if sum(piece in known for piece in pieces) >= len(pieces) / 2:
                over.append(number)
    overlap = found.overlaps["validation"]
    assert overlap.rows.tolist() == judged and len(judged) > 50
    assert overlap.overlapping.tolist() == over and {10, 50, overlap.pair[0]} <= set(over)
    row, of_train = overlap.pair
    shared = set(grams(splits["validation"][row].tolist()))
    assert shared & set(grams(splits["train"][of_train].tolist()))


def test_a_sample_of_the_shards_keeps_the_records_numbers(splits, tokenizer_folder, tmp_path):
    manifest = write(tmp_path, tokenizer_folder, splits, shards=10)
    parts, share = scan.rows(manifest, "train", 400)
    batches = list(parts)
    records = np.concatenate([batch["record_id"] for batch in batches])
    assert share == len(records) / 1300 and 300 <= len(records) <= 520
    assert len(set(records)) == len(records)
    assert records.max() > 1000, "not the beginning alone"
    ids = np.concatenate([batch["input_ids"] for batch in batches])
    np.testing.assert_array_equal(ids, splits["train"][records])
    for record in (0, 129, 130, 1299):
        np.testing.assert_array_equal(scan.row(manifest, "train", record), splits["train"][record])
