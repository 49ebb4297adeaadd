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

from mlm.bench import inputs, products, steps
from mlm.data.manifest import Manifest
from mlm.errors import InputError
from mlm.training import sharding

NAMES = {
    "mlm": "mlm",
    "stock": "run_mlm_flax.py",
    "torch": "run_mlm.py (PyTorch)",
    "tf_tpu_example": "TF-TPU example",
    "one_batch": "one batch reused",
    "real_batches": "batches of the run",
}
TORCH_WORDS = """PyTorch {torch}, transformers {transformers}, {device}, {dtype}.
Memory: as compiled; of PyTorch on CUDA its peak, on the CPU what its process grew by."""


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
    print(json.dumps(found) if as_json else table(found))
    return found


def table(found: dict[str, Any]) -> str:
    """Returns what `run` returns as a table: a block for each part, whose first row the ratios speak of."""
    blocks = []
    for part, rows in found.items():
        if part == "products":
            blocks.append(products.table(rows))
            continue
        lines = [f"{part:22}{'tokens/s':>14}{'ms':>11}"]
        if part == "step":
            lines[0] += f"{'MFU':>8}{'memory':>12}"
        for name, row in rows.items():
            if name not in NAMES:
                continue
            line = f"{NAMES[name]:22}{row['tokens_per_second']:14,.0f}{row['milliseconds']:11,.1f}"
            if part == "step":
                mfu, memory = row["mfu"], row["memory_bytes"]
                line += "       -" if mfu is None else f"{mfu:8.1%}"
                line += "           -" if memory is None else f"{memory / 1e6:9,.0f} MB"
            if name in rows["ratios"]:
                line += f"   the first is {rows['ratios'][name]:.3g} times as fast"
            lines.append(line)
        if "torch" in rows:
            lines.append(TORCH_WORDS.format(**rows["torch"]))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
