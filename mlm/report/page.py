"""Pages: one HTML file each, that needs no network.

Their plots end no command that fails to draw them. No jax.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from mlm.text import number, say, templates

Rows = list[tuple[str, ...]]


def render(template: str, values: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """Returns a page; `plots` are URLs by title."""
    pages = templates("mlm.report")
    pages.filters |= {"number": number, "duration": duration}
    pages.filters["config_value"] = lambda value: (
        value if isinstance(value, str) and value else json.dumps(value)
    )
    return pages.get_template(template).render(values, plots=plots)


def render_tables(
    title: str,
    lead: str,
    tables: Sequence[tuple[str, Rows, str]],
    plots: Mapping[str, str] | None = None,
    warning: str = "",
) -> str:
    """Returns a page of tables, the plots after the first: (heading or "", head and rows, class in the style)."""
    values = {"title": title, "lead": lead, "tables": tables, "warning": warning}
    return render("tables.html.j2", values, plots or {})


def drawn(draw: Callable[[ModuleType], Any], otherwise: Any = None) -> Any:
    """Returns draw(mlm.report.plots); of a failure, which is said in a line, `otherwise`: no plot is worth a run.

    matplotlib reads files and variables of the user's, which are for plots of their own. A notebook kernel tells its
    children in MPLBACKEND to draw with a module of its environment, and matplotlib can't be imported where that is not.
    """
    backend = os.environ.pop("MPLBACKEND", "")
    try:
        from mlm.report import plots

        with plots.settings():
            return draw(plots)
    except Exception as error:
        say(f"a plot is left out: {type(error).__name__}: {error}".splitlines()[0])
        return otherwise
    finally:
        if backend:
            os.environ["MPLBACKEND"] = backend
            with contextlib.suppress(ImportError, ValueError):
                import matplotlib

                # A notebook goes on drawing its own plots with it
                matplotlib.rcParams["backend"] = backend


def duration(seconds: float) -> str:
    """Returns "1 h 05 min", "2 min 03 s" or "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60):02d} min"
