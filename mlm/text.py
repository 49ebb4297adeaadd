"""Text that comes from elsewhere: whether it can be written, and what of it a terminal or a page may get."""

from __future__ import annotations

import re
import string
from typing import Any

import jinja2

# C0, DEL and C1, which move a terminal's cursor; marks that turn the direction of writing; halves of surrogate pairs.
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def is_text(value: Any) -> bool:
    """Returns whether a value is a string that UTF-8 can hold: bytes that are not UTF-8 come as halves of pairs."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def printable(text: str) -> str:
    r"""Returns the text with control characters, line breaks too, as \uXXXX."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def markdown(text: str) -> str:
    """Returns Markdown that shows the text as it is, on one line: in a heading, a paragraph or a cell of a table.

    What could be markup stands as a numeric entity, which both Markdown and HTML take for plain text.
    """
    text = re.sub(r"(?<!\w)_|_(?!\w)|[][\\`*<>&|~$#!{}:@]", lambda match: f"&#{ord(match[0])};", printable(text))
    return " ".join(text.split())


def code(text: str) -> str:
    """Returns Markdown that shows the text as code, on one line, in a paragraph or a cell of a table."""
    plain = set(text) <= set(string.ascii_letters + string.digits + " ./:=,+@()_-")
    return f"`{text}`" if plain and text.strip() == text != "" else f"<code>{markdown(text)}</code>"


def templates(package: str, **settings: Any) -> jinja2.Environment:
    """Returns the templates beside a package's modules: values are escaped, and one that is not given is an error."""
    loader = jinja2.PackageLoader(package, "")
    strict = {"autoescape": True, "undefined": jinja2.StrictUndefined, "keep_trailing_newline": True}
    return jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **strict, **settings)
