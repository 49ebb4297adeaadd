"""One pass over a split: every record once, whatever the batch size, hosts and devices."""

import math
from collections.abc import Callable, Iterable, Sequence
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
    means = (loss / weight, correct / weight) if weight else (math.nan, math.nan)
    return _scores(*means, int(weight), tokens_per_byte)


def mean(
    shares: Sequence[float], scores: Sequence[dict[str, float]], tokens_per_byte: Sequence[float | None]
) -> dict[str, float]:
    """Returns the mean scores of a mixture, given its folders' shares of the tokens; of one folder, its own scores."""

    def weighted(values: Iterable[float]) -> float:
        return math.fsum(share * value for share, value in zip(shares, values, strict=True)) / math.fsum(shares)

    if len(scores) == 1:
        return scores[0]
    loss, accuracy = (weighted(each[key] for each in scores) for key in ("loss", "accuracy"))
    known = None not in tokens_per_byte
    ratio = 1 / weighted(1 / each for each in tokens_per_byte) if known else None
    return _scores(loss, accuracy, sum(each["predictions"] for each in scores), ratio)


def _scores(loss: float, accuracy: float, predictions: int, tokens_per_byte: float | None) -> dict[str, float]:
    scores = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy, "predictions": predictions}
    if tokens_per_byte is not None:
        scores["bits_per_byte"] = loss / math.log(2) * tokens_per_byte
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
