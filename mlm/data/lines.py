r"""Lines of UTF-8 text, the same for a corpus, labelled texts and standard input.

A line ends with \n, \r\n or \r, as in Python's text files, and with no other character: U+2028 is part of the text. A
byte-order mark at the start of a file is not. Files whose names end in .gz are decompressed.
"""

import codecs
import contextlib
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from mlm.files import open_file

SPACES = " \t\r\n"  # between columns and words; U+00A0 and U+3000 may be part of a word
# How files begin that a compressor or archiver wrote: gzip, bzip2, xz, zstd, zip.
COMPRESSED = (b"\x1f\x8b", b"BZh91AY&SY", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")
Parsed = TypeVar("Parsed")


def is_gzip(name: str) -> bool:
    """Returns whether a file is decompressed, by its name."""
    return name.lower().endswith(".gz")


def read_file(
    name: str, parse: Callable[[str], Parsed], start: int = 0, stop: float = math.inf
) -> Iterator[Parsed]:
    """Yields parse(line) of the lines of a file that begin in a range of bytes (of a .gz file, all).

    Raises ValueError, which names the file and the line, for one that is not UTF-8 or that `parse` refuses.
    """
    number = 1
    with open_file(name) as raw:
        if is_gzip(name):
            file = gzip.GzipFile(fileobj=raw)
            stop = math.inf
        else:
            file = io.BufferedReader(raw, 2**20)
        try:
            for line in read_lines(file, start, stop):
                yield parse(line.decode())
                number += 1
        except (ValueError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            if start:
                file.seek(0)
                with contextlib.suppress(ValueError):  # of a file that is shorter than it was
                    for _ in read_lines(file, 0, start):
                        number += 1
            reason = "is not UTF-8; convert it" if isinstance(error, UnicodeDecodeError) else error
            raise ValueError(f"{name}, line {number}: {reason}") from error


def read_lines(file: IO[bytes], start: int = 0, stop: float = math.inf) -> Iterator[bytes]:
    r"""Yields the lines that begin in a range of bytes (between two \n, if it is cut), with their ends."""
    place = start
    if start:  # the line that holds the byte before belongs to the part before
        file.seek(start - 1)
        place += len(file.readline()) - 1
    while place < stop:
        line = file.readline()
        if not line:
            if stop < math.inf:
                raise ValueError("the file is shorter than it was; start the same command again")
            return
        text = line if place else _without_mark(line)
        place += len(line)
        yield from text.splitlines(keepends=True) if b"\r" in text else [text]


def _without_mark(line: bytes) -> bytes:
    if line.startswith(COMPRESSED):
        raise ValueError("is compressed; decompress it, or compress it with gzip and name it .gz")
    if line[257:262] == b"ustar":
        raise ValueError("is a tar archive; unpack it, and name the files in it")
    # by a mark, or by the zeros that ASCII has in UTF-16 and UTF-32
    encoding = json.detect_encoding(line)
    if encoding not in ("utf-8", "utf-8-sig"):
        raise ValueError(f"is {encoding.upper()}; convert it to UTF-8")
    return line.removeprefix(codecs.BOM_UTF8)


def json_object(line: str) -> dict[str, Any]:
    """Returns the object of a line of JSON lines; raises ValueError."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        reason = "begins a JSON array" if line.lstrip().startswith("[") else "is not a JSON object"
        raise ValueError(f"{reason}; in JSON lines each line is a whole object")
    return content


def split_words(text: str) -> list[str]:
    """Returns the words of a text or line, as CoNLL's files separate them: by spaces, tabs and line ends alone."""
    return [word for word in re.split(f"[{SPACES}]+", text) if word]
