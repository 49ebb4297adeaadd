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


def render(found: dict[str, Any]) -> list[RenderableType]:
    """Returns a table for each part; its ratios are of the first row to the others."""
    parts: list[RenderableType] = []
    for part, rows in found.items():
        parts += [""] if parts else []
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
