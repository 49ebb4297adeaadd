"""The plots of the report, from the lines of the logs, as SVG or PNG. Nothing here imports jax."""

import base64
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, StrMethodFormatter

from mlm import logs
from mlm.report.goodput import Line, Session

Points = tuple[list[float], list[float]]

TRAIN, EVAL, FAINT, MARK = "#3b6ea8", "#c2561d", "#a7b2c0", "#6b7280"
COLORS = ("#3b6ea8", "#c2561d", "#4c8c4a", "#8a5ba8", "#b08d2c", "#2f8f8f", "#b0476b", "#6b7280")  # of runs
NATS, SQUARED = "nats per prediction", "squared error"  # the loss, of a regression the other
FEW = 40  # points: each gets a mark
FEW_VALUES = 8  # of a varied number: each is named on the axis
STYLE = matplotlib.rc_params_from_file(Path(__file__).with_name("plots.mplstyle"), use_default_template=False)


def draw(
    train: list[Line], evals: list[Line], sessions: list[Session], entropy: float | None, unit_of_loss: str = NATS
) -> dict[str, Figure]:
    """Returns title -> figure; without `sessions`, none of the throughput. `entropy` is the unigrams' of the split."""
    figures = {}
    with _figure(figures, "Loss", unit_of_loss) as axes:
        _curve(axes, points(train, "loss"), TRAIN, "training")
        _curve(axes, points(evals, "loss"), EVAL, "evaluation", marked=True)
        sets = [name for name in logs.by_set(evals[-1]) if name] if evals else []
        for color, name in zip(COLORS[2:], sets, strict=False):
            _curve(axes, points(evals, f"{name}/loss"), color, _shown(name), marked=True)
        if entropy is not None:
            axes.axhline(entropy, color=MARK, linewidth=1, linestyle=(0, (5, 3)), label="unigram entropy")
    shown = {} if unit_of_loss == SQUARED else {"accuracy": ("Accuracy", "% of the predictions", 100)}
    shown |= {name: (name, "mean", 1) for name in logs.own_metrics([*train, *evals])}
    for key, (title, unit, scale) in shown.items():
        with _figure(figures, title, unit) as axes:
            _curve(axes, points(train, key, scale), TRAIN, "training")
            _curve(axes, points(evals, key, scale), EVAL, "evaluation", marked=True)
    with _figure(figures, "Learning rate", "per step") as axes:
        _curve(axes, points(train, "learning_rate"), TRAIN)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    with _figure(figures, "Gradient norm", "global, before clipping") as axes:
        norms = points(train, "grad_norm")
        _curve(axes, norms, TRAIN)
        if norms[1] and max(norms[1]) > 20 * min(norms[1]) > 0:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    if kept := [line for session in sessions for line in session.kept_lines("train")]:
        with _figure(figures, "Throughput", "tokens/s") as axes:
            _curve(axes, points(kept, "tokens_per_second"), TRAIN)
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
            axes.set_ylim(bottom=0, top=1.1 * axes.get_ylim()[1])
    return figures


@matplotlib.rc_context(STYLE)
def draw_norms(lines: list[Line]) -> Figure:
    """Returns the norms over steps by layer, then by kind of parameter over all layers; gray is 0 or not finite."""
    names = sorted(lines[0]["parameters"], key=_layer_and_kind)
    groups: dict[str, list[int]] = {}
    for part, (index, name) in itertools.product((1, 2), enumerate(names)):
        groups.setdefault(_layer_and_kind(name)[part], []).append(index)
    norms_TxPx3 = np.array([[line["parameters"][name] for name in names] for line in lines], float)
    norms_TxPx3[..., 2] = np.where(norms_TxPx3[..., 1] == 0, 0, norms_TxPx3[..., 2] * norms_TxPx3[..., 1])  # of updates
    norms_GxTx3 = np.sqrt([np.sum(norms_TxPx3[:, indices] ** 2, axis=1) for indices in groups.values()])
    norms_GxTx3[..., 2] /= np.where(norms_GxTx3[..., 1] == 0, np.nan, norms_GxTx3[..., 1])
    figure = Figure(figsize=(11, 0.9 + 0.17 * len(groups)), layout="constrained")
    for column, title in enumerate(("gradient, before clipping", "parameter", "update / parameter")):
        shown_GxT = np.ma.masked_where(~(norms_GxTx3[..., column] > 0), norms_GxTx3[..., column])
        axes = figure.add_subplot(1, 3, column + 1, title=title, xlabel="steps", facecolor=FAINT)
        scale, steps = "log" if shown_GxT.count() else None, [line["step"] for line in lines]
        figure.colorbar(axes.pcolormesh(steps, range(len(groups)), shown_GxT, norm=scale, rasterized=True), aspect=50)
        axes.set(yticks=range(len(groups)), yticklabels=[] if column else groups, ylim=(len(groups) - 0.5, -0.5))
        axes.grid(visible=False)
    return figure


def _layer_and_kind(name: str) -> tuple[float, str, str]:
    """Returns (layer, "layer N", the rest of the name) of a parameter; outside the layers (order, module, name)."""
    if match := re.search(r"/(\d+)/", name):
        return int(match[1]), f"layer {match[1]}", name[match.end() :]
    return -1 if "embeddings" in name else math.inf, "/".join(name.split("/")[:-1][:2]), name


def _shown(name: str) -> str:
    """Returns a name as matplotlib shows it: text between dollars would be a formula, and a name in _ is left out."""
    return f" {name}".replace("$", r"\$") if name.startswith("_") else name.replace("$", r"\$")


def draw_together(runs: dict[str, Sequence[Points]], x_unit: str, y_unit: str = f"loss, {NATS}") -> Figure:
    """Returns the losses of several runs: name -> (points of training, drawn faintly, points of evaluation)."""
    figures: dict[str, Figure] = {}
    with _figure(figures, "", y_unit, x_unit) as axes:
        for color, (name, (train, evals)) in zip(COLORS, runs.items(), strict=False):
            if train[0]:
                axes.plot(*train, color=color, linewidth=1, alpha=0.5)
            marker = "o" if len(evals[0]) < FEW else ""
            axes.plot(*evals, color=color, marker=marker, markersize=4, label=_shown(name))
    return figures[""]


@matplotlib.rc_context(STYLE)
def draw_over_values(curves: dict[str, list[tuple[float, ...]]], key: str, score: str) -> Figure:
    """Returns a score over a number: name -> (value of the key, lowest, median and highest score), ... of a curve."""
    figure = Figure(figsize=(4.7, 2.9 + 0.12 * len(curves)), layout="constrained")
    axes = figure.add_subplot(xlabel=_shown(key), ylabel=f"{_shown(score)}, median and range")
    for color, (name, curve) in zip(COLORS, curves.items(), strict=False):
        value, low, median, high = np.array(sorted(curve)).T
        label, spread = _shown(name), (median - low, high - median)
        axes.errorbar(value, median, spread, label=label, color=color, marker="o", markersize=4, capsize=2.5)
    values = sorted({value for curve in curves.values() for value, *_ in curve})
    if 0 < 10 * values[0] <= values[-1]:
        axes.set_xscale("log")
    if len(values) <= FEW_VALUES:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)
    if any(curves):
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def points(
    lines: list[Line], key: str, scale: float = 1, position: Callable[[Line], float | None] = lambda line: line["step"]
) -> Points:
    """Returns (x, values) of the lines that hold a finite number under the key, and whose position is known."""
    finite = [line for line in lines if line.get(key) is not None and math.isfinite(line[key])]
    known = [(x, line[key] * scale) for line in finite if (x := position(line)) is not None]
    return [x for x, _ in known], [y for _, y in known]


def to_url(figure: Figure) -> str:
    """Returns the figure as an SVG document within a URL."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def save(figure: Figure, file: Path) -> None:
    """Writes the figure as a .png or .svg, the same bytes for the same figure."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, dpi=160, metadata={"Software" if file.suffix == ".png" else "Date": None})


@contextmanager
def _figure(figures: dict[str, Figure], title: str, y_unit: str, x_unit: str = "steps") -> Iterator[Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.7, 2.9), layout="constrained")
        axes = figure.add_subplot(xlabel=x_unit, ylabel=y_unit)
        yield axes
        hours = x_unit.startswith("hours")  # not "500m"
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}") if hours else EngFormatter(sep=""))
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
        figures[title] = figure


def _curve(axes: Axes, curve: Points, color: str, label: str = "", *, marked: bool = False) -> None:
    if curve[0]:
        marker = "o" if (marked and len(curve[0]) < FEW) or len(curve[0]) == 1 else ""
        axes.plot(*curve, color=color, marker=marker, markersize=4, label=label or None)
