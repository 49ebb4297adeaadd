"""Which groups of validation share text with training, and which key `doctor` says to change."""

import json
import re
import shutil

import numpy as np
import pytest

from mlm.data.manifest import load_manifest
from mlm.doctor import checks, overlap, scan
from tests.support.corpora import corpus_of, write_jsonl, write_shards
from tests.support.doctored import case_of
from tests.support.tiny import tiny_config

GROUPS = ("copied.jsonl", "new.jsonl")
KEYS = ("corpus.sources='text:x'", "corpus.group=file", f"corpus.validation_groups={GROUPS}")


@pytest.fixture(scope="module")
def made(texts, tokenizer_folder, tmp_path_factory):
    """Shards of three files of random words, two of them for validation, of which one stands in training, too."""
    folder = tmp_path_factory.mktemp("overlap")
    words, rng = sorted({word for text in texts for word in text.split()}), np.random.default_rng(2)
    long = [" ".join(rng.choice(words, 40)) for _ in range(240)]
    files = {"train": long[:220], "copied": [f"{text} more" for text in long[200:220]], "new": long[220:]}
    sources = tuple(write_jsonl(folder / f"{name}.jsonl", lines) for name, lines in files.items())
    corpus = corpus_of(sources, group="file", validation_groups=GROUPS)
    return write_shards(corpus, folder / "shards", tokenizer_folder)


def test_the_file_that_training_holds_is_named(made, workdir):
    (found,) = (each for each in checks.ids(case_of(made, workdir, *KEYS)) if each.check == "overlap")
    count, total, name = re.search(r"most from (\d+) of (\d+) rows of jsonl:\S+, (\S+),", found.what).groups()
    assert name.endswith("/copied.jsonl") and int(total) < 2 * int(count) and int(total) > 20
    assert found.fix.startswith(f"name another group in place of {name} in corpus.validation_groups")
    new = re.search(r"(\d+) of (\d+) rows of jsonl:\S+, \S+/new.jsonl", found.what)
    assert new is None or int(new[1]) < 0.2 * int(new[2]), "cut rows alone are of both"


def test_an_overlap_is_a_warning_from_2_percent_and_an_error_from_half_of_the_rows_on(made, workdir):
    case, rows = case_of(made, workdir), np.arange(100)
    overlaps = (scan.Overlap(rows, rows[:count], (0, 0)) for count in (1, 2, 49, 50))
    findings = [checks._overlap(case, "validation", overlap, "all") for overlap in overlaps]
    assert [found.level for found in findings] == ["ok", "warning", "warning", "error"]
    assert all("; validation record " in found.what for found in findings[1:])


def test_rows_too_short_to_compare_are_not_called_fine(texts, tokenizer_folder, workdir, tmp_path):
    lines = [f"{texts[n % 400][:8]} {n}" for n in range(4000)]
    made = write_shards(lines, tmp_path / "shards", tokenizer_folder)
    (found,) = (each for each in checks.ids(case_of(made, workdir)) if each.check == "overlap")
    assert found.level == "warning" and "no validation row" in found.what and "short documents" in found.fix


def test_shards_that_do_not_say_where_they_are_from(made, workdir, tmp_path):
    folder = shutil.copytree(made.folder, tmp_path / "shards")
    shutil.rmtree(folder / "documents")
    (found,) = (each for each in checks.ids(case_of(load_manifest(str(folder)), workdir)) if each.check == "overlap")
    assert found.level != "ok" and "most from" not in found.what and "corpus.validation_groups" in found.fix


def test_docstrings_are_counted_by_package(made, tmp_path):
    """However many parts a package has."""
    folder = shutil.copytree(made.folder, tmp_path / "shards")
    parts = [["docstrings", f"rich 14.0.0[{part}:]"] for part in range(3)]
    (folder / "documents" / "parts.json").write_text(json.dumps(parts))
    manifest = load_manifest(str(folder))
    rows = np.arange(manifest.splits["validation"].records)
    found = overlap.by_group(manifest, "validation", scan.Overlap(rows, rows[:7], (0, 0)))
    assert found == [("docstrings", "rich", 7, len(rows))]
    assert overlap.describe(found) == f"; most from 7 of {len(rows)} rows of rich"


@pytest.mark.parametrize(
    ("source", "name", "keys", "words"),
    [
        ("text:x", "/x", (), "set corpus.group to file"),
        ("text:x", "/x", ("group=site",), "name groups that share little text with the others in corpus.validation"),
        ("docstrings", "rich", (), "name groups that share little"),
        ("docstrings", "rich", ("group=document",), "set corpus.group to ''"),
        ("docstrings", "rich", ("validation_groups=('rich',)",), "another group in place of rich"),
        ("text:x", "/a/b.txt", ("group=file", "validation_groups=('b.txt',)"), "another group in place of /a/b.txt"),
        ("hf:a/b", "validation", (), "name hf:a/b#validation in corpus.keep_out"),
        ("hf:a/b#validation[:9%]", "validation", (), "name hf:a/b#validation[:9%] in corpus.keep_out"),
        ("hf:a/b", "train", (), "set corpus.group"),
    ],
)
def test_the_key_to_change(source, name, keys, words):
    corpus = tiny_config(*(f"corpus.{key}" for key in keys)).corpus
    assert words in overlap.advice(corpus, "validation", [(source, name, 3, 4)])
