"""Stretches of words against plain Python, on docstrings."""

import unicodedata

import numpy as np
import pytest

from mlm.data import tokenizer
from mlm.data.stretches import StretchIndex, stretches_of_texts
from mlm.errors import InputError
from tests.support.corpora import corpus_of, shard_rows, write_jsonl, write_shards


def words(text: str) -> list[str]:
    return "".join(c for c in text.casefold() if unicodedata.category(c)[0] not in "PS").split()


def pieces(text: str, count: int = 13) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[place : place + count]) for place in range(len(found) - count + 1)}


def index_of(texts: list[str]) -> StretchIndex:
    return StretchIndex(stretches_of_texts(texts)[0])


@pytest.fixture(scope="module")
def texts_(texts) -> list[str]:
    return [*texts[:1500], "", "one", " ".join("abcdefghijklm"), "\u3000 " * 20]


def test_documents_with_a_stretch_are_those_found_by_plain_python(texts_):
    benchmark = [text.upper().replace(" ", " - ") for text in texts_[::9]]
    index = index_of(benchmark)
    known = set().union(*map(pieces, benchmark))
    assert len(index.hashes) == len(known) > 2000
    found = index.is_in_texts(texts_)
    assert found.tolist() == [not known.isdisjoint(pieces(text)) for text in texts_]
    assert 100 < found.sum() < 1000


def test_words_have_no_case_and_no_punctuation():
    plain = "strasse one two three four five six seven eight nine ten dont eleven"
    styled = "STRAßE\u00a0one, two three\u2028four\tFIVE «six» seven \u2013 eight nine $ ten don\u2019t! (Eleven)"
    assert index_of([plain]).is_in_texts([styled, plain + "s"]).tolist() == [True, False]


@pytest.fixture
def benchmark(texts, tmp_path) -> tuple[list[str], str]:
    """Lines of a corpus whose name is not UTF-8, and the source of a benchmark that shares stretches with some."""
    lines = list(dict.fromkeys(" ".join(text.split()) for text in texts[:600]))
    questions = [
        f"Question {n}: " + " ".join(line.upper().split()[3:23])
        for n, line in enumerate(lines[100:160])
    ]
    (tmp_path / "corpus\udce9.txt").write_text("".join(f"{line}\n" for line in lines))
    return lines, write_jsonl(tmp_path / "benchmark.jsonl", questions, field="question")


def test_shards_without_what_is_kept_out(benchmark, tokenizer_folder, tmp_path):
    lines, source = benchmark
    corpus = corpus_of((f"text:{tmp_path}/corpus\udce9.txt",), keep_out=(f"{source}#question",))
    manifest = write_shards(corpus, tmp_path / "shards", tokenizer_folder)
    whole = write_shards(corpus_of(corpus.sources), tmp_path / "whole", tokenizer_folder)
    known = set().union(*(pieces(" ".join(line.split()[3:23])) for line in lines[100:160]))
    held = [line for line in lines if not known.isdisjoint(pieces(line))]
    train, validation = (manifest.splits[name] for name in ("train", "validation"))
    assert validation == whole.splits["validation"] and validation.kept_out == 0
    assert 20 < train.kept_out <= len(held)
    assert train.documents + train.kept_out == whole.splits["train"].documents
    tok = tokenizer.load(tokenizer_folder)
    rows = np.concatenate(shard_rows(manifest, "train"))
    text = " ".join(tok.decode(row, skip_special_tokens=True) for row in rows)
    assert known.isdisjoint(pieces(text))


def test_a_benchmark_that_cannot_be_read_is_named(benchmark, tokenizer_folder, tmp_path):
    _, source = benchmark
    (tmp_path / "short.txt").write_text("twelve words are no stretch, a b c d e f g\n" * 3)
    for name, words in (
        (f"{source}#answer", "line 1: has no field 'answer'"),
        (f"text:{tmp_path}/short.txt", "has no text of 13 words"),
    ):
        corpus = corpus_of((f"text:{tmp_path}/corpus\udce9.txt",), keep_out=(name,))
        with pytest.raises(
            InputError, match=rf"corpus\.keep_out: {name.partition('#')[0]}.*{words}"
        ):
            write_shards(corpus, tmp_path / "shards", tokenizer_folder)
