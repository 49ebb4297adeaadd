"""Lines of text, as a corpus and labelled texts read them, whatever wrote the file."""

import bz2
import codecs
import gzip
import io
import lzma
import tarfile

import pytest

from mlm.data import lines

# No line ends in these, and no word: a no-break space, an ideographic one, and what str.splitlines takes for line ends.
TEXTS = ["naïve\u2028one", "two\u0085", "three\x0c3", "10\u00a0000", "a\u3000b", "\u200bx\x1ey"]


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_where_python_s_do(tmp_path, mark, end):
    content = mark + "".join(text + end for text in TEXTS).encode()
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "A.GZ").write_bytes(gzip.compress(content))
    for name in ("a", "A.GZ"):
        found = list(lines.read_file(str(tmp_path / name), str))
        assert found == [text + end for text in TEXTS]
    for text in TEXTS[:-1]:
        assert lines.split_words(f"{text}\tx") == [text, "x"]


def archived(content: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x"), io.BytesIO(content))
    return out.getvalue()


TEXT = "plain\ncafé\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TEXT.encode("latin-1"), "line 2: is not UTF-8"),
        (TEXT.encode("utf-16-be"), "line 1: is UTF-16-BE"),  # without a mark
        (TEXT.encode("utf-32"), "UTF-32"),
        (bz2.compress(TEXT.encode()), "compressed.*gz"),
        (lzma.compress(TEXT.encode()), "compressed.*gz"),
        (archived(b""), "archive"),
        (gzip.compress(b"one\n", mtime=0) + b"not gzip", "line 2: "),
    ],
)
def test_what_is_no_utf8_text_is_named(tmp_path, content, words):
    file = tmp_path / ("a.gz" if content.startswith(b"\x1f\x8b") else "a")
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file}, .*{words}"):
        list(lines.read_file(str(file), str))


def test_a_file_that_is_shorter_than_it_was_is_named_with_the_line_that_it_lacks(tmp_path):
    file = tmp_path / "cut.txt"
    file.write_text("one\ntwo\n")
    with pytest.raises(ValueError, match=r"cut\.txt, line 3: the file is shorter than it was"):
        list(lines.read_file(str(file), str, 100, 200))
