"""Text for people: hostile characters made visible, lines and tables on terminals and pipes, templates of pages."""

from __future__ import annotations

import io
import locale
import os
import re
import string
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from markupsafe import Markup

if TYPE_CHECKING:  # loaded when needed
    import jinja2
    from rich.console import RenderableType
    from rich.text import Text

# C0, DEL and C1, which move a terminal's cursor; marks that change the direction of text; halves of surrogate pairs.
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def is_text(value: Any) -> bool:
    """Returns whether a value is a string that UTF-8 can hold; invalid bytes are decoded as halves of pairs."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def printable(text: str) -> str:
    r"""Returns the text with control characters, line breaks too, as \uXXXX."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def markdown(text: str) -> Markup:
    """Returns Markdown that shows the text as it is, on one line; numeric entities replace what could be markup."""
    text = re.sub(
        r"(?<!\w)_|_(?!\w)|[][\\`*<>&|~$#!{}:@]",
        lambda match: f"&#{ord(match[0])};",
        printable(text),
    )
    return Markup(" ".join(text.split()))


def code(text: str) -> Markup:
    """Returns Markdown that shows the text as code, on one line."""
    plain = set(text) <= set(string.ascii_letters + string.digits + " ./:=,+@()_-")
    return Markup(
        f"`{text}`" if plain and text.strip() == text != "" else f"<code>{markdown(text)}</code>"
    )


def number(value: float | None, spec: str) -> str:
    """Returns a number as `format` shows it; None stands for one that was not finite."""
    return "not finite" if value is None else format(value, spec)


def table(*heads: str, rows: Iterable[Sequence[str | Text]], indent: int = 0) -> RenderableType:
    """Returns a table for `show`; a head with ">" before it is of numbers. Without heads, there is no header line."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(heads), header_style="none"
    )
    for head in heads:
        justify = "right" if head.startswith(">") else "left"
        grid.add_column(Text.assemble((printable(head.removeprefix(">")), "bold")), justify=justify)
    for row in rows:
        grid.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return Padding.indent(grid, indent)


def use_utf8() -> None:
    """Starts this program again in Python's UTF-8 mode if the locale has another encoding, which files would get."""
    if sys.flags.utf8_mode or locale.getencoding().lower() == "utf-8":
        return
    if sys.stdout is not None and sys.stdout.isatty():
        os.environ.setdefault("PYTHONIOENCODING", sys.stdout.encoding)  # a terminal keeps its own
    os.environ["PYTHONUTF8"] = "1"  # of the processes that it starts
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def take_any_text(stream: TextIO) -> None:
    """Has a pipe or file written as UTF-8, and a terminal show codes for what its encoding lacks."""
    if isinstance(stream, io.TextIOWrapper):
        encoding = stream.encoding if stream.isatty() else "utf-8"
        stream.reconfigure(encoding=encoding, errors="backslashreplace")


def prepare_streams() -> None:
    """Makes stdout and stderr take any text, also where they are closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # closed, as by `>&-`: the next file, here or in a child, would take its number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
            os.set_inheritable(getattr(sys, name).fileno(), True)
    for stream in (sys.stdout, sys.stderr):
        take_any_text(stream)


def can_draw(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal that can show a bar; one of 0 rows, as of some CI systems, gets lines."""
    return stream.isatty() and min(os.get_terminal_size(stream.fileno())) > 0


def say(text: str) -> None:
    """Prints a line to stderr at once."""
    print(text, file=sys.stderr, flush=True)


def show(*parts: RenderableType, out: TextIO | None = None) -> None:
    """Writes lines and tables: to a terminal in color and without control characters."""
    from rich.console import Console

    out = out or sys.stdout
    take_any_text(out)
    terminal = out.isatty()
    # The width breaks and cuts no line, a terminal wraps long ones itself; without a height, TERM=dumb has 80 columns.
    color = "auto" if terminal else None
    console = Console(
        file=out, width=100_000, height=25, color_system=color, force_terminal=terminal
    )
    for part in parts:
        if isinstance(part, str):
            out.write((printable(part) if terminal else part) + "\n")
            continue
        with console.capture() as captured:
            console.print(part)
        out.write(re.sub(" +$", "", captured.get(), flags=re.MULTILINE))
    out.flush()


def templates(package: str, finalize: Callable[[Any], Any] | None = None) -> jinja2.Environment:
    """Returns the templates beside a package's modules: values are escaped, a missing one is an error."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader(package, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
