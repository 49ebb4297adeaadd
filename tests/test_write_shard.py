"""A shard: the documents of its blocks in order, and where each of its records is from."""

import json
import pathlib

import numpy as np
import pytest

from mlm.data import shards, sources
from mlm.data.manifest import Manifest
from tests.fixtures_data import LENGTH, corpus_of, ids_of, read_documents, shard_rows, write_jsonl, write_shards


@pytest.fixture(scope="module")
def made(texts, tokenizer_folder, tmp_path_factory) -> tuple[Manifest, dict[tuple[str, str, int], str]]:
    """Shards of two sources in several parts and many blocks, with duplicates; and the text of each document."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PART_BYTES", (20_000, 10**9))
        patch.setattr(shards, "BLOCK_BYTES", (1500, 10**9))
        a = write_jsonl(folder / "a.jsonl", texts[:250] + texts[:30])
        corpus = corpus_of((a, write_jsonl(folder / "b.jsonl", texts[240:400])), weights=(1.0, 2.0))
        found, places = {}, {}
        for part, (text, _) in read_documents(corpus):
            place = places[part] = places.get(part, -1) + 1
            found[part.source, part.name, place] = text
        return write_shards(corpus, folder / "shards", tokenizer_folder), found


def test_rows_are_the_documents_of_the_table_in_order(made, tokenizer_folder):
    """Of each shard, tokenized one by one; the partial row at its end is lost, and counted."""
    manifest, texts = made
    parts, held = json.loads(pathlib.Path(manifest.folder, "documents", "parts.json").read_text()), []
    for split, facts in manifest.splits.items():
        lost = 0
        for number, rows_NxL in enumerate(shard_rows(manifest, split)):
            table = np.load(f"{manifest.folder}/documents/{split}-{number}.npy")
            own = [texts[(*parts[part], place)] for _, part, place in table.tolist()]
            ids = ids_of(own, tokenizer_folder)
            stream = [each for row in ids for each in row]
            assert rows_NxL.ravel().tolist() == stream[: rows_NxL.size]
            assert table["start"].tolist() == np.cumsum([0, *map(len, ids[:-1])]).tolist()
            assert 0 <= len(stream) - rows_NxL.size < LENGTH, "at most one partial row"
            lost += len(stream) - rows_NxL.size
            held += [(split, text) for text in own]
        assert lost == facts.dropped_tokens and facts.documents == sum(name == split for name, _ in held)
    counts = {text: sum(text == each for _, each in held) for text in set(texts.values())}
    first = {}
    for (source, _, _), text in texts.items():
        first.setdefault(text, source)
    validation = {text for split, text in held if split == "validation"}
    assert counts == {t: 1 if t in validation or first[t].endswith("a.jsonl") else 2 for t in counts}, "b comes twice"
    assert validation.isdisjoint(text for split, text in held if split == "train")
