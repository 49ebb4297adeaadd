"""The figures of `plan` as lines and tables for `text.show`."""

import collections
from typing import Any

from rich.console import RenderableType

from mlm.plan import cost_model
from mlm.text import table

OPTIMISTIC = """\
Times are the compiler's estimates, and optimistic: a published run on a v3-8 (RoBERTa-large, Hugging Face, 2021) took
about 1.19 s a step, where the estimate for the baseline is 0.71 s. Expect about 1.7 times as long."""


def plan(results: dict[str, Any]) -> list[RenderableType]:
    """Returns the tables of the step, and of the baseline if there is one."""
    lines = _step(results["plan"])
    if "baseline" in results:
        lines += ["", *_step(results["baseline"])]
    if ratio := results.get("ratio"):
        cycles = f"{ratio['cycles']:.2f} of the baseline's cycles"
        lines += ["", f"mlm takes {cycles} and {ratio['temporaries']:.2f} of its temporaries"]
    if "milliseconds" in results["plan"]:
        lines += ["", OPTIMISTIC]
    return lines


def sweep(results: dict[str, Any]) -> list[RenderableType]:
    """Returns the table of a sweep, one line per cell."""
    keys = results["sweep"][0]["cell"]
    heads = (*keys, "fits", ">GB/chip", ">ms", ">tokens/s", ">MFU", ">hours", ">dollars", "")
    rows = [(*cell["cell"].values(), *_cell(cell)) for cell in results["sweep"]]
    timed = any("milliseconds" in cell.get("plan", ()) for cell in results["sweep"])
    return [table(*heads, rows=rows), *(["", OPTIMISTIC] if timed else [])]


def _cell(cell: dict[str, Any]) -> tuple[str, ...]:
    if "error" in cell:
        return (*[""] * 7, cell["error"])
    row = cell["plan"]
    specs = {
        "milliseconds": ".1f",
        "tokens_per_second": ",.0f",
        "mfu": ".1%",
        "hours": ",.1f",
        "dollars": ",.0f",
    }
    figures = (
        "-" if row.get(key) is None else format(row[key], spec) for key, spec in specs.items()
    )
    needs = _gigabytes(row["bytes_per_chip"]["needs"])
    remark = "some operations not costed, so it is slower" if _uncosted(row) else ""
    return "yes" if row["fits"] else "no", needs, *figures, remark


def _step(row: dict[str, Any]) -> list[RenderableType]:
    """Returns the lines and tables of one program."""
    mesh = " x ".join(f"{axis} {devices}" for axis, devices in row["mesh"].items())
    slices = f"{row['slices']} slices of " if row["slices"] > 1 else ""
    accumulate = f", {row['accumulate']} times" if row["accumulate"] > 1 else ""
    rows = f"{row['global_batch']:,} rows of {row['length']} tokens, {row['rows_per_chip']:g} rows a chip at once"
    lines: list[RenderableType] = [
        f"{row['step']} step on {slices}{row['topology']}: {row['chips']} chips, {row['devices']} devices, {mesh}",
        f"  {hosts(row['hosts'])}",
        f"  batch {rows}{accumulate}",
    ]
    if row["padding"] is None:
        lines.append(
            "  counts full rows: their padding is not known without the shards (--workdir)"
        )
    lines.append(f"  {memory(row)}")
    if "milliseconds" not in row:
        return lines
    lines.append(f"  estimate: {_speed(row)}")
    short = row.get("short", row)
    if short is not row:
        lines.append(f"  the first steps, on rows of {short['length']} tokens: {memory(short)}")
        lines += [f"  estimate of theirs: {_speed(short)}"] if short["fits"] else []
    if row["hours"] is not None:
        dollars = "" if row["dollars"] is None else f", {row['dollars']:,.0f} dollars"
        tokens = f"{row['tokens'] / 1e9:,.3g} billion tokens"
        lines.append(f"  whole run: {row['hours']:,.1f} hours, {tokens}{dollars}")
    elif short["fits"]:
        lines.append(
            "  hours: unknown, the config counts epochs; give --records=N, or --workdir of the shards"
        )
    return [*lines, *_costs(row), _collectives(row["collectives"])]


def _speed(row: dict[str, Any]) -> str:
    return f"{row['milliseconds']:.2f} ms a step, {row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}"


def memory(row: dict[str, Any]) -> str:
    """Returns whether a step fits, and the bytes of a chip that it needs, as text."""
    size = {name: _gigabytes(count) for name, count in row["bytes_per_chip"].items()}
    if not row["fits"]:
        return f"does not fit: needs {size['needs']} of {size['capacity']} a chip"
    parts = f"arguments {size['arguments']}, temporaries {size['temporaries']}, other outputs {size['outputs']}"
    fits = f"fits: {size['needs']} of {size['capacity']} a chip ({parts})"
    return (
        fits
        if "milliseconds" in row
        else f"{fits}, with attention by xla; a run's cuDNN needs less"
    )


def hosts(host_input: dict[str, Any]) -> str:
    """Returns a line on `sharding.host_input`."""
    start = f"hosts {host_input['count']}:"
    if not host_input["fed"]:
        return f"{start} NOT ALL CAN BE FED: {host_input['error']}"
    return (
        f"{start} {host_input['rows_per_host']} rows, {host_input['lanes_per_host']:g} lanes each"
    )


def _costs(row: dict[str, Any]) -> list[str]:
    """Returns where the estimate comes from and what it lacks."""
    cycles = row["cycles"]
    shares = ", ".join(
        f"{cycles[source] / cycles['all']:.1%} {words}"
        for source, words in cost_model.SOURCES.items()
    )
    lacks = ", ".join(f"{operation} ({count})" for operation, count in _uncosted(row).items())
    return [
        f"  {cycles['all'] / 1e6:.2f} million cycles: {shares}",
        f"  NOT COSTED, so the real step is slower: {lacks}"
        if lacks
        else "  every instruction has a cost",
    ]


def _uncosted(row: dict[str, Any]) -> collections.Counter:
    short = row.get("short", {})
    return collections.Counter(row.get("uncosted")) | collections.Counter(short.get("uncosted"))


def _collectives(collectives: dict[str, Any]) -> RenderableType:
    if not collectives:
        return "  no collectives"
    rows = []
    for kind, row in collectives.items():
        counts = str(row["count"]), str(row["overlapping"]), f"{row['bytes'] / 1e6:,.1f}"
        rows.append(
            (kind, *counts, f"{row['milliseconds']:.3f}", f"{row['exposed_milliseconds']:.3f}")
        )
    return table(
        "collective", ">count", ">overlapping", ">MB", ">ms", ">exposed ms", rows=rows, indent=2
    )


def _gigabytes(size: float | None) -> str:
    return "more" if size is None else f"{size / 1e9:.2f} GB"
