r"""Lines of UTF-8 text, the same for a corpus, labelled texts and standard input.

A line ends with \n, \r\n or \r, as in Python's text files, and with no other character: U+2028 is part of the text. A
byte-order mark at the start of a file is not. Files whose names end in .gz are decompressed.
"""

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

SPACES = " \t\r\n"  # between columns and words; U+00A0 and U+3000 may be part of a word
# How files begin that a compressor or archiver wrote: gzip, bzip2, xz, zstd, zip.
COMPRESSED = (b"\x1f\x8b", b"BZh91AY&SY", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")


def is_gzip(name: str) -> bool:
    """Returns whether a file is decompressed, by its name."""
    return name.lower().endswith(".gz")


def read_lines(
    file: IO[bytes], name: str, start: int = 0, stop: float = math.inf
) -> Iterator[bytes]:
    r"""Yields the lines that begin in a range of bytes (between two \n, if it is cut), or all lines of a .gz file.

    They keep their ends. Raises ValueError, which names the file.
    """
    if is_gzip(name):
        file = gzip.GzipFile(fileobj=file)
        stop = math.inf
    place = start
    number = 0
    if start:  # the line that holds the byte before belongs to the part before
        file.seek(start - 1)
        place += len(file.readline()) - 1
    try:
        while place < stop:
            line = file.readline()
            if not line and stop == math.inf:
                return
            if not line:
                raise ValueError(
                    f"{name} ends after {place} bytes, {stop} were listed; start the same command again"
                )
            text = line if place else _without_mark(line, name)
            place = place + len(line)
            if b"\r" in text:
                pieces = text.splitlines(keepends=True)
                number += len(pieces)
                yield from pieces
            else:
                number += 1
                yield text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name}, after line {number}: {error}") from error


def _without_mark(line: bytes, name: str) -> bytes:
    if line.startswith(COMPRESSED):
        raise ValueError(
            f"{name} is compressed; decompress it, or compress it with gzip and name it .gz"
        )
    if line[257:262] == b"ustar":
        raise ValueError(f"{name} is a tar archive; unpack it, and name the files in it")
    # by a mark, or by the zeros that ASCII has in UTF-16 and UTF-32
    encoding = json.detect_encoding(line)
    if encoding not in ("utf-8", "utf-8-sig"):
        raise ValueError(f"{name} is {encoding.upper()}; convert it to UTF-8")
    return line.removeprefix(codecs.BOM_UTF8)


def decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Yields lines as strings; raises ValueError, which names the file and the line."""
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError:
            raise ValueError(
                f"{name}, line {number}: is not UTF-8; convert the file first"
            ) from None


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
