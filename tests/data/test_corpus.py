"""Documents of a corpus: their splits and groups, and how many are read."""

import itertools

import numpy as np
import pytest

from mlm.data import sources
from mlm.data.corpus import text_hash
from mlm.errors import InputError
from tests.support.corpora import corpus_of, numbered, split_of, write_jsonl, write_shards


def test_validation_never_changes_as_the_corpus_grows(tmp_path):
    def splits(texts: list[str], **settings) -> dict[str, str]:
        return split_of(corpus_of((write_jsonl(tmp_path / "a.jsonl", texts),), **settings))

    small = splits(numbered(500))
    large = splits(numbered(5000)[::-1])
    more = splits(numbered(500), validation_fraction=0.2)
    assert small.items() <= large.items()
    assert all(more[text] == "validation" for text in small if small[text] == "validation")
    assert text_hash(numbered(1)[0]) == 12415440598143898091, (
        "another hash would move the validation split of every corpus"
    )
    share = np.mean([split == "validation" for split in large.values()])
    assert abs(share - 0.1) < 4 * (0.1 * 0.9 / 5000) ** 0.5


def test_a_group_is_in_one_split(tmp_path, monkeypatch):
    """Here a file, though parts are cut inside of files."""
    monkeypatch.setattr(sources, "PART_BYTES", (500, 10**9))
    texts = numbered(400)
    for n in range(20):
        write_jsonl(tmp_path / f"{n}.jsonl", texts[n::20])
    found = corpus_of((f"jsonl:{tmp_path}/*.jsonl",), group="file", validation_fraction=0.2)
    assert len(found.parts()) > 20
    files = {"train": set(), "validation": set()}
    for text, split in split_of(found).items():
        files[split].add(texts.index(text) % 20)
    assert all(files.values()) and not files["train"] & files["validation"]


def test_a_test_split_is_cut_beside_the_validation_split(tmp_path):
    """By hash, or named groups; validation has the documents that it has without a test split."""
    texts = numbered(600)
    names = [f"title {n % 60}" for n in range(600)]
    source = write_jsonl(tmp_path / "a.jsonl", texts, title=names)

    def titles_by_split(group: str, **settings) -> dict[str, set[str]]:
        corpus = corpus_of((source,), group=group, validation_fraction=0.2, **settings)
        splits = {"train": set(), "validation": set(), "test": set()}
        for text, split in split_of(corpus).items():
            splits[split].add(text if group == "document" else names[texts.index(text)])
        return splits

    for group, least, most in (("document", 120, 240), ("title", 12, 24)):
        found = titles_by_split(group, test_fraction=0.3)
        assert found["validation"] == titles_by_split(group)["validation"]
        assert least <= len(found["test"]) <= most
    validation = {"validation_groups": ("title 1",)}
    test = {"test_groups": ("title 2", "title 3")}
    for settings in (validation, test, validation | test):
        found = titles_by_split("title", test_fraction=0.2, **settings)
        for key, groups in settings.items():
            assert found[key.removesuffix("_groups")] == set(groups)
        assert len(found["train"]) > 20
        assert sum(map(len, found.values())) == 60, "each group is in one split"


HELD_OUT = {"validation_groups": ("d",), "validation_fraction": 0.15}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"validation_groups": ("b", "nowhere")}, "validation_groups: .* 'nowhere'"),
        ({"validation_groups": ("a",)}, "validation_fraction = 0.1: .* 0.[789]"),
        (
            {"test_groups": ("c",), "test_fraction": 0.5, **HELD_OUT},
            "test_fraction = 0.5: .*_groups",
        ),
        ({"test_groups": ("c",), **HELD_OUT}, "test split .*test_fraction"),
    ],
)
def test_a_split_of_another_size_is_refused(tmp_path, tokenizer_folder, texts, settings, words):
    names = ["a"] * 50 + ["b"] * 3 + ["d"] * 10 + ["c"]
    joined = "".join(texts)
    equally_long = [joined[start : start + 420] for start in range(0, 63 * 420, 420)]
    source = write_jsonl(tmp_path / "a.jsonl", [*equally_long, "x"], package=names)
    corpus = corpus_of((source,), group="package", **settings)
    with pytest.raises(InputError, match=words):
        write_shards(corpus, tmp_path / "shards", tokenizer_folder)
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize("most", [1, 20, 1000])
def test_max_documents_are_the_first_of_each_source(tmp_path, monkeypatch, most):
    """In parts of a few documents each, some of them empty; the others are not read."""
    monkeypatch.setattr(sources, "PART_BYTES", (200, 10**9))
    a = write_jsonl(tmp_path / "a.jsonl", [*numbered(15), *[""] * 9, *numbered(5, 15)])
    b = write_jsonl(tmp_path / "b.jsonl", numbered(500, 20))
    corpus = corpus_of((a, b), max_documents=most)
    parts = corpus.limited(corpus.parts(), texts="")
    texts = []
    for part, count in parts:
        documents = corpus.read(part, texts="")
        texts += [text for text, _ in itertools.islice(documents, count)]
    assert texts == numbered(min(most, 20)) + numbered(min(most, 500), 20)
    assert len(parts) < len(corpus.parts()) / 2 or most > 20


@pytest.mark.parametrize(
    ("source", "group"), [("text:a", "title"), ("hf:a", "file"), ("tfds:a", "file")]
)
def test_a_group_that_a_source_has_not_is_refused(source, group):
    with pytest.raises(InputError, match=f"{source} .* can't be grouped by corpus.group = {group}"):
        corpus_of((source,), group=group).parts()
