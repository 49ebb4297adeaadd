"""The command `bench`: our step, shards and batches beside the stock ones, in turns, in one run.

    step      an update, beside run_mlm_flax.py's (baseline.py) and, in another interpreter, that of run_mlm.py
              (torch_step.py); on random rows: it needs neither shards nor TensorFlow
    products  the matrix products of our update, each alone, beside the update
    shards    from documents to files, beside transformers' TF-TPU example (mlm/bench/tf_tpu_example.py)
    batches   from files to batches, beside the same
    loop      the step with the batches of the run, beside one batch again and again

On a shared machine only the ratios say something: medians over rounds in which each takes its turn.
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
from mlm.training import sharding

NAMES = {
    "mlm": "mlm",
    "stock": "run_mlm_flax.py",
    "torch": "run_mlm.py (PyTorch)",
    "tf_tpu_example": "TF-TPU example",
    "one_batch": "one batch reused",
    "real_batches": "batches of the run",
}
TORCH_WORDS = (
    "PyTorch {torch}, transformers {transformers}, {device}, {dtype}.",
    "Memory: as compiled; of PyTorch on CUDA its peak, on the CPU what its process grew by.",
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
    """Prints the measurements, as a table or as one line of JSON, and returns them by part.

    Args:
      config: of the run.
      parts: some of "step", "products", "shards", "batches", "loop".
      manifest: of the shards, for "batches" and "loop".
      seconds: of each part, beside what it takes to compile and the least number of rounds.
      tokenizer_folder: for "shards"; local.
      megabytes: 10^6 characters of the corpus that "shards" writes.
      torch_python: a Python interpreter with torch, transformers and accelerate, for "step"; "" for none.

    Returns:
      {part: what the function of that part returns}.

    Raises:
      InputError: `torch_python` can't be run, lacks a package, fails, or isn't asked for a step; TensorFlow is missing
        where it is needed; the corpus has too little text for the shards; the mesh splits the parameters, whose
        products can't be measured alone then.
    """
    if torch_python:
        if "step" not in parts:
            raise InputError("--torch: is for the part step; add it to --parts.")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU's memory is not ours alone
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    found: dict[str, Any] = {}
    if "step" in parts:
        found["step"] = steps.compare_steps(config, mesh, seconds, torch_python)
    if "products" in parts:
        found["products"] = products.compare_products(config, mesh, seconds)
    if "shards" in parts:
        found["shards"] = inputs.compare_shards(config, tokenizer_folder, megabytes, seconds)
    if "batches" in parts:
        found["batches"] = inputs.compare_batches(config, manifest, mesh, seconds)
    if "loop" in parts:
        found["loop"] = inputs.compare_loop(config, manifest, mesh, seconds)
    show(*([json.dumps(found)] if as_json else tables(found)))
    return found


def tables(found: dict[str, Any]) -> list[RenderableType]:
    """Returns what `run` returns for `show`: a table for each part, whose first row the ratios speak of."""
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
            parts += [line.format(**rows["torch"]) for line in TORCH_WORDS]
    return parts


def _cells(part: str, name: str, rows: dict[str, Any]) -> list[str]:
    row, ratio = rows[name], rows["ratios"].get(name)
    cells = [NAMES[name], f"{row['tokens_per_second']:,.0f}", f"{row['milliseconds']:,.1f}"]
    if part == "step":
        mfu, memory = row["mfu"], row["memory_bytes"]
        cells += ["-" if mfu is None else f"{mfu:.1%}", "-" if memory is None else f"{memory / 1e6:,.0f} MB"]
    return [*cells, "" if ratio is None else f"the first is {ratio:.3g} times as fast"]
