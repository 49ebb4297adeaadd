"""Sources of documents: their parts, what each kind of file holds, and that a bad one is named."""

import gzip
import os
import random

import pytest

from mlm.data import sources
from mlm.errors import InputError
from tests.support.corpora import corpus_of, numbered, read_documents, texts_of, write_jsonl


@pytest.mark.parametrize("seed", range(15))
def test_each_line_is_in_one_part(tmp_path, monkeypatch, seed):
    """Cut at any byte: lines longer than a part, no end of line at the end, CRLF, empty lines and files, compressed."""
    draw = random.Random(seed)
    expected = []
    for name in range(draw.randint(1, 6)):
        sizes = draw.choices([0, 0, 1, 5, 40, 200], k=draw.choice([0, 1, 20]))
        lines = ["é" * size + str(draw.random())[: draw.choice([0, 6])] for size in sizes]
        end = draw.choice(["\n", "\r\n", "\r"])
        text = draw.choice(["", "\ufeff"]) + end.join(lines)
        text += draw.choice(["", end]) if lines else ""
        is_gzip = draw.random() < 0.2
        content = gzip.compress(text.encode()) if is_gzip else text.encode()
        (tmp_path / f"{name}.{'gz' if is_gzip else 'txt'}").write_bytes(content)
        expected += filter(None, lines)
    monkeypatch.setattr(sources, "PART_BYTES", (draw.randint(1, 60), 10**9))
    assert texts_of(f"text:{tmp_path}/*") == expected
    parts = corpus_of((f"text:{tmp_path}/*",)).parts()
    total = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert sum(part.bytes for part in parts) == total, "no byte twice, and none left out"
    limit = 1.5 * sources.part_bytes(total) + 1
    assert all(part.bytes <= limit for part in parts if ".gz" not in str(part.where))


def test_parts_are_listed_and_not_read(tmp_path):
    """A terabyte, of which the disk holds nothing."""
    for name in range(4):
        with (tmp_path / f"{name}.txt").open("wb") as file:
            os.truncate(file.fileno(), 250 * 10**9)
    parts = corpus_of((f"text:{tmp_path}/*.txt",)).parts()
    assert sum(part.bytes for part in parts) == 10**12
    assert all(128e6 < part.bytes < 384e6 for part in parts[:-1]) and 3900 < len(parts) < 4000


def test_many_small_files_are_read_together(tmp_path):
    names = [f"{number:04}\udce9.txt" for number in range(2000)]  # not UTF-8
    for number, name in enumerate(names):
        (tmp_path / name).write_text(f"{number}\n")
    own = corpus_of((f"text:{tmp_path}/*.txt",), group="file")
    (part,) = own.parts()
    assert part.name == f"{tmp_path}/{names[0]} and 1999 more files"
    assert [tuple(document) for _, document in read_documents(own)] == [
        (str(n), names[n]) for n in range(2000)
    ]
    assert {own.split_of(part, name, 0) for name in names} == {"train", "validation"}


BAD_FILES = {  # name: content, what the sentence must name
    "bad.jsonl": (b'{"text": "good"}\n{"text": \n', "bad.jsonl, line 2"),
    "other.jsonl": (b'{"body": "good"}\n', "'text'"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "surrogate.jsonl, line 1"),
    "no column/train.jsonl": (b'{"body": "good"}\n', "text"),
    "broken/train.jsonl": (b'{"text": \n', "JSON"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named(tmp_path, name):
    content, words = BAD_FILES[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert words in refused(f"hf:{path.parent}" if "/" in name else f"jsonl:{path}")


@pytest.mark.parametrize(
    "source", ["text:/no/missing*", "hf:/no/folder", "tfds:no_such_set", "tfds:kaggle:rows"]
)
def test_sources_that_are_not_there_are_named(source):
    assert ("downloaded and run" in refused(source)) == ("kaggle" in source)


def refused(source: str) -> str:
    with pytest.raises(InputError) as error:
        read_documents(corpus_of((source,)))
    assert source in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_a_bad_line_in_a_later_part_has_its_number(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", numbered(300))
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text.replace("number 200.", '"'))
    monkeypatch.setattr(sources, "PART_BYTES", (3000, 10**9))
    corpus = corpus_of((source,))
    first, second, *others = corpus.parts()
    assert list(corpus.read(first, texts="")) and list(corpus.read(second, texts="")) and others
    with pytest.raises(InputError, match=r"a\.jsonl, line 201: is not a JSON object"):
        read_documents(corpus)


@pytest.mark.parametrize("text", ["other", "longer than it was"])
def test_a_file_that_changes_after_it_was_listed_is_named(tmp_path, text):
    file = tmp_path / "a.txt"
    file.write_text("texts")
    own = corpus_of((f"text:{file}",))
    (part,) = own.parts()
    file.write_text(text)
    os.utime(file, (1, 1))
    with pytest.raises(InputError, match=rf"{file} has changed since it was listed"):
        list(own.read(part, texts=""))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path, name):
    content = "\n".join(numbered(30_000)).encode()  # more than is read at once
    content = gzip.compress(content, 0) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(content)
    found = corpus_of((f"text:{tmp_path}/{name}",))
    reading = found.read(found.parts()[-1], texts="")
    next(reading)
    os.truncate(tmp_path / name, len(content) // 2)
    count = 1
    with pytest.raises(InputError, match=f"text:{tmp_path}/{name}") as error:
        for _ in reading:
            count += 1
    assert f"/{name}, line {count + 1}: " in str(error.value)
