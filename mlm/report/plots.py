"""The plots of the pages and of the model card, from the lines of the logs.

`page.drawn` calls it. No jax.
"""

import base64
import contextlib
import io
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from mlm import logs
from mlm.report.sessions import Line
from mlm.report.summary import Points, RunSummary

COLORS = ("#3b6ea8", "#c2561d", "#4c8c4a", "#8a5ba8", "#b08d2c", "#2f8f8f", "#b0476b", "#6b7280")
TRAIN, EVAL, *SETS, GRAY = COLORS
FEW = 20  # points of a curve: each gets a mark


class Curve(NamedTuple):
    """A curve of a plot."""

    points: Points
    color: str
    label: str = ""
    alpha: float = 1.0
    style: str = "-"


def settings() -> contextlib.AbstractContextManager[None]:
    """Draws and saves with the settings of plots.mplstyle alone, whatever a user's matplotlibrc says."""
    return matplotlib.style.context(["default", Path(__file__).with_name("plots.mplstyle")])


def draw(run: RunSummary, norms: list[Line]) -> dict[str, Figure]:
    """Returns title -> figure of what a run has logged."""
    figures = {"Loss": draw_loss(run)}
    lines = [*run.train, *run.evals]
    for key in ("accuracy", "f1", *logs.own_metrics(lines)):
        if any(key in line for line in lines):
            is_share = key in ("accuracy", "f1")
            scale = 100 if is_share else 1
            figures[key.capitalize() if is_share else key] = _plot(
                "%" if is_share else "mean",
                Curve(points(run.train, key, scale), TRAIN, "training"),
                Curve(points(run.evals, key, scale), EVAL, "evaluation"),
            )
    timing = [line for session in run.sessions for line in session.kept_lines("train")]
    for title, unit, key, shown in (
        ("Learning rate", "per step", "learning_rate", run.train),
        ("Gradient norm", "global, before clipping", "grad_norm", run.train),
        ("Throughput", "tokens/s", "tokens_per_second", timing),
    ):
        if any(key in line for line in shown):
            figures[title] = _plot(unit, Curve(points(shown, key), TRAIN), bottom=0)
    if len(norms) > 1:
        figures["Norms"] = draw_norms(norms)
    return figures


def draw_loss(run: RunSummary) -> Figure:
    """Returns the losses of training, of evaluation and of each validation set, and the unigrams' entropy."""
    curves = [
        Curve(points(run.train, "loss"), TRAIN, "training"),
        Curve(points(run.evals, "loss"), EVAL, "evaluation"),
    ]
    sets = filter(None, logs.by_set(run.evals[-1]) if run.evals else ())
    for color, name in zip(SETS, sets, strict=False):
        curves.append(Curve(points(run.evals, f"{name}/loss"), color, name))
    if run.unigram_entropy is not None:
        curves.append(
            Curve(([0, run.step], [run.unigram_entropy] * 2), GRAY, "unigram entropy", style="--")
        )
    return _plot(run.unit_of_loss, *curves)


def draw_comparison(runs: Mapping[str, RunSummary], unit: str) -> dict[str, Figure]:
    """Returns title -> figure: the losses of all runs over steps, over tokens, and over the seconds of training."""
    figures = {}
    for x_unit, position in (
        ("steps", lambda run, step: step),
        ("tokens read", RunSummary.tokens),
        ("seconds of training", RunSummary.training_seconds),
    ):
        curves = []
        for color, (name, run) in zip(COLORS, runs.items(), strict=False):
            for lines, label, alpha in ((run.train, "", 0.5), (run.evals, name, 1.0)):
                placed = [line | {"x": position(run, line["step"])} for line in lines]
                curves.append(Curve(points(placed, "loss", x="x"), color, label, alpha))
        figures[f"Loss over {x_unit}"] = _plot(f"loss, {unit}", *curves, x_unit=x_unit)
    return figures


def draw_norms(lines: list[Line]) -> Figure:
    """Returns the norms of each layer over steps; gray is 0 or not finite."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in sorted(lines[0]["parameters"], key=_layer):
        layers[_layer(name)[1]].append(name)
    figure = Figure(figsize=(11, 0.9 + 0.17 * len(layers)), layout="constrained")
    norms_NxTx3 = []
    for names in layers.values():
        norms_TxPx3 = np.array([[line["parameters"][name] for name in names] for line in lines])
        norms_TxPx3 = norms_TxPx3.astype(float)  # None is not finite
        # The third are of updates over parameters: sum updates, then divide
        norms_TxPx3[..., 2] = np.nan_to_num(norms_TxPx3[..., 1] * norms_TxPx3[..., 2])
        norms_Tx3 = np.sqrt(np.sum(norms_TxPx3**2, axis=1))
        norms_Tx3[:, 2] /= np.where(norms_Tx3[:, 1] == 0, np.nan, norms_Tx3[:, 1])
        norms_NxTx3.append(norms_Tx3)
    titles = ("gradient, before clipping", "parameter", "update / parameter")
    for column, title in enumerate(titles):
        axes = figure.add_subplot(1, 3, column + 1, title=title, xlabel="steps")
        axes.set_facecolor("#a7b2c0")
        shown_NxT = np.array(norms_NxTx3)[..., column]
        shown_NxT = np.ma.masked_where(~(shown_NxT > 0), shown_NxT)
        steps = [line["step"] for line in lines]
        scale = "log" if shown_NxT.count() else None
        mesh = axes.pcolormesh(steps, range(len(layers)), shown_NxT, norm=scale, rasterized=True)
        figure.colorbar(mesh, aspect=50)
        axes.set_yticks(range(len(layers)), [] if column else layers)
        axes.invert_yaxis()
        axes.grid(visible=False)
    return figure


def _layer(name: str) -> tuple[float, str]:
    """Returns (layer, "layer N") of a parameter, or (order, module) of one outside the layers."""
    if match := re.search(r"/(\d+)/", name):
        return int(match[1]), f"layer {match[1]}"
    return -1 if "embeddings" in name else math.inf, "/".join(name.split("/")[:-1][:2])


def draw_over_values(curves: Mapping[str, list[tuple[float, ...]]], key: str, score: str) -> Figure:
    """Returns a score over a number: name -> (value of the key, lowest, median and highest score), ... of a curve."""
    figure = Figure(figsize=(4.7, 2.9 + 0.12 * len(curves)), layout="constrained")
    axes = figure.add_subplot(xlabel=_shown(key), ylabel=f"{_shown(score)}, median and range")
    for color, (name, curve) in zip(itertools.cycle(COLORS), curves.items(), strict=False):
        value, low, median, high = np.array(sorted(curve)).T
        spread = (median - low, high - median)
        axes.errorbar(
            value, median, spread, label=_shown(name), color=color, marker="o", capsize=2.5
        )
    values = sorted({value for curve in curves.values() for value, *_ in curve})
    if 0 < 10 * values[0] <= values[-1]:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)
    if any(curves):
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def points(lines: Sequence[Line], key: str, scale: float = 1, x: str = "step") -> Points:
    """Returns (positions, values) of the lines that hold a finite number under the key, and whose position is known."""
    known = [line for line in lines if None not in (line.get(x), line.get(key))]
    finite = [line for line in known if math.isfinite(line[key])]
    return [line[x] for line in finite], [line[key] * scale for line in finite]


def to_urls(figures: Mapping[str, Figure]) -> dict[str, str]:
    """Returns each figure as an SVG document within a URL."""
    urls = {}
    for title, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        urls[title] = "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
    return urls


def save(figure: Figure, file: Path) -> None:
    """Writes the figure as a PNG, the same bytes for the same figure."""
    figure.savefig(file, dpi=160, metadata={"Software": None})


def _plot(
    y_unit: str, *curves: Curve, x_unit: str = "steps", bottom: float | None = None
) -> Figure:
    figure = Figure(figsize=(4.7, 2.9), layout="constrained")
    axes = figure.add_subplot(xlabel=x_unit, ylabel=y_unit)
    shown = [curve for curve in curves if curve.points[0]]
    for (x, y), color, label, alpha, style in shown:
        marker = "o" if len(x) < FEW and (alpha, style) == (1, "-") else ""
        axes.plot(x, y, style, color=color, label=_shown(label), alpha=alpha, marker=marker)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=bottom)
    axes.locator_params(axis="x", nbins=6)
    if any(curve.label for curve in shown):
        axes.legend()
    return figure


def _shown(name: str) -> str:
    """Returns a name as matplotlib shows it: text between dollars would be a formula, and a name in _ is left out."""
    return f" {name}".replace("$", r"\$") if name.startswith("_") else name.replace("$", r"\$")
