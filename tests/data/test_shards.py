"""Shards of a corpus, by all tasks together: their rows, counts and bytes, and what is refused."""

import hashlib
import itertools
import json
import math
import pathlib
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from mlm.data import shards, sources
from mlm.data.corpus import Corpus
from mlm.data.manifest import load_manifest, verify
from mlm.errors import InputError
from mlm.workdir import work_folder
from tests.support.corpora import (
    COUNTS,
    LENGTH,
    contents,
    corpus_of,
    ids_of,
    shard_rows,
    shard_texts,
    shared_engine,
    train_tokenizer,
    write_jsonl,
    write_shards,
)

SPLITS = ("train", "validation")


@pytest.fixture
def small(monkeypatch):
    """Small parts and blocks, so that there are many."""
    monkeypatch.setattr(sources, "PART_BYTES", (9000, 10**9))
    monkeypatch.setattr(shards, "BLOCK_BYTES", (1500, 10**9))


def read_all(corpus: Corpus) -> list[str]:
    """The texts of a corpus in order, by a reader of our own."""
    paths = [pathlib.Path(source.partition(":")[2]) for source in corpus.sources]
    return [json.loads(line)["text"] for path in paths for line in path.read_text().splitlines()]


@pytest.fixture
def repeated(texts, tmp_path) -> Corpus:
    """Two sources in which documents come twice: in one part, in two, and in both sources."""
    a = write_jsonl(tmp_path / "a.jsonl", texts[:200] + texts[198:200] + texts[:20])
    b = write_jsonl(tmp_path / "b.jsonl", texts[200:300] + texts[100:110])
    return corpus_of((a, b))


# What they hold -------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_texts(small, repeated, tokenizer_folder, tmp_path):
    """Of each split: distinct documents, duplicates, tokens, bytes, entropy; what is dropped, at most once a shard."""
    made, everything = write_shards(repeated, tmp_path / "shards", tokenizer_folder), read_all(repeated)
    distinct = list(dict.fromkeys(everything))
    split_of = {
        text: repeated.split_of(part, "", shards_hash(text)) for part in repeated.parts()[:1] for text in distinct
    }
    for split in SPLITS:
        own, facts = [text for text in distinct if split_of[text] == split], made.splits[split]
        ids = dict(zip(own, ids_of(own, tokenizer_folder), strict=True))
        assert facts.documents == len(own)
        assert facts.duplicates == sum(split_of[text] == split for text in everything) - len(own) > 0
        assert facts.text_bytes == sum(len(text.encode()) for text in own)
        ordinary = Counter(each for row in ids.values() for each in row if each > 4)
        assert facts.tokens == ordinary.total()
        shares = [count / facts.tokens for count in ordinary.values()]
        assert facts.unigram_entropy == pytest.approx(-sum(share * math.log(share) for share in shares), rel=1e-12)
        texts_a = set(distinct[:200])
        a, b = repeated.sources
        assert facts.sources == {
            a: sum(len(ids[text]) for text in own if text in texts_a),
            b: sum(len(ids[text]) for text in own if text not in texts_a),
        }
        rows = sum(len(rows) for rows in shard_rows(made, split))
        assert facts.records == rows and facts.tokens + 2 * len(own) == rows * LENGTH + facts.dropped_tokens
        assert 0 < facts.dropped_tokens < len(facts.shards) * LENGTH


def shards_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def test_every_document_is_in_one_shard_beside_its_neighbours(small, repeated, tokenizer_folder, tmp_path):
    made = write_shards(repeated, tmp_path / "shards", tokenizer_folder)
    distinct = list(dict.fromkeys(read_all(repeated)))
    of_split = {split: shard_texts(made, split, distinct, tokenizer_folder) for split in SPLITS}
    found = Counter(text for texts in of_split.values() for own in texts for text in own)
    cut = sum(len(split.shards) for split in made.splits.values())
    assert set(found.values()) == {1} and len(distinct) - cut <= len(found) <= len(distinct)
    place = {text: number for number, text in enumerate(distinct)}
    gaps = [place[b] - place[a] for own in of_split["train"] for a, b in itertools.pairwise(own)]
    assert np.mean([0 < gap <= 5 for gap in gaps]) > 0.6, "the documents of a block stay together"


def test_files_are_named_as_the_tf_tpu_example_names_them(manifest):
    assert manifest.full_rows
    folder = pathlib.Path(manifest.folder)
    for split, facts in manifest.splits.items():
        assert len(facts.shards) == COUNTS[split]
        for number, shard in enumerate(facts.shards):
            path = folder / shard.file
            assert shard.file == f"{split}/dataset-{number}-{shard.records}.tfrecord"
            assert shard.bytes == path.stat().st_size
            assert shard.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    tables = {f"/documents/{split}-{n}.npy" for split, count in COUNTS.items() for n in range(count)}
    files = {f"/{shard.file}" for split in manifest.splits.values() for shard in split.shards}
    assert contents(folder).keys() == files | tables | {"/documents/parts.json", "/manifest.json"}, "nothing else"
    assert load_manifest(manifest.folder) == manifest
    verify(manifest, deep=True)


def test_words_that_look_like_special_tokens_stay_text(texts, tokenizer_folder, tmp_path):
    hostile = [f"{text} <mask> </s> <s> <pad> <unk>" for text in texts[:400]]
    rows = np.concatenate(shard_rows(write_shards(hostile, tmp_path / "shards", tokenizer_folder), "train"))
    assert set(rows.reshape(-1)) & {1, 4} == set()
    assert abs(int((rows == 0).sum()) - 360) <= COUNTS["train"], "one <s> a document"


# The same bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.standard
@pytest.mark.parametrize("workers", [1, 7])
def test_bytes_do_not_depend_on_the_workers(small, repeated, tokenizer_folder, tmp_path, workers):
    """Nor on the order in which a file system lists its files."""
    made = [write_shards(repeated, tmp_path / str(n), tokenizer_folder, workers=n) for n in (2, workers)]
    assert contents(tmp_path / "2") == contents(tmp_path / str(workers))
    assert made[0].fingerprint == made[1].fingerprint


@pytest.mark.parametrize("ranges", [2, 67])
def test_bytes_do_not_depend_on_the_ranges_of_hashes(small, repeated, tokenizer_folder, tmp_path, monkeypatch, ranges):
    from mlm.data import deduplicate

    write_shards(repeated, tmp_path / "one", tokenizer_folder)
    monkeypatch.setattr(deduplicate, "DOCUMENTS", -(-332 // ranges))
    assert len(deduplicate.ranges(332, deduplicate.DOCUMENTS, deduplicate.RANGES)) == ranges
    write_shards(repeated, tmp_path / "many", tokenizer_folder)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


@pytest.mark.slow
def test_another_seed_deals_the_same_documents_otherwise(small, repeated, tokenizer_folder, tmp_path):
    distinct = dict.fromkeys(read_all(repeated))
    made = [write_shards(repeated, tmp_path / str(n), tokenizer_folder, seed=n, length=8) for n in (0, 1)]
    found = [shard_texts(each, "train", distinct, tokenizer_folder) for each in made]
    sets = [[set(own) for own in texts] for texts in found]
    assert all(a not in sets[1] for a in sets[0])
    cut = 2 * COUNTS["train"]
    assert len(set.union(*sets[0]) ^ set.union(*sets[1])) <= cut
    assert made[0].splits["train"].documents == made[1].splits["train"].documents
    assert made[0].splits["train"].tokens == made[1].splits["train"].tokens


# What is there already ------------------------------------------------------------------------------------------------


def test_what_is_there_is_kept(manifest, tokenizer_folder, monkeypatch):
    def touched(*_, **__):
        raise AssertionError("a task was started")

    monkeypatch.setattr(Corpus, "parts", touched)
    before = contents(manifest.folder)
    names = {"tokenizer_folder": tokenizer_folder, "folder": manifest.folder, "engine": shared_engine()}
    corpus, settings = corpus_of(("text:no such file",)), shards.Settings(LENGTH, COUNTS)
    assert shards.write(corpus, settings, source="texts", **names) == manifest
    others = [settings._replace(length=16), settings._replace(seed=1), settings._replace(counts={**COUNTS, "train": 5})]
    for changed, source in [*((each, "texts") for each in others), (settings, "others")]:
        with pytest.raises(InputError, match="another corpus, tokenizer or setting"):
            shards.write(corpus, changed, source=source, **names)
    assert contents(manifest.folder) == before


def test_an_empty_folder_may_be_there_and_another_is_kept(texts, tokenizer_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    write_shards(texts[:400], tmp_path / "empty", tokenizer_folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").write_text("precious")
    with pytest.raises(InputError, match="other"):
        write_shards(texts[:400], tmp_path / "other", tokenizer_folder)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["precious.txt"]
    file, corpus = tmp_path / "other" / "precious.txt", corpus_of((write_jsonl(tmp_path / "a.jsonl", texts[:400]),))
    with pytest.raises(InputError, match=r"precious\.txt: holds"):
        write_shards(corpus, file, tokenizer_folder)
    with pytest.raises(InputError, match="can't be written"):
        write_shards(corpus, file / "shards", tokenizer_folder)


def test_a_corpus_that_was_changed_after_a_kill_is_read_anew(small, texts, tokenizer_folder, tmp_path, monkeypatch):
    """What is left of the old one is never mixed in, though the config says the same."""
    corpus = corpus_of((write_jsonl(tmp_path / "a.jsonl", texts[:300]),))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "summarize", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        write_shards(corpus, tmp_path / "one", tokenizer_folder)
    left = work_folder(str(tmp_path / "one"))
    assert len(list(left.rglob("*.tfrecord"))) == sum(COUNTS.values())
    shard = next(left.rglob("train/dataset-0-*.tfrecord"))
    shard.with_name(".0123.tmp").write_text("half a shard")
    write_jsonl(tmp_path / "a.jsonl", texts[:50] + texts[100:400])
    made = [write_shards(corpus, tmp_path / name, tokenizer_folder) for name in ("one", "two")]
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert made[0].fingerprint == made[1].fingerprint
    verify(made[0], deep=True)


# Too little, or unclear -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "settings", "words"),
    [
        (400, {"counts": {"train": 5000, "validation": 2}}, "config.shards.count = 5000"),
        (400, {"length": 20_000}, "config.shards.count = 6"),
        (9, {"counts": {"train": 1, "validation": 1}, "length": 1000}, "config.shards.count|validation"),
    ],
)
def test_too_little_text_is_refused(texts, tokenizer_folder, tmp_path, count, settings, words):
    with pytest.raises(InputError, match=words):
        write_shards(texts[:count], tmp_path / "shards", tokenizer_folder, **settings)
    assert not (tmp_path / "shards").exists()


def test_an_empty_validation_split_is_refused(texts, tokenizer_folder, tmp_path):
    corpus = corpus_of((write_jsonl(tmp_path / "a.jsonl", texts[:400]),), validation_fraction=0.0)
    with pytest.raises(InputError, match=r"the validation split .* raise corpus\.validation_fraction"):
        write_shards(corpus, tmp_path / "shards", tokenizer_folder)


def test_a_small_validation_split_gets_fewer_shards(texts, tokenizer_folder, tmp_path):
    made = write_shards(texts[:400], tmp_path / "s", tokenizer_folder, counts={"train": 2, "validation": 100_000})
    records = [shard.records for shard in made.splits["validation"].shards]
    assert min(records) > 0 and len(records) > 2
    assert sum(records) + len(records) > made.splits["validation"].tokens / LENGTH


@pytest.mark.standard
def test_a_large_vocabulary_takes_four_bytes_a_token(texts, tmp_path):
    """As many ids as two bytes do not hold, in a tokenizer with that many added words."""
    from tokenizers import Tokenizer

    folder = train_tokenizer(texts, tmp_path / "tokenizer", kind="bpe")
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.add_tokens([f"word{n}x" for n in range(2**16)])
    tokenizer.save(f"{folder}/tokenizer.json")
    found = [f"{text} word65535x" for text in texts[:400]]
    rows = np.concatenate(shard_rows(write_shards(found, tmp_path / "shards", folder), "train"))
    assert rows.max() == 600 + 65535 and abs(int((rows == rows.max()).sum()) - 360) <= COUNTS["train"]


@pytest.mark.standard
def test_no_framework_is_imported():
    """Their start costs more than the writing of a small corpus, and every worker process would pay it."""
    code = "import sys; import mlm.data.shards, mlm.data.corpus, mlm.commands.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "mlm.data.shards" in found
    assert not found & {"jax", "tensorflow", "transformers", "torch", "datasets"}
