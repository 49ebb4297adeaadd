"""A part of a corpus -> tokens, tables and blocks: what the files say, against the texts counted one by one."""

import pathlib

import numpy as np
import pytest

from mlm.data import map_part, results
from mlm.data.corpus import Corpus, text_hash
from mlm.data.map_part import BLOCK, DOCUMENT, Map
from mlm.paths import UPath
from tests.support.corpora import contents, corpus_of, ids_of, write_jsonl


def mapped(corpus: Corpus, tokenizer_folder: str, folder: pathlib.Path) -> UPath:
    """The files of the only part; {key}.* are those at this path with another suffix."""
    (part,) = corpus.parts()
    keys = {"texts": "", "folder": str(folder), "key": "x"}
    map_part.map_part(Map(part, corpus, 0, tokenizer_folder, "", 3000, (), **keys))
    return UPath(folder) / "x.blocks"


@pytest.fixture
def corpus(texts, tmp_path) -> Corpus:
    return corpus_of((write_jsonl(tmp_path / "a.jsonl", [*texts[:150], "", " ", *texts[150:200], texts[3]]),))


def test_tables_are_those_of_the_documents(corpus, texts, tokenizer_folder, tmp_path):
    file = mapped(corpus, tokenizer_folder, tmp_path / "tasks")
    own, (part,) = [*texts[:200], texts[3]], corpus.parts()
    ids = ids_of(own, tokenizer_folder)
    documents, blocks = (
        results.load(file.with_suffix(n), t) for n, t in ((".documents", DOCUMENT), (".blocks", BLOCK))
    )
    tokens = results.load(file.with_suffix(".tokens"), np.uint16)
    assert sorted(documents["place"].tolist()) == list(range(201)), "empty ones don't count"
    assert documents["tokens"].tolist() == [len(ids[place]) for place in documents["place"]]
    assert documents["bytes"].tolist() == [len(own[place].encode()) for place in documents["place"]]
    assert tokens.tolist() == [each for place in documents["place"] for each in ids[place]]
    split = [corpus.split_of(part, "", text_hash(text)) for text in own]
    row = offset = 0
    for block in blocks:
        inside = documents[row : row + block["documents"]]
        assert (block["row"], block["offset"]) == (row, offset)
        assert block["tokens"] == inside["tokens"].sum() and block["bytes"] == inside["bytes"].sum()
        assert {split[place] for place in inside["place"]} == {("train", "validation")[block["split"]]}
        assert (np.diff(inside["place"].astype(int)) > 0).all(), "in order"
        row, offset = row + len(inside), offset + int(block["tokens"])
    assert row == 201 and offset == len(tokens)
    assert len({block["hash"].item() for block in blocks}) == len(blocks) > 10
    assert (blocks["bytes"][:-2] >= 3000).all() and (blocks["bytes"] < 3000 + documents["bytes"].max()).all()


def test_blocks_do_not_depend_on_where_documents_are_tokenized_together(
    corpus, tokenizer_folder, tmp_path, monkeypatch
):
    mapped(corpus, tokenizer_folder, tmp_path / "many")
    monkeypatch.setattr(map_part, "BATCH_DOCUMENTS", 2)
    mapped(corpus, tokenizer_folder, tmp_path / "few")
    assert contents(tmp_path / "many") == contents(tmp_path / "few") and len(contents(tmp_path / "few")) == 6
