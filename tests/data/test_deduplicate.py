"""Duplicates by ranges of the hash: the first in part and place stays, whatever the ranges are."""

import itertools
import random

import numpy as np
import pytest

from mlm.data import deduplicate, map_part, results
from mlm.data.map_part import BLOCK, DOCUMENT, Map
from mlm.paths import UPath
from tests.support.corpora import corpus_of, write_jsonl


@pytest.fixture(scope="module")
def parts(tokenizer_folder, tmp_path_factory) -> tuple[str, list[list[str]]]:
    """The folder of the files of seven parts, "0" to "6", and their texts: most of them are somewhere else, too."""
    folder, draw = tmp_path_factory.mktemp("parts"), random.Random(0)
    texts = [[f"text {draw.randint(0, 60)}" for _ in range(draw.choice([1, 20, 40]))] for _ in range(7)]
    texts[3] = texts[3][:1] * 5
    for number, own in enumerate(texts):
        corpus = corpus_of((write_jsonl(folder / f"{number}.jsonl", own),))
        keys = {"texts": "", "folder": str(folder), "key": str(number)}
        map_part.map_part(Map(corpus.parts()[0], corpus, 0, tokenizer_folder, "", 100, (), **keys))
    return str(folder), texts


def left_out(folder: str, maps: tuple[str, ...]) -> tuple[list[set[int]], np.ndarray, list[str]]:
    """The places left out of each part, all DROPPED, and the labels of the tasks that were run."""
    labels = []

    def do(function, tasks, *, label, last):
        for task in tasks:
            function(task)
            assert UPath(f"{folder}/{task.key}{last}").is_file()
            labels.append(label)

    tasks, found = deduplicate.run(do, maps, documents=1024, near=0, folder=folder), []
    for task in tasks:
        for part, name in enumerate(task.maps, task.first):
            places, file = results.load(UPath(f"{folder}/{name}.documents"), DOCUMENT)["place"], task.rows(part)
            rows = results.load(UPath(f"{folder}/{file}"), np.uint32) if UPath(f"{folder}/{file}").is_file() else []
            assert sorted(set(rows)) == list(rows)
            found.append(set(places[rows].tolist()) if len(rows) else set())
    dropped = [results.load(UPath(f"{folder}/{task.key}.dropped"), deduplicate.DROPPED) for task in tasks]
    return found, np.concatenate(dropped), labels


@pytest.mark.parametrize(
    ("tasks", "last", "order"),
    [(1, 1, range(7)), (2, 7, [6, 2, 0, 1, 3, 5, 4]), (64, 7, range(7)), (64, 7, [3])],
)
def test_the_first_stays(parts, tasks, last, order, monkeypatch):
    folder, texts = parts
    monkeypatch.setattr(deduplicate, "DOCUMENTS", {1: 1024, 2: 512, 64: 16}[tasks])
    monkeypatch.setattr(deduplicate, "DECIDED", 1024 if last == 1 else 1)
    maps, seen, expected = tuple(map(str, order)), set(), []
    for part in order:
        expected.append(set())
        for place, text in enumerate(texts[part]):
            if text in seen:
                expected[-1].add(place)
            seen.add(text)
    found, dropped, labels = left_out(folder, maps)
    assert labels.count("deduplicate") == tasks and labels.count("leave out") == min(last, len(maps))
    assert found == expected and sum(map(len, found)) > 0
    lost = {}
    for number, name in enumerate(maps):
        blocks = results.load(UPath(f"{folder}/{name}.blocks"), BLOCK)
        table = results.load(UPath(f"{folder}/{name}.documents"), DOCUMENT)
        for index, block in enumerate(blocks):
            rows = table[block["row"] : block["row"] + block["documents"]]
            rows = rows[np.isin(rows["place"], list(expected[number]))]
            if len(rows):
                lost[number, index] = (len(rows), int(rows["tokens"].sum()))
    sums: dict = {}
    for part, block, why, documents, tokens in dropped.tolist():
        assert deduplicate.WHY[why] == "duplicates"
        before = sums.get((part, block), (0, 0))
        sums[part, block] = before[0] + documents, before[1] + tokens
    assert sums == lost


def test_ranges_hold_everything_once():
    for items in (0, 1, 8 * 10**6, 10**9, 10**12):
        found = deduplicate.ranges(items, deduplicate.DOCUMENTS, map_part.RANGES)
        assert found[0][0] == 0 and found[-1][1] == map_part.RANGES
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in itertools.pairwise(found))
        assert len(found) == min(max(1, -(-items // deduplicate.DOCUMENTS)), map_part.RANGES)
