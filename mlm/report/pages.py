"""What the pages have in common: the templates, and numbers, durations and plots as text. Nothing here imports jax."""

from __future__ import annotations

import base64
from typing import Any

from matplotlib.figure import Figure

from mlm.report import plots
from mlm.text import templates


def render(template: str, *, figures: dict[str, Figure], **values: Any) -> str:
    """Returns a page, one file that needs no network; figures are by title."""
    sources = {title: _source(figure) for title, figure in figures.items()}
    return templates("mlm.report").get_template(template).render(plots=sources, duration=duration, **values)


def _source(figure: Figure) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(plots.to_svg(figure).encode()).decode()


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
