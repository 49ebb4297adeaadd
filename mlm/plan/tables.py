"""What `plan` found, as tables for people."""

from __future__ import annotations

from typing import Any


def plan(found: dict[str, Any]) -> str:
    """Returns the text of a plan: the step, and the stock one beside it if that was asked for."""
    lines = _step(found["plan"])
    if "stock" in found:
        lines += ["", *_step(found["stock"], operations=8)]
    if "ratio" in found:
        ratio = found["ratio"]
        words = f"{ratio['cycles']:.2f} of the stock step's cycles and {ratio['temporaries']:.2f} of its temporaries"
        lines += ["", f"mlm takes {words}"]
    return "\n".join([*lines, "", _calibration(found["calibration"])])


def sweep(found: dict[str, Any]) -> str:
    """Returns the table of a sweep, a line for each cell."""
    keys = list(found["sweep"][0]["cell"])
    widths = {key: max(len(key), *(len(one["cell"][key]) for one in found["sweep"])) + 2 for key in keys}
    title = "".join(f"{key:{widths[key]}}" for key in keys)
    lines = [f"{title}{'fits':6}{'GB/chip':>10}{'ms':>10}{'tokens/s':>14}{'MFU':>8}{'hours':>10}{'dollars':>12}"]
    for one in found["sweep"]:
        line = "".join(f"{one['cell'][key]:{widths[key]}}" for key in keys)
        lines.append(line + (one["error"] if "error" in one else _row(one["plan"])))
    return "\n".join([*lines, "", _calibration(found["calibration"])])


def _row(row: dict[str, Any]) -> str:
    needs = _gigabytes(row["bytes_per_chip"]["needs"])
    if not row["fits"]:
        return f"{'no':6}{needs:>10}  of {_gigabytes(row['bytes_per_chip']['capacity'])}"
    hours = "-" if row["hours"] is None else f"{row['hours']:,.1f}"
    dollars = "-" if row["dollars"] is None else f"{row['dollars']:,.0f}"
    return (
        f"{'yes':6}{needs:>10}{row['milliseconds']:10.1f}{row['tokens_per_second']:14,.0f}{row['mfu']:8.1%}"
        f"{hours:>10}{dollars:>12}"
    )


def _step(row: dict[str, Any], operations: int = 20) -> list[str]:
    """Returns the lines of one program."""
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
    return [*lines, *_costs(row), *_collectives(row["collectives"]), *_operations(row["operations"][:operations])]


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


def _collectives(rows: dict[str, Any]) -> list[str]:
    if not rows:
        return ["  no collectives"]
    lines = [f"  {'collective':22}{'count':>7}{'overlapping':>13}{'MB':>12}{'ms':>10}{'ms not hidden':>15}"]
    for kind, row in rows.items():
        lines.append(
            f"  {kind:22}{row['count']:7}{row['overlapping']:13}{row['bytes'] / 1e6:12,.1f}{row['milliseconds']:10.3f}"
            f"{row['exposed_milliseconds']:15.3f}"
        )
    return lines


def _operations(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"  {'share':>6}{'count':>7}  part      module, and the line of Python that made it"]
    lines += [
        f"  {row['share']:6.1%}{row['count']:7}  {row['phase']:10}{row['module']}  {row['source']}" for row in rows
    ]
    return lines


def _calibration(known: dict[str, Any]) -> str:
    return (
        f"Estimates are optimistic. {known['what']}:\nabout {known['published_seconds']} s a step, where this estimate "
        f"for the stock step on v3:2x2 is {known['estimated_seconds']} s. Expect a real step to take about\n"
        f"{known['ratio']} times as long."
    )


def _gigabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.2f} GB"
