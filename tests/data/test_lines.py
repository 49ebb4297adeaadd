"""Lines of text: the same for a corpus, labelled texts and standard input, whatever wrote the file."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import tarfile
from types import SimpleNamespace

import pytest

from mlm.data import labelled
from mlm.errors import InputError
from mlm.inference.answers import answer_texts, check_utf8
from tests.support.corpora import texts_of

# No line ends in these, and no word: a no-break space, an ideographic one, and what str.splitlines takes for line ends.
TEXTS = [
    "naïve\u2028one",
    "two\u0085",
    "three\x0c3",
    "10\u00a0000",
    "a\u3000b",
    "\u200bx\x1ey\x1cz",
    "end\ufeff",
]


def read_labelled(source: str, kind: str = "classes") -> list[str]:
    table = labelled.read_table(source, labelled.Columns(("text",), "label", kind), split="train")
    return [text for (text,) in table.texts]


def read_stdin(path: str) -> list[str]:
    with open(path, "rb") as file:
        data = gzip.decompress(file.read()) if path.lower().endswith(".gz") else file.read()
    stdin = io.TextIOWrapper(io.BytesIO(data), encoding="latin-1")
    out = io.StringIO()

    def read(text: str, name: str, piped: bool) -> tuple[dict, str]:
        check_utf8(text, name)
        return {"text": text}, text

    answer_texts(SimpleNamespace(read=read, answer=lambda rows: [{}] * len(rows)), [], stdin, out)
    return [json.loads(line)["text"] for line in out.getvalue().split("\n")[:-1]]


def json_lines(texts: list[str]) -> list[str]:
    return [json.dumps({"text": text, "label": "x"}, ensure_ascii=False) for text in texts]


def csv_lines(texts: list[str]) -> list[str]:
    return ["text,label", *(f"{text},x" for text in texts)]


def conll_lines(texts: list[str]) -> list[str]:
    return [line for text in texts for line in (f"{text} O", "")]


READERS = {  # name of the file, its lines, and how they are read
    "text": ("a.txt", lambda texts: texts, lambda path: texts_of(f"text:{path}")),
    "jsonl": ("a.jsonl", json_lines, lambda path: texts_of(f"jsonl:{path}")),
    "csv": ("a.csv", csv_lines, lambda path: read_labelled(f"csv:{path}")),
    "labelled jsonl": ("a.jsonl", json_lines, lambda path: read_labelled(f"jsonl:{path}")),
    "conll": ("a.conll", conll_lines, lambda path: read_labelled(f"conll:{path}", kind="tokens")),
    "stdin": ("a.txt", lambda texts: texts, read_stdin),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("mark", "end", "suffix"),
    [
        (b"", "\n", ""),
        (codecs.BOM_UTF8, "\r\n", ""),
        (codecs.BOM_UTF8, "\r", ".gz"),
        (b"", "\r", ".GZ"),
    ],
)
def test_every_reader_has_the_same_lines(tmp_path, reader, mark, end, suffix):
    name, lines_of, read = READERS[reader]
    path = tmp_path / (name.upper() + suffix if suffix == ".GZ" else name + suffix)
    content = mark + "".join(line + end for line in lines_of(TEXTS)).encode()
    path.write_bytes(gzip.compress(content) if suffix else content)
    # documents of one line each
    texts = [text.strip() for text in TEXTS] if reader == "text" else TEXTS
    assert read(str(path)) == texts


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "latin-1"])
def test_another_encoding_is_named(tmp_path, reader, encoding):
    """utf-16-be has no mark; it could be read as UTF-8 with zeros between the letters."""
    name, lines_of, read = READERS[reader]
    (tmp_path / name).write_bytes("\n".join(lines_of(["plain", "café"])).encode(encoding))
    with pytest.raises(InputError) as caught:
        read(str(tmp_path / name))
    wanted = "not UTF-8" if encoding == "latin-1" else encoding.upper()
    place = {"latin-1": ", line "}.get(encoding, "")
    assert wanted in str(caught.value) and "\n" not in str(caught.value)
    assert (
        f"{name}{place}" if reader != "stdin" else "line 2" if place else "standard input"
    ) in str(caught.value)


@pytest.mark.parametrize("reader", READERS)
def test_a_compressed_file_and_an_archive_are_said_to_be_one(tmp_path, reader):
    name, lines_of, read = READERS[reader]
    content = "\n".join(lines_of(["plain", "text"])).encode()
    (tmp_path / "in").write_bytes(content)
    with tarfile.open(tmp_path / "tar", "w") as archive:
        archive.add(tmp_path / "in", name)
    packed = [
        (name, compress(content), "compressed.*gz")
        for compress in (gzip.compress, bz2.compress, lzma.compress)
    ]
    packed.append((name, (tmp_path / "tar").read_bytes(), "archive"))
    packed.append((f"{name}.gz", gzip.compress(packed[-1][1]), "archive"))
    for file, data, words in packed:
        (tmp_path / file).write_bytes(data)
        with pytest.raises(InputError, match=words):
            read(str(tmp_path / file))
