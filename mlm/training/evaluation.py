"""One pass over a split: every record once, whatever the batch size, the hosts and the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mlm.cluster import distributed
from mlm.model.loss import RowSums
from mlm.training.sharding import logical_rows, put_batch


def score(
    eval_step: Callable[[Any, dict[str, jax.Array]], RowSums],
    params: Any,
    batches: Iterable[dict[str, np.ndarray]],
    *,
    mesh: Mesh,
    rows: int,
    tokens_per_byte: float | None,
) -> dict[str, float]:
    """Returns the scores of a split over its masked positions.

    The sums of each row come back from the device and are added in float64, in the order of the records.

    Args:
      eval_step: of `make_eval_step`.
      params: the parameters.
      batches: this host's rows of each batch, with a "valid" column.
      mesh: of the batch.
      rows: in a batch, over all hosts.
      tokens_per_byte: ordinary tokens per byte of UTF-8 text in the split; None if it isn't known.

    Returns:
      loss (nats per prediction), perplexity (its exponential), accuracy, predictions (their number) and, where
      `tokens_per_byte` is known, bits_per_byte: the loss in bits times tokens per byte, which tokenizers can be
      compared by.
    """
    columns = of_rows(eval_step, params, batches, mesh=mesh, rows=rows)
    total = [np.sum(column, dtype=np.float64) for column in columns]
    loss, weight, correct = (float(sum_) for sum_ in total)
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


def of_rows(
    eval_step: Callable[[Any, dict[str, jax.Array]], tuple[jax.Array, ...]],
    params: Any,
    batches: Iterable[dict[str, np.ndarray]],
    *,
    mesh: Mesh,
    rows: int,
) -> list[np.ndarray]:
    """Returns the columns that `eval_step` gives, in the order of the batches' rows; arguments as in `score`."""
    pending: list[tuple[jax.Array, ...]] = []
    for batch in batches:
        batch = put_batch(batch, mesh, rows)
        distributed.compile_together(eval_step, params, batch)
        pending.append(eval_step(params, batch))
        jax.block_until_ready(pending[-3:-2])  # a few batches ahead are enough
    order = np.argsort(logical_rows(mesh, rows))
    columns = zip(*jax.device_get(pending), strict=True)
    return [np.concatenate([part[order] for part in column]) for column in columns]
