"""Shards of a corpus, by all tasks together: their rows, counts and bytes, and what is refused."""

import collections
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest

from mlm.data import results, shards
from mlm.data.corpus import Corpus
from mlm.data.manifest import Manifest, load_manifest, verify
from mlm.data.write_shard import find_documents
from mlm.errors import InputError
from mlm.workdir import lock, work_folder
from tests.data.rows import small_parts
from tests.support.corpora import (
    COUNTS,
    LENGTH,
    contents,
    corpus_of,
    ids_of,
    read_documents,
    shard_rows,
    split_of,
    write_jsonl,
    write_shards,
    written_texts,
)

SPLITS = ("train", "validation")


@pytest.fixture(scope="module")
def repeated(texts, tmp_path_factory) -> Corpus:
    """Two sources in which documents come twice: in one part, in two, and in both sources."""
    folder = tmp_path_factory.mktemp("repeated")
    a = write_jsonl(folder / "a.jsonl", texts[:200] + texts[198:200] + texts[:20])
    b = write_jsonl(folder / "b.jsonl", texts[200:300] + texts[100:110])
    return corpus_of((a, b))


@pytest.fixture(scope="module")
def made(repeated, tokenizer_folder, tmp_path_factory) -> Manifest:
    with pytest.MonkeyPatch.context() as patch:
        small_parts(patch)
        return write_shards(repeated, tmp_path_factory.mktemp("made") / "shards", tokenizer_folder)


def test_counts_are_those_of_the_texts(made, repeated, tokenizer_folder):
    """Of each split: distinct documents, duplicates, bytes, and what is dropped."""
    counts = collections.Counter(text for _, (text, _) in read_documents(repeated))
    splits = split_of(repeated)
    for split in SPLITS:
        held = [text for text in counts if splits[text] == split]
        found = made.splits[split]
        assert found.documents == len(held)
        assert found.duplicates == sum(counts[text] - 1 for text in held) > 0
        assert found.text_bytes == sum(len(text.encode()) for text in held)
        tokens = list(map(len, ids_of(held, tokenizer_folder)))
        rows = sum(len(rows) for rows in shard_rows(made, split))
        assert found.records == rows and sum(tokens) == rows * LENGTH + found.dropped_tokens
        assert 0 < found.dropped_tokens < len(found.shards) * LENGTH


def test_the_documents_of_every_record(small, made, repeated, tokenizer_folder):
    """Those whose tokens it holds, and no others."""
    places = collections.Counter()
    ids = {}
    for part, (text, _) in read_documents(repeated):
        (ids[part.source, part.name, places[part]],) = ids_of([text], tokenizer_folder)
        places[part] += 1
    for split in SPLITS:
        rows_NxL = np.concatenate(shard_rows(made, split))
        for record in range(len(rows_NxL)):
            names = find_documents(made, split, record)
            stream = [token for name in names for token in ids[name]]
            # the row begins in the first document, and ends in the last
            starts = [
                start
                for start in range(len(ids[names[0]]))
                if len(stream) - len(ids[names[-1]]) < start + LENGTH <= len(stream)
            ]
            row = rows_NxL[record].tolist()
            assert row in [stream[start : start + LENGTH] for start in starts], record


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


def test_files_are_named_as_the_tf_tpu_example_names_them(manifest):
    assert manifest.full_rows
    folder = pathlib.Path(manifest.folder)
    for split, split_info in manifest.splits.items():
        assert len(split_info.shards) == COUNTS[split]
        for number, shard in enumerate(split_info.shards):
            path = folder / shard.file
            assert shard.file == f"{split}/dataset-{number}-{shard.records}.tfrecord"
            assert shard.bytes == path.stat().st_size
            assert shard.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    files = {"/manifest.json", "/documents/parts.json"}
    files |= {f"/{shard.file}" for split in manifest.splits.values() for shard in split.shards}
    files |= {f"/documents/{split}-{n}.npy" for split in COUNTS for n in range(COUNTS[split])}
    assert contents(folder).keys() == files, "nothing else"
    assert load_manifest(manifest.folder) == manifest
    verify(manifest)


@pytest.mark.standard
def test_bytes_do_not_depend_on_the_workers(small, repeated, tokenizer_folder, tmp_path):
    one = write_shards(repeated, tmp_path / "one", tokenizer_folder, rows="documents")
    again = write_shards(repeated, tmp_path / "b", tokenizer_folder, workers=3, rows="documents")
    assert contents(tmp_path / "b") == contents(tmp_path / "one")
    assert again.fingerprint == one.fingerprint


def test_what_is_there_is_kept(manifest, tokenizers, monkeypatch):
    """Where something else is asked for, its keys or its file are named, and no other."""

    def touched(*_, **__):
        raise AssertionError("a task was started")

    monkeypatch.setattr(Corpus, "parts", touched)
    before = contents(manifest.folder)
    leftovers = work_folder(manifest.folder)  # of a start that was killed while it removed them
    (leftovers / "tasks").mkdir(parents=True)
    corpus = corpus_of(("text:no such file",))
    unigram, bpe = tokenizers["unigram"], tokenizers["bpe"]

    def write(tokenizer_folder: str = unigram, **settings) -> Manifest:
        return write_shards(corpus, pathlib.Path(manifest.folder), tokenizer_folder, **settings)

    assert write() == manifest and not leftovers.exists()
    for settings, named in (
        ({"source": "others"}, "config.corpus.sources"),
        ({"length": 16}, "config.shards.length"),
        ({"rows": "lines"}, "config.shards.rows"),
        ({"counts": COUNTS | {"train": 5}}, "config.shards.count"),
        ({"counts": COUNTS | {"validation": 1}}, "config.shards.validation_count"),
        ({"tokenizer_folder": bpe}, f"tokenizer (not {bpe}/tokenizer.json)"),
    ):
        with pytest.raises(InputError, match=re.escape(f"holds shards of another {named};")):
            write(**settings)
    assert contents(manifest.folder) == before
    foreign = dataclasses.replace(manifest, inputs="", source="a text of another program")
    monkeypatch.setattr(shards, "load_manifest", lambda _: foreign)
    with pytest.raises(InputError, match=r"holds shards of another config\.corpus;"):
        write()


def test_ended_at_any_file_it_goes_on(small, texts, tokenizer_folder, tmp_path, monkeypatch):
    """By a full disk, then by a kill after every few files: the same bytes, and what was done is not done again."""
    corpus = written_texts(texts[:150], tmp_path / "corpus")
    write_shards(corpus, tmp_path / "alone", tokenizer_folder)
    put = results.put_file
    written = []

    def start(limit: int, error: BaseException) -> None:
        """Writes shards until so many files are written in all."""

        def put_file(file, target):
            if len(written) == limit:
                raise error
            put(file, target)
            written.append(str(target))

        monkeypatch.setattr(results, "put_file", put_file)
        write_shards(corpus, tmp_path / "ended", tokenizer_folder)

    with pytest.raises(InputError, match=r"/tasks/.*No space left on device"):
        start(3, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    work = work_folder(str(tmp_path / "ended"))
    with lock(work), pytest.raises(InputError, match=r"ended\.tmp: another process is using it"):
        start(10, AssertionError("it runs"))
    for limit in range(10, 200, 7):
        with contextlib.suppress(KeyboardInterrupt):
            start(limit, KeyboardInterrupt())
            break
        assert not (tmp_path / "ended").exists()
        for split in work.glob("*/train"):
            (split / ".0123.tmp").write_text("of a task that was killed")
            (split / "dataset-0-9999.tfrecord").write_text("of a start with another text")
            (split.parent / "documents").mkdir(exist_ok=True)
            (split.parent / "documents" / "train-99.npy").write_text("of that start, too")
    assert contents(tmp_path / "ended") == contents(tmp_path / "alone")
    of_tasks = [file for file in written if re.search(r"/(tasks|written-\w+)/\w+\.json", file)]
    assert len(of_tasks) == len(set(of_tasks)) > 10


def test_too_little_text_is_refused(texts, tokenizer_folder, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", texts[:400])
    for fraction, settings, words in (
        (0.1, {"counts": {"train": 5000, "validation": 2}}, r"config\.shards\.count = 5000"),
        (0.1, {"length": 20_000}, r"config\.shards\.count = 6"),
        (0.0, {}, r"validation split .*corpus\.validation_fraction"),
        (0.999, {}, r"train split .*corpus\.validation_fraction"),
    ):
        corpus = corpus_of((source,), validation_fraction=fraction)
        with pytest.raises(InputError, match=words):
            write_shards(corpus, tmp_path / "shards", tokenizer_folder, **settings)
    assert not (tmp_path / "shards").exists()


def test_a_large_vocabulary_takes_four_bytes_a_token(texts, tokenizers, tmp_path):
    folder = pathlib.Path(shutil.copytree(tokenizers["wordpiece"], tmp_path / "tokenizer"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"word{n}x": 600 + n for n in range(2**16)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    found = [f"{text} word65535x" for text in texts[:400]]
    made = write_shards(found, tmp_path / "shards", str(folder))
    last = np.concatenate(shard_rows(made, "train")) == 600 + 65535
    assert abs(int(last.sum()) - 360) <= COUNTS["train"]
