"""A shard: the documents of its blocks in order, and where each of its records is from."""

import shutil

import numpy as np
import pytest

from mlm.data.manifest import Manifest, load_manifest
from mlm.data.write_shard import find_documents
from mlm.errors import InputError
from tests.data.rows import small_parts
from tests.support.corpora import (
    LENGTH,
    corpus_of,
    ids_of,
    read_documents,
    shard_rows,
    write_jsonl,
    write_shards,
)


@pytest.fixture(scope="module")
def made(
    texts, tokenizer_folder, tmp_path_factory
) -> tuple[Manifest, dict[tuple[str, str, int], str]]:
    """Shards of two sources in several parts and many blocks, with duplicates; and the text of each document."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        small_parts(patch)
        a = write_jsonl(folder / "a.jsonl", texts[:120] + texts[:30])
        corpus = corpus_of((a, write_jsonl(folder / "b.jsonl", texts[110:200])), weights=(1.0, 2.0))
        found = {}
        places = {}
        for part, (text, _) in read_documents(corpus):
            place = places[part] = places.get(part, -1) + 1
            found[part.source, part.name, place] = text
        return write_shards(corpus, folder / "shards", tokenizer_folder), found


def test_documents_of_every_record(made, tokenizer_folder):
    """Those whose tokens it holds, and no others."""
    manifest, texts = made
    ids = dict(zip(texts, ids_of(texts.values(), tokenizer_folder), strict=True))
    for split in ("train", "validation"):
        rows = [row.tolist() for shard in shard_rows(manifest, split) for row in shard]
        for record in [*range(0, len(rows), 17), len(rows) - 1]:
            found = find_documents(manifest, split, record)
            stream = [each for name in found for each in ids[name]]
            first = len(ids[found[0]])
            last = len(ids[found[-1]])
            starts = range(
                max(0, len(stream) - LENGTH - last + 1), min(first, len(stream) - LENGTH + 1)
            )
            assert any(stream[n : n + LENGTH] == rows[record] for n in starts), record


def test_a_record_that_is_not_there(manifest):
    count = manifest.splits["train"].records
    for record in (-1, count):
        with pytest.raises(InputError, match=f"record {record}: .* 0 to {count - 1}"):
            find_documents(manifest, "train", record)


def test_shards_that_do_not_say_where_they_are_from(manifest, tmp_path):
    folder = shutil.copytree(manifest.folder, tmp_path / "shards")
    np.save(folder / "documents" / "train-0.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):  # nothing of it is executed
        find_documents(load_manifest(str(folder)), "train", 0)
    shutil.rmtree(folder / "documents")
    with pytest.raises(InputError, match="doesn't say where its records are from"):
        find_documents(load_manifest(str(folder)), "train", 0)
