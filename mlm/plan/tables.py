"""The figures of `plan` as lines and tables for `text.show`."""

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType

from mlm.plan.topology import FAMILIES
from mlm.text import table

CALIBRATION = """\
Estimates are optimistic. 3 epochs of WikiText-103, large model, length 512, global batch 128, v3-8, bfloat16:
106.4 minutes published (Hugging Face on PyTorch / XLA TPUs, 2021), about 1.19 s a step, where the estimate for the
baseline on v3:2x2 is 0.71 s. Expect a real step to take about 1.7 times as long."""

ROOFLINE = """\
Estimates for a GPU are a roofline: each operation takes the time of its products at the peak or of its bytes at the
full memory bandwidth, whichever is longer. RoBERTa-base on an H200 took 2.76 times as long."""


def reference(rows: Iterable[dict[str, Any]]) -> str:
    """Returns what is known of the estimates of some programs: what they were scaled by, if they were."""
    texts = [row.get("calibration") or (ROOFLINE if _is_gpu(row) else CALIBRATION) for row in rows]
    return "\n".join(dict.fromkeys(texts))


def _is_gpu(row: dict[str, Any]) -> bool:
    return bool(FAMILIES[row["topology"].partition(":")[0]].target)


def plan(results: dict[str, Any]) -> list[RenderableType]:
    """Returns the tables of the step, and of the baseline if there is one."""
    lines = _step(results["plan"])
    if "baseline" in results:
        lines += ["", *_step(results["baseline"], operations=8)]
    if ratio := results.get("ratio"):
        cycles, temporaries = f"{ratio['cycles']:.2f}", f"{ratio['temporaries']:.2f}"
        lines += ["", f"mlm takes {cycles} of the baseline's cycles and {temporaries} of its temporaries"]
    return [*lines, "", results["calibration"]]


def sweep(results: dict[str, Any]) -> list[RenderableType]:
    """Returns the table of a sweep, one line per cell."""
    heads = (*results["sweep"][0]["cell"], "fits", ">GB/chip", ">ms", ">tokens/s", ">MFU", ">hours", ">dollars", "")
    rows = [(*cell["cell"].values(), *_cell(cell)) for cell in results["sweep"]]
    return [table(*heads, rows=rows), "", results["calibration"]]


def _cell(cell: dict[str, Any]) -> tuple[str, ...]:
    if "error" in cell:
        return (*[""] * 7, cell["error"])
    row = cell["plan"]
    needs, capacity = (_gigabytes(row["bytes_per_chip"][key]) for key in ("needs", "capacity"))
    if not row["fits"]:
        return "no", needs, *[""] * 5, f"of {capacity}"
    specs = {"milliseconds": ".1f", "tokens_per_second": ",.0f", "mfu": ".1%", "hours": ",.1f", "dollars": ",.0f"}
    figures = ("-" if row[key] is None else format(row[key], spec) for key, spec in specs.items())
    missing = row["uncosted"] or row.get("short", row)["uncosted"]
    return "yes", needs, *figures, "some operations not costed, so it is slower" if missing else ""


def _step(row: dict[str, Any], operations: int = 20) -> list[RenderableType]:
    """Returns the lines and tables of one program."""
    mesh = " x ".join(f"{axis} {devices}" for axis, devices in row["mesh"].items())
    slices = f"{row['slices']} slices of " if row["slices"] > 1 else ""
    accumulate = f", {row['accumulate']} times" if row["accumulate"] > 1 else ""
    size = {name: _gigabytes(count) for name, count in row["bytes_per_chip"].items()}
    rows = f"{row['global_batch']:,} rows of {row['length']} tokens, {row['rows_per_chip']:g} rows a chip at once"
    lines = [
        f"{row['step']} step on {slices}{row['topology']}: {row['chips']} chips, {row['devices']} devices, {mesh}",
        f"  {hosts(row['hosts'])}",
        f"  batch {rows}{accumulate}",
    ]
    if _is_gpu(row):
        lines.append("  attention is xla's; a run with cuDNN's (model.attention=auto) needs less memory and time")
    if row["padding"] is None:
        lines.append("  counts full rows: their padding is not known without the shards (--workdir)")
    elif row["padding"]:
        lines.append(f"  padding, {row['padding']:.1%} of the rows, is in no number of tokens here")
    if not row["fits"]:
        needs = "more" if row["bytes_per_chip"]["needs"] is None else size["needs"]
        return [*lines, f"  does not fit: needs {needs} of {size['capacity']} a chip", *_search(row)]
    parts = f"arguments {size['arguments']}, temporaries {size['temporaries']}, other outputs {size['outputs']}"
    lines += [f"  fits: {size['needs']} of {size['capacity']} a chip ({parts})", f"  estimate: {_speed(row)}"]
    short = row.get("short", row)
    first = f"  the first steps, on rows of {short['length']} tokens"
    if not short["fits"]:
        lines.append(f"{first}, do not fit: the run's hours are unknown")
    elif short is not row:
        lines.append(f"{first}: {_gigabytes(short['bytes_per_chip']['needs'])} a chip, {_speed(short)}")
        if short["uncosted"]:
            lines.append(f"    {_uncosted(short)}")
    if row["hours"] is not None:
        dollars = "" if row["dollars"] is None else f", {row['dollars']:,.0f} dollars"
        staged = ", smaller batches at the same tokens/s" if row["batch_stages"] else ""
        tokens = f"{row['tokens'] / 1e9:,.3g} billion tokens"
        lines.append(f"  whole run: {row['hours']:,.1f} hours, {tokens}{dollars}{staged}")
    elif short["fits"]:
        lines.append("  hours: unknown, the config counts epochs; give --records=N, or --workdir of the shards")
    costly = [
        (f"{one['share']:.1%}", str(one["count"]), one["phase"], one["module"], one["source"])
        for one in row["operations"][:operations]
    ]
    grid = table(">share", ">count", "phase", "module", "line of Python", rows=costly, indent=2)
    return [*lines, *_costs(row), _collectives(row["collectives"]), grid]


def _speed(row: dict[str, Any]) -> str:
    return f"{row['milliseconds']:.2f} ms a step, {row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}"


def hosts(host_input: dict[str, Any]) -> str:
    """Returns a line on `sharding.host_input`."""
    start, rows, lanes = f"hosts {host_input['count']}:", host_input["rows_per_host"], host_input["lanes_per_host"]
    if not host_input["fed"]:
        return f"{start} NOT ALL CAN BE FED: {host_input['error']}"
    if lanes < 1:
        return f"{start} {rows} rows each, {round(1 / lanes)} hosts share a lane"
    return f"{start} {rows} rows and {lanes} {'lane' if lanes == 1 else 'lanes'} each"


def _costs(row: dict[str, Any]) -> list[str]:
    """Returns where the estimate comes from and what it lacks."""
    cycles, count = row["cycles"], row["instructions"]
    share = {key: f"{value / max(cycles['all'], 1):.1%}" for key, value in cycles.items()}
    of_bytes = "products and memory" if _is_gpu(row) else "other memory"
    lines = [
        f"  {cycles['all'] / 1e6:.2f} million cycles: {share['compiler']} estimated by the compiler "
        f"({count['compiler']:,} instructions); by plan's rules ({count['rules']:,})",
        f"  {share['kernels']} Pallas kernels, {share['collectives']} collectives, {share['bytes']} {of_bytes} "
        f"traffic; {share['waits']} waits for copies",
        f"  milliseconds by part: {by_part(row['parts'])}",
    ]
    if row["slices"] > 1:
        lines.append("  traffic between the slices (DCN) is not costed as such, so the real step is slower")
    return [*lines, f"  {_uncosted(row) or 'every instruction has a cost'}"]


def by_part(parts: dict[str, float]) -> str:
    """Returns the milliseconds of each part of a step as text."""
    return ", ".join(f"{name} {milliseconds:.3g}" for name, milliseconds in parts.items())


def _uncosted(row: dict[str, Any]) -> str:
    """Returns what the time of a step leaves out; "" if nothing."""
    operations = ", ".join(f"{operation} ({count})" for operation, count in row["uncosted"].items())
    return operations and f"NOT COSTED, so the real step is slower: {operations}"


def _search(row: dict[str, Any]) -> list[str]:
    if "largest" not in row:
        return []
    lines = ["  no smaller batch was found that fits"]
    if largest := row["largest"]:
        flags = f"--config.data.global_batch={largest['global_batch']}"
        if row["batch_stages"]:
            flags += ' "--config.data.batch_stages=()"'
        lines = [f"  largest batch found that fits: {largest['rows_per_chip']:g} rows a chip at once, {flags}"]
    for one in row["remedies"]:
        needs = one.get("error") or (one["bytes_per_chip"] and f"{_gigabytes(one['bytes_per_chip'])} a chip") or ""
        lines.append(f"  {'fits' if one['fits'] else 'does not fit'} with {one['change']}: {needs}")
    return lines


def _collectives(collectives: dict[str, Any]) -> RenderableType:
    if not collectives:
        return "  no collectives"
    rows = []
    for kind, row in collectives.items():
        counts = str(row["count"]), str(row["overlapping"]), f"{row['bytes'] / 1e6:,.1f}"
        rows.append((kind, *counts, f"{row['milliseconds']:.3f}", f"{row['exposed_milliseconds']:.3f}"))
    return table("collective", ">count", ">overlapping", ">MB", ">ms", ">exposed ms", rows=rows, indent=2)


def _gigabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.2f} GB"
