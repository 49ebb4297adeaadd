"""Duplicates by ranges of the hash: the first in part and place stays, whatever the ranges are."""

import itertools
import random

import numpy as np
import pytest

from mlm.data import deduplicate, map_part, results
from mlm.data.map_part import BLOCK, DOCUMENT, Map
from mlm.paths import UPath
from tests.fixtures_data import corpus_of, write_jsonl


@pytest.fixture(scope="module")
def parts(tokenizer_folder, tmp_path_factory) -> tuple[str, list[list[str]]]:
    """The folder of the files of seven parts, "0" to "6", and their texts: most of them are somewhere else, too."""
    folder, draw = tmp_path_factory.mktemp("parts"), random.Random(0)
    texts = [[f"text {draw.randint(0, 60)}" for _ in range(draw.choice([1, 20, 40]))] for _ in range(7)]
    texts[3] = texts[3][:1] * 5
    for number, own in enumerate(texts):
        corpus = corpus_of((write_jsonl(folder / f"{number}.jsonl", own),))
        keys = {"texts": "", "folder": str(folder), "key": str(number)}
        map_part.map_part(Map(corpus.parts()[0], corpus, 0, tokenizer_folder, 100, (), **keys))
    return str(folder), texts


def left_out(folder: str, maps: tuple[str, ...], ranges: list[tuple[int, int]]) -> tuple[list[set[int]], np.ndarray]:
    """The places left out of each part, and all DROPPED."""
    keys = tuple(f"{len(ranges)}-{first}" for first, _ in ranges)
    for key, (first, stop) in zip(keys, ranges, strict=True):
        deduplicate.deduplicate(deduplicate.Deduplicate(maps, first, stop, folder, key))
    found = []
    for part, name in enumerate(maps):
        places = results.load(UPath(f"{folder}/{name}.documents"), DOCUMENT)["place"]
        rows = deduplicate.left_out(folder, keys, part, len(maps))
        assert len(set(rows.tolist())) == len(rows)
        found.append(set(places[rows].tolist()))
    return found, np.concatenate([results.load(UPath(f"{folder}/{key}.dropped"), deduplicate.DROPPED) for key in keys])


@pytest.mark.parametrize("tasks", [1, 2, 64])
@pytest.mark.parametrize("order", [range(7), [6, 2, 0, 1, 3, 5, 4], [3]])
def test_the_first_stays(parts, tasks, order):
    folder, texts = parts
    ranges = deduplicate.ranges(1000 * tasks, 1000, map_part.RANGES)
    assert len(ranges) == tasks
    maps, seen, expected = tuple(map(str, order)), set(), []
    for part in order:
        expected.append(set())
        for place, text in enumerate(texts[part]):
            if text in seen:
                expected[-1].add(place)
            seen.add(text)
    found, dropped = left_out(folder, maps, ranges)
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
    for part, block, documents, tokens in dropped.tolist():
        before = sums.get((part, block), (0, 0))
        sums[part, block] = before[0] + documents, before[1] + tokens
    assert sums == lost


def test_ranges_hold_everything_once():
    for items in (0, 1, 8 * 10**6, 10**9, 10**12):
        found = deduplicate.ranges(items, deduplicate.DOCUMENTS, map_part.RANGES)
        assert found[0][0] == 0 and found[-1][1] == map_part.RANGES
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in itertools.pairwise(found))
        assert len(found) == min(max(1, -(-items // deduplicate.DOCUMENTS)), map_part.RANGES)
