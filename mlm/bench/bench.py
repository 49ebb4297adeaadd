"""The command `bench`: our step, shards and batches beside the baselines, interleaved, in one run.

step      an update, beside run_mlm_flax.py's (baseline.py) and, in another interpreter, run_mlm.py's
          (torch_step.py); on random rows: it needs neither shards nor TensorFlow
products  the matrix products of our update, each alone, beside the update
shards    from documents to files, beside transformers' TF-TPU example (tf_tpu_example.py)
batches   from files to batches, beside the same
loop      the step on the batches of the run, beside one batch reused
"""

from __future__ import annotations

import json
import os
from typing import Any

from ml_collections import ConfigDict
from rich.console import RenderableType

from mlm.bench import inputs, products, steps
from mlm.data.manifest import Manifest
from mlm.errors import InputError
from mlm.text import show, table

NAMES = {
    "mlm": "mlm",
    "baseline": "run_mlm_flax.py",
    "torch": "run_mlm.py (PyTorch)",
    "tf_tpu_example": "TF-TPU example",
    "one_batch": "one batch reused",
    "real_batches": "batches of the run",
}
TORCH_NOTES = (
    "PyTorch {torch}, transformers {transformers}, {device}, {dtype}.",
    "Memory: as compiled; PyTorch's is its peak on CUDA, and on the CPU what its process grew by.",
)


def run(
    config: ConfigDict,
    parts: list[str],
    manifest: Manifest | None,
    *,
    seconds: float,
    as_json: bool,
    tokenizer_folder: str = "",
    megabytes: float = 20.0,
    torch_python: str = "",
) -> dict[str, Any]:
    """Prints the measurements, as tables or as one line of JSON, and returns them by part.

    Args:
      manifest: for "batches" and "loop".
      seconds: of each part, besides compilation and the least number of rounds.
      tokenizer_folder, megabytes: for "shards"; a local folder, and 10^6 characters of the corpus.
      torch_python: a Python interpreter with torch, transformers and accelerate, for "step"; "" for none.
    """
    if torch_python:
        if "step" not in parts:
            raise InputError("--torch: is for the part step; add it to --parts.")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves PyTorch memory of the GPU
    compare = {
        "step": lambda: steps.compare_steps(config, seconds, torch_python),
        "products": lambda: products.compare_products(config, seconds),
        "shards": lambda: inputs.compare_shards(config, tokenizer_folder, megabytes, seconds),
        "batches": lambda: inputs.compare_batches(config, manifest, seconds),
        "loop": lambda: inputs.compare_loop(config, manifest, seconds),
    }
    found = {part: compare[part]() for part in compare if part in parts}
    show(*([json.dumps(found)] if as_json else tables(found)))
    return found


def tables(found: dict[str, Any]) -> list[RenderableType]:
    """Returns a table for each part; its ratios are of the first row to the others."""
    parts: list[RenderableType] = []
    for part, rows in found.items():
        parts += [""] if parts else []
        if part == "products":
            parts += products.tables(rows)
            continue
        heads = (">MFU", ">memory") if part == "step" else ()
        cells = [_cells(part, name, rows) for name in rows if name in NAMES]
        parts.append(table(part, ">tokens/s", ">ms", *heads, "", rows=cells))
        if "torch" in rows:
            parts += [line.format(**rows["torch"]) for line in TORCH_NOTES]
    return parts


def _cells(part: str, name: str, rows: dict[str, Any]) -> list[str]:
    row, ratio = rows[name], rows["ratios"].get(name)
    cells = [NAMES[name], f"{row['tokens_per_second']:,.0f}", f"{row['milliseconds']:,.1f}"]
    if part == "step":
        mfu, memory = row["mfu"], row["memory_bytes"]
        cells += ["-" if mfu is None else f"{mfu:.1%}", "-" if memory is None else f"{memory / 1e6:,.0f} MB"]
    return [*cells, "" if ratio is None else f"the first is {ratio:.3g} times as fast"]
