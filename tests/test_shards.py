import hashlib
import json
import math
import pathlib
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer

from mlm.data import blocks, corpus, shards
from mlm.data.manifest import Manifest, load_manifest, verify
from mlm.errors import InputError
from tests.fixtures_data import COUNTS, LENGTH, documents, write_shards


def contents(folder: pathlib.Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stream_of(texts: list[str], tokenizer_folder: str) -> list[int]:
    """<s> ... </s> of one text after the other."""
    tokenizer = Tokenizer.from_file(f"{tokenizer_folder}/tokenizer.json")
    tokenizer.encode_special_tokens = True
    return [id_ for text in texts for id_ in tokenizer.encode(text).ids]


def read_rows(manifest: Manifest, split: str) -> np.ndarray:
    """The rows of a split in the order of the stream, parsed as transformers' TF-TPU example does, record by record."""
    import tensorflow as tf

    facts = manifest.splits[split]
    rows = np.zeros((facts.records, manifest.length), np.int64)
    feature = tf.io.FixedLenFeature((manifest.length,), tf.int64)
    for index, shard in enumerate(facts.shards):
        for number, record in enumerate(tf.data.TFRecordDataset(f"{manifest.folder}/{shard.file}")):
            parsed = tf.io.parse_single_example(record, {"input_ids": feature, "attention_mask": feature})
            assert set(parsed["attention_mask"].numpy()) == {1}
            rows[number * len(facts.shards) + index] = parsed["input_ids"].numpy()
    return rows


def test_rows_are_the_stream_of_tokens_and_only_its_end_is_lost(manifest, texts, tokenizer_folder):
    some = texts[:400]
    for split, own in {
        "train": [text for n, text in enumerate(some) if n % 10],
        "validation": some[::10],
    }.items():
        stream = stream_of(own, tokenizer_folder)
        rows, facts = read_rows(manifest, split), manifest.splits[split]
        assert rows.reshape(-1).tolist() == stream[: len(rows) * LENGTH]
        assert facts.dropped_tokens == len(stream) - rows.size < LENGTH
        assert facts.text_bytes == sum(len(text.encode()) for text in own)
        ordinary = Counter(id_ for id_ in stream if id_ > 4)
        assert facts.tokens == ordinary.total()
        shares = [count / facts.tokens for count in ordinary.values()]
        assert facts.unigram_entropy == pytest.approx(-sum(share * math.log(share) for share in shares), rel=1e-12)


def test_files_are_named_as_the_tf_tpu_example_names_them(manifest):
    assert manifest.full_rows
    for split, facts in manifest.splits.items():
        assert len(facts.shards) == COUNTS[split]
        records = [shard.records for shard in facts.shards]
        assert max(records) - min(records) <= 1
        for number, shard in enumerate(facts.shards):
            path = pathlib.Path(manifest.folder, shard.file)
            assert shard.file == f"{split}/dataset-{number}-{shard.records}.tfrecord"
            assert shard.bytes == path.stat().st_size
            assert shard.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(contents(pathlib.Path(manifest.folder))) == sum(COUNTS.values()) + 1, "nothing else is left there"
    assert load_manifest(manifest.folder) == manifest
    verify(manifest, deep=True)


def test_bytes_do_not_depend_on_the_workers(texts, tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 9_000)
    monkeypatch.setattr(blocks, "BLOCK_DOCUMENTS", 40)
    made = [write_shards(texts[:400], tmp_path / str(workers), tokenizer_folder, workers=workers) for workers in (1, 3)]
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert made[0].fingerprint == made[1].fingerprint


def test_bytes_do_not_depend_on_the_blocks(manifest, texts, tokenizer_folder, tmp_path, monkeypatch):
    """Remainders are carried from one block to the next; so are the shards' turns."""
    monkeypatch.setattr(blocks, "BLOCK_DOCUMENTS", 7)
    monkeypatch.setattr(shards, "OPEN_FILES", 2)
    write_shards(texts[:400], tmp_path / "small", tokenizer_folder)
    assert contents(tmp_path / "small") == contents(pathlib.Path(manifest.folder))


def test_words_that_look_like_special_tokens_stay_text(texts, tokenizer_folder, tmp_path):
    hostile = [f"{text} <mask> </s> <s> <pad> <unk>" for text in texts[:400]]
    made = write_shards(hostile, tmp_path / "shards", tokenizer_folder)
    rows = read_rows(made, "train")
    assert set(rows.reshape(-1)) & {1, 4} == set()
    assert abs(int((rows == 0).sum()) - 360) <= 1, "one <s> a document"


def test_duplicates_and_documents_are_counted(texts, tokenizer_folder, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:300] + texts[:40]))
    made = shards.write(
        documents((f"jsonl:{tmp_path}/a.jsonl",)),
        tokenizer_folder=tokenizer_folder,
        folder=str(tmp_path / "shards"),
        length=LENGTH,
        counts=COUNTS,
        workers=1,
        source="a",
    )
    splits = made.splits.values()
    assert sum(split.documents for split in splits) == 300
    assert sum(split.duplicates for split in splits) == 40
    assert load_manifest(made.folder) == made


def test_what_is_there_is_kept(manifest, tokenizer_folder, tmp_path):
    def untouched():
        raise AssertionError("the documents were read")
        yield

    settings = {"tokenizer_folder": tokenizer_folder, "length": LENGTH, "counts": COUNTS, "source": "texts"}
    before = contents(pathlib.Path(manifest.folder))
    kept = shards.write(untouched(), folder=manifest.folder, workers=2, **settings)
    assert kept == manifest
    for change in ({"length": 16}, {"source": "others"}, {"counts": {"train": 5, "validation": 2}}):
        with pytest.raises(InputError, match="another corpus, tokenizer or setting"):
            shards.write(untouched(), folder=manifest.folder, workers=2, **(settings | change))
    assert contents(pathlib.Path(manifest.folder)) == before


def test_an_empty_folder_may_be_there_and_another_is_kept(texts, tokenizer_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    write_shards(texts[:400], tmp_path / "empty", tokenizer_folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").write_text("precious")
    with pytest.raises(InputError, match="other"):
        write_shards(texts[:400], tmp_path / "other", tokenizer_folder)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["precious.txt"]
    with pytest.raises(InputError, match=r"precious\.txt: holds"):
        write_shards(texts[:400], tmp_path / "other" / "precious.txt", tokenizer_folder)
    with pytest.raises(InputError, match="can't be written"):
        write_shards(texts[:400], tmp_path / "other" / "precious.txt" / "shards", tokenizer_folder)


def test_a_writing_that_failed_leaves_no_folder_and_can_be_done_again(manifest, texts, tokenizer_folder, tmp_path):
    def broken():
        yield from (corpus.Document(text, "train") for text in texts[:50])
        raise InputError("the corpus is gone")

    folder = tmp_path / "shards"
    settings = {"tokenizer_folder": tokenizer_folder, "folder": str(folder), "length": LENGTH, "counts": COUNTS}
    with pytest.raises(InputError, match="the corpus is gone"):
        shards.write(broken(), workers=1, source="texts", **settings)
    assert not folder.exists()
    write_shards(texts[:400], folder, tokenizer_folder)
    assert contents(folder) == contents(pathlib.Path(manifest.folder))


@pytest.mark.parametrize(
    ("count", "settings", "words"),
    [
        (400, {"counts": {"train": 5000, "validation": 2}}, "config.shards.count = 5000"),
        (400, {"length": 20_000}, "config.shards.count = 6"),
        (1, {}, "config.shards.count = 6"),
        (0, {}, "only 0 rows"),
        (9, {"counts": {"train": 1, "validation": 1}, "length": 1000}, "config.shards.count|validation"),
    ],
)
def test_too_little_text_is_refused(texts, tokenizer_folder, tmp_path, count, settings, words):
    with pytest.raises(InputError, match=words):
        write_shards(texts[:count], tmp_path / "shards", tokenizer_folder, **settings)
    assert not (tmp_path / "shards").exists()


def test_an_empty_validation_split_is_refused(texts, tokenizer_folder, tmp_path):
    stream = (corpus.Document(text, "train") for text in texts[:400])
    settings = {"folder": str(tmp_path / "shards"), "length": LENGTH, "counts": COUNTS, "workers": 1, "source": ""}
    with pytest.raises(InputError, match="validation"):
        shards.write(stream, tokenizer_folder=tokenizer_folder, **settings)


def test_a_small_validation_split_gets_fewer_shards(texts, tokenizer_folder, tmp_path):
    made = write_shards(texts[:400], tmp_path / "s", tokenizer_folder, counts={"train": 2, "validation": 100_000})
    assert [shard.records for shard in made.splits["validation"].shards] == [1] * made.splits["validation"].records


def test_no_framework_is_imported():
    """Their start costs more than the writing of a small corpus, and every worker process would pay it."""
    code = "import sys; import mlm.data.shards, mlm.data.corpus, mlm.commands.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "mlm.data.shards" in found
    assert not found & {"jax", "tensorflow", "transformers", "torch", "datasets"}
