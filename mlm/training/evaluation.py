"""One pass over a split: every record once, whatever the batch size, hosts and devices."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mlm import cluster
from mlm.cluster import distributed
from mlm.training.sharding import logical_rows, put_batch

EvalStep = Callable[[Any, dict[str, jax.Array]], tuple[jax.Array, ...]]
Batches = Iterable[dict[str, np.ndarray]]  # this host's rows of each


def score(
    eval_step: EvalStep, params: Any, batches: Batches, *, mesh: Mesh, rows: int, tokens_per_byte: float | None
) -> dict[str, float]:
    """Returns the scores of a split over its masked positions; sums are taken in float64, in the order of the records.

    Args:
      eval_step: `(params, batch) -> RowSums`; gives rows whose "valid" is 0 the weight 0.
      rows: in a batch, over all hosts.
      tokens_per_byte: of UTF-8 text, for bits per byte, which are comparable across tokenizers; None if unknown.
    """
    columns = per_row(eval_step, params, batches, mesh=mesh, rows=rows)
    loss, weight, correct = (float(np.sum(column, dtype=np.float64)) for column in columns)
    mean = loss / weight if weight else math.nan
    scores = {
        "loss": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "accuracy": correct / weight if weight else math.nan,
        "predictions": int(weight),
    }
    if tokens_per_byte is not None:
        scores["bits_per_byte"] = mean / math.log(2) * tokens_per_byte
    return scores


def per_row(eval_step: EvalStep, params: Any, batches: Batches, *, mesh: Mesh, rows: int) -> list[np.ndarray]:
    """Returns the columns that `eval_step` gives, in the order of the batches' rows; arguments as in `score`."""
    pending: list[tuple[jax.Array, ...]] = []
    for batch in cluster.with_progress(batches):
        batch = put_batch(batch, mesh, rows)
        distributed.compile_together(eval_step, params, batch)
        pending.append(eval_step(params, batch))
        jax.block_until_ready(pending[-3:-2])  # run at most a few batches ahead
    order = np.argsort(logical_rows(mesh, rows))
    columns = zip(*jax.device_get(pending), strict=True)
    return [np.concatenate([part[order] for part in column]) for column in columns]
