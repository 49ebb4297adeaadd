"""Where a record is from: the documents whose tokens it holds."""

import shutil

import numpy as np
import pytest

from mlm.data.manifest import load_manifest
from mlm.doctor.origin import find_documents
from mlm.errors import DamageError, InputError
from tests.fixtures_data import LENGTH, ids_of, shard_rows
from tests.test_write_shard import made  # noqa: F401 (a fixture)


def test_documents_of_every_record(made, tokenizer_folder):  # noqa: F811
    """Those whose tokens it holds, and no others."""
    manifest, texts = made
    ids = dict(zip(texts, ids_of(texts.values(), tokenizer_folder), strict=True))
    for split in ("train", "validation"):
        rows = [row.tolist() for shard in shard_rows(manifest, split) for row in shard]
        for record in [*range(0, len(rows), 17), len(rows) - 1]:
            found = find_documents(manifest, split, record)
            stream = [each for name in found for each in ids[name]]
            first, last = len(ids[found[0]]), len(ids[found[-1]])
            starts = range(max(0, len(stream) - LENGTH - last + 1), min(first, len(stream) - LENGTH + 1))
            assert any(stream[n : n + LENGTH] == rows[record] for n in starts), record


def test_a_record_that_is_not_there(made, manifest, tmp_path):  # noqa: F811
    own, _ = made
    count = own.splits["train"].records
    for record in (-1, count):
        with pytest.raises(InputError, match=f"record {record}: the train split has the records 0 to {count - 1}"):
            find_documents(own, "train", record)


def test_shards_that_do_not_say_where_they_are_from(manifest, tmp_path):
    folder = shutil.copytree(manifest.folder, tmp_path / "shards")
    (folder / "documents" / "train-0.npy").write_bytes(b"not an array")
    with pytest.raises(DamageError, match="documents: is not what was written; write the shards again"):
        find_documents(load_manifest(str(folder)), "train", 0)
    np.save(folder / "documents" / "train-0.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(DamageError, match="documents: is not what was written"):
        find_documents(load_manifest(str(folder)), "train", 0)
    shutil.rmtree(folder / "documents")
    with pytest.raises(InputError, match="doesn't say where its records are from"):
        find_documents(load_manifest(str(folder)), "train", 0)
