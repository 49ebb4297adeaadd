"""What `plan` found, for people: lines and tables for `text.show`."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from mlm.text import table


def plan(found: dict[str, Any]) -> list[RenderableType]:
    """Returns what to show of a plan: the step, and the stock one beside it if that was asked for."""
    lines = _step(found["plan"])
    if "stock" in found:
        lines += ["", *_step(found["stock"], operations=8)]
    if "ratio" in found:
        ratio = found["ratio"]
        words = f"{ratio['cycles']:.2f} of the stock step's cycles and {ratio['temporaries']:.2f} of its temporaries"
        lines += ["", f"mlm takes {words}"]
    return [*lines, "", *_calibration(found["calibration"])]


def sweep(found: dict[str, Any]) -> list[RenderableType]:
    """Returns the table of a sweep, a line for each cell."""
    keys = list(found["sweep"][0]["cell"])
    heads = (*keys, "fits", ">GB/chip", ">ms", ">tokens/s", ">MFU", ">hours", ">dollars", "")
    rows = [(*map(one["cell"].get, keys), *_row(one)) for one in found["sweep"]]
    return [table(*heads, rows=rows), "", *_calibration(found["calibration"])]


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    if "error" in one:
        return (*[""] * 7, one["error"])
    row = one["plan"]
    needs = _gigabytes(row["bytes_per_chip"]["needs"])
    if not row["fits"]:
        return "no", needs, *[""] * 5, f"of {_gigabytes(row['bytes_per_chip']['capacity'])}"
    hours = "-" if row["hours"] is None else f"{row['hours']:,.1f}"
    dollars = "-" if row["dollars"] is None else f"{row['dollars']:,.0f}"
    speed = f"{row['milliseconds']:.1f}", f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}"
    return "yes", needs, *speed, hours, dollars, ""


def _step(row: dict[str, Any], operations: int = 20) -> list[RenderableType]:
    """Returns what to show of one program."""
    size, mesh = row["bytes_per_chip"], " x ".join(f"{axis} {ways}" for axis, ways in row["mesh"].items())
    slices = f"{row['slices']} slices of " if row["slices"] > 1 else ""
    lines = [
        f"{row['step']} step on {slices}{row['topology']}: {row['chips']} chips, {row['devices']} devices, {mesh}",
        f"  {hosts(row['hosts'])}",
        f"  batch {row['global_batch']:,} rows of {row['length']} tokens, {row['rows_per_chip']:g} rows a chip at once"
        + (f", {row['accumulate']} times" if row["accumulate"] > 1 else ""),
    ]
    if not row["fits"]:
        needs = "more" if size["needs"] is None else _gigabytes(size["needs"])
        lines.append(f"  does not fit: needs {needs} of {_gigabytes(size['capacity'])} a chip")
        return lines + _search(row)
    lines.append(
        f"  fits: {_gigabytes(size['needs'])} of {_gigabytes(size['capacity'])} a chip (arguments "
        f"{_gigabytes(size['arguments'])}, temporaries {_gigabytes(size['temporaries'])}, output beside them "
        f"{_gigabytes(size['outputs'])})"
    )
    speed = f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}"
    lines.append(f"  estimate: {row['milliseconds']:.2f} ms a step, {speed}")
    lines += _short(row["short"]) if "short" in row else []
    if row["hours"] is None and row.get("short", row)["fits"]:
        lines.append("  hours: unknown, the config counts epochs; say --records=N, or --workdir of the shards")
    elif row["hours"] is not None:
        dollars = "" if row["dollars"] is None else f", {row['dollars']:,.0f} dollars"
        lines.append(f"  whole run: {row['hours']:,.1f} hours{dollars}")
    return [*lines, *_costs(row), _collectives(row["collectives"]), _operations(row["operations"][:operations])]


def hosts(found: dict[str, Any]) -> str:
    """Returns how the hosts are fed, of `sharding.host_input`."""
    count, rows, lanes = (found[key] for key in ("count", "rows_per_host", "lanes_per_host"))
    if not found["fed"]:
        return f"hosts {count}: NOT ALL CAN BE FED: {found['error']}"
    if lanes < 1:
        return f"hosts {count}: {rows} rows each, {round(1 / lanes)} hosts share a lane"
    return f"hosts {count}: {rows} rows and {lanes} {'lane' if lanes == 1 else 'lanes'} each"


def _short(row: dict[str, Any]) -> list[str]:
    """Returns the line of the first updates, where they read shorter rows."""
    words = f"  the first updates, on rows of {row['length']} tokens:"
    if not row["fits"]:
        return [f"{words} do not fit, so how long the run takes is unknown"]
    size, speed = _gigabytes(row["bytes_per_chip"]["needs"]), f"{row['tokens_per_second']:,.0f} tokens/s"
    return [f"{words} {size} a chip, {row['milliseconds']:.2f} ms a step, {speed}, MFU {row['mfu']:.1%}"]


def _costs(row: dict[str, Any]) -> list[str]:
    """Returns who says what part of the estimate, and what nobody does."""
    cycles = row["cycles"]
    share = {key: f"{value / max(cycles['all'], 1):.1%}" for key, value in cycles.items()}
    count = row["instructions"]
    lines = [
        f"  {cycles['all'] / 1e6:.2f} million cycles: {share['compiler']} by the compiler's estimate, "
        f"{share['kernels']} as kernels declare, {share['collectives']} collectives",
        f"  at the links' bandwidth, {share['bytes']} other bytes at the memory's, {share['waits']} waits for copies; "
        f"{count['compiler']:,} instructions by the first, {count['rules']:,} by the rest",
    ]
    if row["slices"] > 1:
        lines.append("  traffic between the slices (DCN) is not costed as such, so the real step is slower")
    if row["uncosted"]:
        named = ", ".join(f"{what} ({count})" for what, count in row["uncosted"].items())
        return [*lines, f"  NOT COSTED, so the real step is slower: {named}"]
    return [*lines, "  nothing is left without a cost"]


def _search(row: dict[str, Any]) -> list[str]:
    if "largest" not in row:
        return []
    largest = row["largest"]
    lines = ["  no smaller batch was found that fits"]
    if largest:
        lines = [
            f"  largest batch found that fits: {largest['rows_per_chip']:g} rows a chip at once, "
            f"--config.data.global_batch={largest['global_batch']}"
        ]
    for one in row["remedies"]:
        needs = one.get("error") or (
            "" if one["bytes_per_chip"] is None else f"{_gigabytes(one['bytes_per_chip'])} a chip"
        )
        lines.append(f"  {'fits' if one['fits'] else 'does not fit'} with {one['change']}: {needs}")
    return lines


def _collectives(found: dict[str, Any]) -> RenderableType:
    if not found:
        return "  no collectives"
    heads = ("collective", ">count", ">overlapping", ">MB", ">ms", ">ms not hidden")
    rows = []
    for kind, row in found.items():
        counts = str(row["count"]), str(row["overlapping"]), f"{row['bytes'] / 1e6:,.1f}"
        rows.append((kind, *counts, f"{row['milliseconds']:.3f}", f"{row['exposed_milliseconds']:.3f}"))
    return table(*heads, rows=rows, indent=2)


def _operations(found: list[dict[str, Any]]) -> RenderableType:
    heads = (">share", ">count", "part", "module", "line of Python that made it")
    rows = [(f"{row['share']:.1%}", str(row["count"]), row["phase"], row["module"], row["source"]) for row in found]
    return table(*heads, rows=rows, indent=2)


def _calibration(known: dict[str, Any]) -> list[str]:
    return [
        f"Estimates are optimistic. {known['what']}:",
        f"about {known['published_seconds']} s a step, where this estimate for the stock step on v3:2x2 is "
        f"{known['estimated_seconds']} s.",
        f"Expect a real step to take about {known['ratio']} times as long.",
    ]


def _gigabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.2f} GB"
