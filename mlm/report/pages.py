"""Pieces of a page: HTML from text and numbers. Nothing here imports jax."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

Rows = Iterable[Sequence[str]]


def image(words: str, svg: str) -> str:
    """Returns a picture that is within the page itself; `words` say what it shows."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{text(words)}" src="data:image/svg+xml;base64,{data}">'


def card(title: str, body: str) -> str:
    """Returns a box; `body` is HTML."""
    return f"<section><h2>{text(title)}</h2>{body}</section>"


def folded(title: str, count: int, body: str) -> str:
    """Returns a box that opens on a click, with the number of things in it; nothing if there are none."""
    if not count:
        return ""
    return f'<details><summary>{text(title)} <span>{count:,}</span></summary><div class="wide">{body}</div></details>'


def table(head: Sequence[str], rows: Rows, kind: str) -> str:
    """Returns a table of text; `kind` is its class in the style sheet."""
    top = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{kind}">{f"<tr>{top}</tr>" if top else ""}{body}</table>'


def text(words: str) -> str:
    """Returns text as HTML."""
    return html.escape(str(words), quote=True)


def number(value: float | None, spec: str) -> str:
    """Returns a number as `format` shows it; None stands for one that was not finite."""
    return "not finite" if value is None else format(value, spec)


def duration(seconds: float) -> str:
    """Returns "1 h 05 min", "2 min 03 s" or "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60):02d} min"
