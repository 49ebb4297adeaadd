"""Patterns of files, links, and names that look like patterns; in corpora, tables, pairs, shards and checkpoints."""

import os
import pathlib
import re
import shutil

import pytest

from mlm.data import data_sets, labelled
from mlm.errors import InputError
from mlm.files import find_files, split_field
from mlm.inference import minimal_pairs
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from tests.support.corpora import corpus_of, read_documents, texts_of, write_jsonl

LETTERS = ["a[1]", "[", "b*c", "w?", "#1", "c:d", "x::y", "@5", "50%20", "{a,b}", "~", " é'", "-x"]


def link_as_dvc(path: pathlib.Path) -> None:
    """Moves a file into a cache, as DVC, git-annex and the Hub do, and leaves a link that is younger."""
    cache = path.parent.parent / "cache"
    cache.mkdir(exist_ok=True)
    blob = cache / f"{path.parent.name}-{path.name}-blob"
    path.rename(blob)
    os.utime(blob, (1e9, 1e9))
    path.symlink_to(os.path.relpath(blob, path.parent))


@pytest.mark.parametrize("letters", LETTERS)
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_name_that_exists_is_no_pattern(tmp_path, monkeypatch, letters, kind):
    """Of a file, of a folder, and of the folder that a pattern is in; absolute and from the folder we are in."""
    folder = tmp_path / letters
    end = "#body" if kind == "jsonl" else ""
    folder.mkdir()
    for name in (f"{letters}.txt", "b.txt"):
        write_jsonl(folder / name, [f"of {name}"], field="body")
        if kind == "text":
            (folder / name).write_text(f"of {name}")
    monkeypatch.chdir(folder)
    for path in (f"{letters}.txt", "*.txt", "**/*.txt"):
        names = [f"{letters}.txt"] + (["b.txt"] if path.endswith("*.txt") else [])
        for root in (f"{folder}/", ""):
            corpus = corpus_of((f"{kind}:{root}{path}{end}",), group="file")
            found = {text: group for _, (text, group) in read_documents(corpus)}
            assert found == {f"of {name}": name for name in names}, path


FILES = "a1.txt a2.txt b.md c/a3.txt c/d/a4.txt .a.txt .h/a5.txt c/.h/.b.txt c/.env"


@pytest.mark.parametrize("place", ["disk", "bucket"])
@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a?.txt", ["a1.txt", "a2.txt"]),
        ("a[12].txt", ["a1.txt", "a2.txt"]),
        ("*.txt", ["a1.txt", "a2.txt"]),
        ("*/*.txt", ["a3.txt"]),
        ("**/*.txt", ["a1.txt", "a2.txt", "a3.txt", "a4.txt"]),
        (".*.txt", [".a.txt"]),
        ("**/.a.txt", [".a.txt"]),
        ("c/.e*", [".env"]),
        (".h/*", ["a5.txt"]),
        ("c/*v", []),
        ("*.none", []),
    ],
)
def test_patterns_as_in_a_shell(tmp_path, place, pattern, names):
    """A dot at the start of a name is matched by a dot alone, in any folder."""
    folder = UPath(tmp_path if place == "disk" else f"memory://{tmp_path.name}")
    for name in FILES.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    if names:
        found = find_files(f"{folder}/{pattern}")
        assert sorted(UPath(file.name).name for file in found) == names
        assert all(file.name.startswith(f"{folder}/") for file in found)
    else:
        with pytest.raises(FileNotFoundError, match=r"no such file; .* begins with a dot"):
            find_files(f"{folder}/{pattern}")


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "linked.txt").symlink_to("folder.txt")
    (tmp_path / "a.txt").write_text("x")
    (file,) = find_files(f"{tmp_path}/*.txt")
    assert file.name == f"{tmp_path}/a.txt"
    with pytest.raises(OSError, match=r"is a folder.*/\*"):
        find_files(f"{tmp_path}/linked.txt")


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        ("a#b.jsonl#text", ("a#b.jsonl", "text")),
        ("a#b.jsonl#a#b", ("a#b.jsonl", "a#b")),
        ("a#*.jsonl#text", ("a#*.jsonl", "text")),
        ("none.jsonl#text", ("none.jsonl", "text")),
    ],
)
def test_where_the_name_of_a_field_begins(tmp_path, rest, found):
    (tmp_path / "a#b.jsonl").write_text("{}")
    assert split_field(f"{tmp_path}/{rest}") == (f"{tmp_path}/{found[0]}", found[1])


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_corpus_of_links(tmp_path, kind):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "ab":
        write_jsonl(folder / f"{name}.jsonl", [f"text {name}"])
        link_as_dvc(folder / f"{name}.jsonl")
    source = f"{kind}:{folder}/*.jsonl"
    first, second = texts_of(source)
    assert "text a" in first and "text b" in second
    corpus = corpus_of((source,))
    (part,) = corpus.parts()
    (tmp_path / "cache" / "data-b.jsonl-blob").write_text('{"text": "other"}\n')
    with pytest.raises(InputError, match=r"b\.jsonl has changed since it was listed"):
        list(corpus.read(part, texts=""))


@pytest.mark.parametrize("pattern", ["*.txt", "gone.txt", "**/*.txt"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, pattern):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "gone.txt").symlink_to("annex/objects/x")
    with pytest.raises(InputError, match=r"gone\.txt.*annex/objects/x.*not there"):
        texts_of(f"text:{tmp_path}/{pattern}")


@pytest.mark.parametrize("letters", LETTERS)
def test_tables_and_pairs_of_any_name(tmp_path, letters):
    folder = tmp_path / letters
    folder.mkdir()
    (folder / f"{letters}.jsonl").write_text('{"sentence_good": "a b", "sentence_bad": "b a"}\n')
    (folder / f"{letters}.csv").write_text("text,label\nx,y\n")
    for pattern in (f"{letters}.jsonl", "*.jsonl"):
        (pair,) = minimal_pairs.read_pairs(f"jsonl:{folder}/{pattern}")
        assert pair.texts == ("a b", "b a") and pair.phenomenon == letters
    columns = labelled.Columns(("text",), "label")
    table = labelled.read_table(f"csv:{folder}/{letters}.csv", columns, split="train")
    assert (table.texts, table.labels) == ([("x",)], ["y"])


def test_folders_of_data_sets_by_their_letters(tmp_path):
    """A colon and a # may be in the path; what `datasets` takes for a pattern is refused."""
    for letters in ("a:b", "a #b", "c:d:1.0"):
        (tmp_path / letters).mkdir()
        name = f"{tmp_path}/{letters}"
        assert data_sets.hf_name(data_sets.named_split(f"{name}#train")[0]) == (name, None)
        assert data_sets.hf_name(f"{name}:config") == (name, "config")
    for letters in ("[1]", "x*"):
        (tmp_path / letters).mkdir()
        with pytest.raises(InputError, match=re.escape(f"{tmp_path}/{letters}")):
            corpus_of((f"hf:{tmp_path}/{letters}",)).parts()
    assert data_sets.hf_name("Salesforce/wikitext:raw") == ("Salesforce/wikitext", "raw")


def test_a_checkpoint_of_links(tmp_path):
    """Of files, and of a folder in it."""
    folder = tmp_path / "[run]" / "checkpoints"
    (folder / "10" / "state" / "d").mkdir(parents=True)
    for name in ("a", "state/b", "state/d/c"):
        (folder / "10" / name).write_text(name)
    checkpoint_files.write_hashes(UPath(folder), 10)
    link_as_dvc(folder / "10" / "state" / "b")
    shutil.move(folder / "10" / "state", tmp_path / "big disk")
    (folder / "10" / "state").symlink_to(tmp_path / "big disk")
    (tmp_path / "big disk" / "b").unlink()
    (tmp_path / "big disk" / "b").symlink_to(folder / "10" / "cache" / "state-b-blob")
    assert checkpoint_files.find_damage(UPath(folder), 10) is None
    (tmp_path / "big disk" / "d" / "c").unlink()
    assert "state/d/c is missing" in checkpoint_files.find_damage(UPath(folder), 10)
