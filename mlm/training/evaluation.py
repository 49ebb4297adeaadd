"""One pass over a split: every record once, whatever the batch size, hosts and devices.

Dimensions: D mask draws, N rows, T lines of a table, C columns of RowSums.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mlm import cluster
from mlm.cluster import distributed
from mlm.training import breakdown
from mlm.training.sharding import logical_rows, put_batch

EvalStep = Callable[[Any, dict[str, jax.Array]], tuple[jax.Array, ...]]
Batches = Iterable[dict[str, np.ndarray]]  # this host's rows of each


def score(
    eval_step: EvalStep,
    params: Any,
    batches: Batches,
    *,
    mesh: Mesh,
    rows: int,
    tokens_per_byte: float | None,
    draws: int = 1,
) -> dict[str, Any]:
    """Returns the scores of a split over its masked positions; sums are taken in float64, in the order of the records.

    Loss and accuracy are means over the mask draws. The standard errors of the loss are `loss_se_draws`, with several
    draws, and `loss_se_records`, by the delta method for a ratio of sums, clustered by row. `tokens_per_byte` (of UTF-8
    text) gives bits per byte, which are comparable across tokenizers.

    `eval_step` returns RowSums, with weight 0 where "valid" is 0; `rows` are those of a batch over all hosts. Where it
    adds `breakdown.sums`, each of `breakdown.TABLES` is {line: scores}, over all draws together, without empty lines.
    """
    # Evaluation has no epochs: this column numbers the mask draws.
    drawn = (
        batch | ({"epoch": np.full_like(batch["epoch"], number)} if number else {})
        for batch in batches
        for number in range(draws)
    )
    columns = per_row(eval_step, params, drawn, mesh=mesh, rows=rows)
    by_draw = [np.moveaxis(column.reshape(-1, draws, rows), 1, 0).reshape(draws, -1) for column in columns[:3]]
    loss_D, weight_D, correct_D = (np.array([np.sum(x, dtype=np.float64) for x in column]) for column in by_draw)
    predictions = int(weight_D.sum())
    if not weight_D.all():
        return _scores(math.nan, math.nan, predictions, tokens_per_byte)
    loss_D, accuracy_D = loss_D / weight_D, correct_D / weight_D
    scores = _scores(float(loss_D.mean()), float(accuracy_D.mean()), predictions, tokens_per_byte)
    if draws > 1:
        scores["loss_se_draws"] = float(loss_D.std(ddof=1)) / math.sqrt(draws)
    loss_DxN, weight_DxN = by_draw[:2]
    records = np.count_nonzero(weight_DxN.any(axis=0))
    if records > 1:  # each record's influence on the mean loss; their sum is 0
        influence_N = np.mean((loss_DxN - loss_D[:, None] * weight_DxN) / weight_D[:, None], axis=0)
        scores["loss_se_records"] = math.sqrt(records / (records - 1) * float(np.sum(influence_N**2)))
    return scores | (_tables(columns[3]) if len(columns) > 3 else {})


def _tables(sums_Nx2xTxC: np.ndarray) -> dict[str, dict[str, dict[str, float]]]:
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for table, lines_TxC in zip(breakdown.TABLES, np.sum(sums_Nx2xTxC, axis=0, dtype=np.float64), strict=True):
        lines = zip(breakdown.names(table, len(lines_TxC)), lines_TxC.tolist(), strict=True)
        tables[table] = {n: _scores(loss / w, correct / w, int(w), None) for n, (loss, w, correct) in lines if w}
    return tables


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
    found = _scores(loss, accuracy, sum(each["predictions"] for each in scores), ratio)
    for key in ("loss_se_draws", "loss_se_records"):  # the errors of several folders are independent
        if all(key in each for each in scores):
            parts = [share * each[key] for share, each in zip(shares, scores, strict=True)]
            found[key] = math.hypot(*parts) / math.fsum(shares)
    return found


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
