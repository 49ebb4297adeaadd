"""Shards of a corpus, by all tasks together: their rows, counts and bytes, and what is refused."""

import contextlib
import errno
import hashlib
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from mlm.commands.shards import make_shards
from mlm.commands.tokenizer import make_tokenizer
from mlm.data import results, shards
from mlm.data.corpus import Corpus, text_hash
from mlm.data.manifest import Manifest, load_manifest, verify
from mlm.errors import InputError
from mlm.workdir import Workdir, lock, work_folder
from tests.data.rows import small_parts
from tests.support.corpora import (
    COUNTS,
    LENGTH,
    InProcess,
    contents,
    corpus_of,
    ids_of,
    shard_rows,
    write_jsonl,
    write_shards,
    written_texts,
)
from tests.support.tiny import tiny_config

SPLITS = ("train", "validation")
LAST = (".blocks", ".dropped", ".json")  # of the files of a task, the one that is written last


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


def test_counts_are_those_of_the_texts(made, repeated, texts, tokenizer_folder):
    """Of each split: distinct documents, duplicates, tokens, bytes, entropy; what is dropped, at most once a shard."""
    everything = [*texts[:200], *texts[198:200], *texts[:20], *texts[200:300], *texts[100:110]]
    distinct = list(dict.fromkeys(everything))
    part = repeated.parts()[0]
    split_of = {text: repeated.split_of(part, "", text_hash(text)) for text in distinct}
    for split in SPLITS:
        held = [text for text in distinct if split_of[text] == split]
        found = made.splits[split]
        ids = dict(zip(held, ids_of(held, tokenizer_folder), strict=True))
        assert found.documents == len(held)
        assert (
            found.duplicates == sum(split_of[text] == split for text in everything) - len(held) > 0
        )
        assert found.text_bytes == sum(len(text.encode()) for text in held)
        ordinary = Counter(number for row in ids.values() for number in row if number > 4)
        assert found.tokens == ordinary.total()
        probs = [count / found.tokens for count in ordinary.values()]
        assert found.unigram_entropy == pytest.approx(
            -sum(prob * math.log(prob) for prob in probs), rel=1e-12
        )
        of_a = sum(len(ids[text]) for text in held if text in distinct[:200])
        total = sum(len(row) for row in ids.values())
        assert found.sources == dict(zip(repeated.sources, (of_a, total - of_a), strict=True))
        rows = sum(len(rows) for rows in shard_rows(made, split))
        assert found.records == rows and total == rows * LENGTH + found.dropped_tokens
        assert 0 < found.dropped_tokens < len(found.shards) * LENGTH


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
    tables = {
        f"/documents/{split}-{n}.npy" for split, count in COUNTS.items() for n in range(count)
    }
    files = {f"/{shard.file}" for split in manifest.splits.values() for shard in split.shards}
    assert contents(folder).keys() == files | tables | {
        "/documents/parts.json",
        "/manifest.json",
    }, "nothing else"
    assert load_manifest(manifest.folder) == manifest
    verify(manifest, deep=True)


@pytest.mark.standard
def test_bytes_do_not_depend_on_the_workers(small, repeated, tokenizer_folder, tmp_path):
    one = write_shards(repeated, tmp_path / "one", tokenizer_folder, rows="documents")
    again = write_shards(
        repeated, tmp_path / "shards", tokenizer_folder, workers=3, rows="documents"
    )
    assert contents(tmp_path / "shards") == contents(tmp_path / "one")
    assert again.fingerprint == one.fingerprint


def test_what_is_there_is_kept(manifest, tokenizer_folder, monkeypatch):
    def touched(*_, **__):
        raise AssertionError("a task was started")

    monkeypatch.setattr(Corpus, "parts", touched)
    before = contents(manifest.folder)
    leftovers = work_folder(manifest.folder)  # of a start that was killed while it removed them
    (leftovers / "tasks").mkdir(parents=True)
    names = {"tokenizer_folder": tokenizer_folder, "folder": manifest.folder, "engine": InProcess()}
    corpus = corpus_of(("text:no such file",))
    settings = shards.Settings(LENGTH, COUNTS)
    assert (
        shards.write(corpus, settings, source="texts", **names) == manifest
        and not leftovers.exists()
    )
    others = [settings._replace(length=16), settings._replace(counts={**COUNTS, "train": 5})]
    for changed, source in [*((each, "texts") for each in others), (settings, "others")]:
        with pytest.raises(InputError, match="another corpus, tokenizer or setting"):
            shards.write(corpus, changed, source=source, **names)
    with pytest.raises(
        InputError, match=r"shards\.rows = lines: .* were written with concatenated"
    ):
        shards.write(corpus, settings._replace(rows="lines"), source="texts", **names)
    assert contents(manifest.folder) == before


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
    leftover = work_folder(str(tmp_path / "ended")) / "tasks" / ".0123.tmp"
    leftover.write_text("of a task that was killed")
    with (
        lock(leftover.parents[1]),
        pytest.raises(InputError, match=r"ended\.tmp: another process is using it"),
    ):
        start(10, AssertionError("it runs"))
    assert leftover.exists()
    for limit in range(10, 200, 7):
        with contextlib.suppress(KeyboardInterrupt):
            start(limit, KeyboardInterrupt())
            break
        assert not leftover.exists() and not (tmp_path / "ended").exists()
    assert contents(tmp_path / "ended") == contents(tmp_path / "alone")
    of_tasks = [
        file.rpartition(".")[0] for file in written if "/tasks/" in file and file.endswith(LAST)
    ]
    assert len(of_tasks) == len(set(of_tasks)) > 10


def test_too_little_text_is_refused(texts, tokenizer_folder, tmp_path):
    for settings, key in (
        ({"counts": {"train": 5000, "validation": 2}}, "config.shards.count = 5000"),
        ({"length": 20_000}, "config.shards.count = 6"),
    ):
        with pytest.raises(InputError, match=key):
            write_shards(texts[:400], tmp_path / "shards", tokenizer_folder, **settings)
    for fraction, split in ((0.0, "validation"), (0.999, "train")):
        corpus = corpus_of(
            (write_jsonl(tmp_path / "a.jsonl", texts[:400]),), validation_fraction=fraction
        )
        with pytest.raises(InputError, match=rf"{split} split .*corpus\.validation_fraction"):
            write_shards(corpus, tmp_path / "shards", tokenizer_folder)
    assert not (tmp_path / "shards").exists()


def test_a_large_vocabulary_takes_four_bytes_a_token(texts, tokenizers, tmp_path):
    folder = str(shutil.copytree(tokenizers["wordpiece"], tmp_path / "tokenizer"))
    file = pathlib.Path(folder, "tokenizer.json")
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {f"word{n}x": 600 + n for n in range(2**16)}
    file.write_text(json.dumps(content))
    found = [f"{text} word65535x" for text in texts[:400]]
    rows = np.concatenate(shard_rows(write_shards(found, tmp_path / "shards", folder), "train"))
    assert (
        rows.max() == 600 + 65535 and abs(int((rows == rows.max()).sum()) - 360) <= COUNTS["train"]
    )


@pytest.mark.standard
def test_no_framework_is_imported():
    """Their start costs more than the writing of a small corpus, and every worker process would pay it."""
    code = (
        "import sys; import mlm.data.shards, mlm.data.corpus, mlm.commands.run; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "mlm.data.shards" in found
    assert not found & {"jax", "tensorflow", "transformers", "torch", "datasets"}


def test_a_validation_split_of_few_masked_tokens_is_said(texts, tokenizer_folder, tmp_path, capsys):
    """As many as a mask takes: its rate of the split's tokens."""
    source = write_jsonl(tmp_path / "a.jsonl", texts[:300])
    for rate in (0.1, 1.0):
        workdir = Workdir(str(tmp_path / f"run {rate}"))
        settings = (
            "corpus.validation_fraction=0.3",
            f"tokenizer.path={tokenizer_folder}",
            f"masking.rate={rate}",
        )
        config = tiny_config(f"corpus.sources=('{source}',)", *settings)
        make_tokenizer(config, workdir)
        make_shards(config, workdir, InProcess())
        printed = capsys.readouterr().err
        masked = rate * load_manifest(workdir.shards_of(config)).splits["validation"].tokens
        assert (f"a mask takes about {masked:,.0f} of its tokens" in printed) == (rate == 0.1), (
            printed
        )
