"""The figures of `bench` as tables for `text.show`."""

from typing import Any

from rich.console import RenderableType

from mlm.text import table

NAMES = {
    "mlm": "mlm",
    "baseline": "run_mlm_flax.py",
    "torch": "run_mlm.py (PyTorch)",
    "tf_tpu_example": "TF-TPU example",
    "one_batch": "one batch reused",
    "real_batches": "batches of the run",
}
MAX_PRODUCTS = 12  # lines of the table


def render(found: dict[str, Any]) -> list[RenderableType]:
    """Returns a table for each part; its ratios are of the first row to the others."""
    parts: list[RenderableType] = []
    for part, rows in found.items():
        parts += [""] if parts else []
        if part == "products":
            parts += _products(rows)
            continue
        heads = (">MFU", ">memory") if part == "step" else ()
        cells = [_cells(part, name, rows) for name in rows if name in NAMES]
        parts.append(table(part, ">tokens/s", ">ms", *heads, "", rows=cells))
        if "torch" in rows:
            parts.append("PyTorch {torch}, transformers {transformers}, {device}, {dtype}.".format(**rows["torch"]))
    return parts


def _cells(part: str, name: str, rows: dict[str, Any]) -> list[str]:
    row, ratio = rows[name], rows["ratios"].get(name)
    cells = [NAMES[name], f"{row['tokens_per_second']:,.0f}", f"{row['milliseconds']:,.1f}"]
    if part == "step":
        cells.append("-" if row["mfu"] is None else f"{row['mfu']:.1%}")
        cells.append(f"{row['memory_bytes'] / 1e6:,.0f} MB" if "memory_bytes" in row else "-")
    return [*cells, "" if ratio is None else f"the first is {ratio:.3g} times as fast"]


def _products(found: dict[str, Any]) -> list[RenderableType]:
    rows, rest = found["rows"], found["rows"][MAX_PRODUCTS:]
    groups = [(row["product"], [row]) for row in rows[:MAX_PRODUCTS]] + [("all", rows)]
    if rest:
        groups.insert(-1, (f"{len(rest)} others", rest))
    cells = []
    for name, members in groups:
        count, gflop, milliseconds = (sum(row[key] for row in members) for key in ("count", "gflop", "milliseconds"))
        figures = f"{gflop:.2f}", f"{milliseconds:.1f}", f"{gflop / milliseconds * 1e3:,.0f}"
        cells.append((name, str(count), *figures))
    whole, share = found["milliseconds"], found["products_milliseconds"] / found["milliseconds"]
    return [
        table("products", ">count", ">GFLOP", ">ms", ">GFLOP/s", rows=cells),
        f"A step takes {whole:.1f} ms: its products alone are {share:.0%} of that.",
    ]
