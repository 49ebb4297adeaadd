"""One pass over a split: every record once, whatever the batch size, hosts and devices.

Dimensions: D mask draws, N rows, T lines of a table, C columns of RowSums.
"""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from mlm import cluster
from mlm.cluster import distributed
from mlm.model.keys import in_32_bits, make_key
from mlm.model.loss import Mean, prediction_scores, sum_rows
from mlm.model.masking import Masked, TokenMasking
from mlm.model.module import Model, Params, segment_and_position_ids
from mlm.text import can_draw
from mlm.training import breakdown
from mlm.training.sharding import BATCH, logical_rows, put_batch
from mlm.training.task import Batch

# (params, batch) -> a tree of arrays [B, ...]
EvalStep = Callable[[Any, dict[str, jax.Array]], Any]
Metrics = Callable[[jax.Array, Masked, dict[str, Any]], dict[str, Mean]]
# Scores of a mixture that are not the mean of its folders' scores.
DERIVED = (
    "perplexity",
    "predictions",
    "bits_per_byte",
    "loss_se_draws",
    "loss_se_records",
    *breakdown.TABLES,
)
Batches = Iterable[dict[str, np.ndarray]]  # this host's rows of each
MASK_SEED = 0  # of evaluation, whatever masking.seed is: scores of runs can be compared


def make_eval_step(
    module: Model,
    masking: TokenMasking,
    mesh: Mesh,
    param_shardings: Params,
    *,
    metrics: Metrics | None = None,
    with_breakdown: bool = False,
) -> EvalStep:
    """Returns the jitted `(params, batch) -> {metric: Mean of each row}`, without dropout.

    The masks depend on the record and the draw, which is the batch's "epoch"; rows whose "valid" is 0 have weight 0.
    `metrics` is `Task.metrics`; `with_breakdown` adds "breakdown", see `breakdown.sums`.
    """

    def eval_step(params: Params, batch: Batch) -> dict[str, Any]:
        columns = (batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch"))
        masked = masking(make_key(MASK_SEED), *columns)
        logits, intermediates = module.forward(
            params, masked.ids_BxL, masked.attention_BxL, masked.positions_BxK
        )
        weights_BxK = masked.weights_BxK * batch["valid"][:, None]
        scores = prediction_scores(logits, masked.labels_BxK, weights_BxK, masking.vocab_size)
        means: dict[str, Any] = sum_rows(scores).metrics()
        if metrics is not None:
            extra = metrics(logits, masked, intermediates)
            means |= jax.tree.map(lambda x_B: x_B * batch["valid"], extra)
        if with_breakdown:
            segments_BxL, _ = segment_and_position_ids(
                batch["input_ids"], batch["attention_mask"], 0, module.compute.cls_id
            )
            means["breakdown"] = breakdown.sums(scores, batch["input_ids"], segments_BxL, masked)
        return means

    return jit_eval_step(eval_step, mesh, param_shardings)


def jit_eval_step(step: EvalStep, mesh: Mesh, param_shardings: Params) -> EvalStep:
    """Returns the jitted step; its results are on every host."""
    shardings = (param_shardings, NamedSharding(mesh, BATCH))
    return jax.jit(in_32_bits(step), in_shardings=shardings, out_shardings=NamedSharding(mesh, P()))


def score(
    eval_step: EvalStep,
    params: Any,
    batches: Batches,
    *,
    mesh: Mesh,
    rows: int,
    tokens_per_byte: float | None,
    draws: int = 1,
    count: int | None = None,  # of the batches, for the progress bar
) -> dict[str, Any]:
    """Returns the scores of a split over its masked positions; sums are taken in float64, in the order of the records.

    Loss and accuracy are means over the mask draws. The standard errors of the loss are `loss_se_draws`, with several
    draws, and `loss_se_records`, by the delta method for a ratio of sums, clustered by row. `tokens_per_byte` (of UTF-8
    text) gives bits per byte, which are comparable across tokenizers.

    `eval_step` is from `make_eval_step`; `rows` are those of a batch over all hosts. Other metrics are means over the
    mask draws, too. With a breakdown, each of `breakdown.TABLES` is {line: scores}, over all draws together, without
    empty lines.
    """
    # Evaluation has no epochs: this column numbers the mask draws.
    drawn = (
        batch | {"epoch": np.full_like(batch["epoch"], number)} if number else batch
        for batch in batches
        for number in range(draws)
    )
    total = count and count * draws
    row_means = per_row(eval_step, params, drawn, mesh=mesh, rows=rows, total=total)
    tables = _tables(row_means.pop("breakdown")) if "breakdown" in row_means else {}

    def by_draw(column: np.ndarray) -> np.ndarray:
        return np.moveaxis(column.reshape(-1, draws, rows), 1, 0).reshape(draws, -1)

    loss_DxN, weight_DxN = map(by_draw, row_means["loss"])
    weight_D = np.sum(weight_DxN, axis=1, dtype=np.float64)
    predictions = int(weight_D.sum())
    if not weight_D.all():
        return _scores(math.nan, math.nan, predictions, tokens_per_byte)
    means = {}
    for name, columns in row_means.items():
        sum_D, total_D = (np.sum(by_draw(x), axis=1, dtype=np.float64) for x in columns)
        if total_D.all():
            means[name] = sum_D / total_D
    loss_D = means.pop("loss")
    accuracy = float(means.pop("accuracy").mean())
    scores = _scores(float(loss_D.mean()), accuracy, predictions, tokens_per_byte)
    if draws > 1:
        scores["loss_se_draws"] = float(loss_D.std(ddof=1)) / math.sqrt(draws)
    records = np.count_nonzero(weight_DxN.any(axis=0))
    if records > 1:  # each record's influence on the mean loss; their sum is 0
        influence_N = np.mean((loss_DxN - loss_D[:, None] * weight_DxN) / weight_D[:, None], axis=0)
        scores["loss_se_records"] = math.sqrt(
            records / (records - 1) * float(np.sum(influence_N**2))
        )
    return scores | {name: float(mean_D.mean()) for name, mean_D in means.items()} | tables


def _tables(sums_Nx2xTxC: np.ndarray) -> dict[str, dict[str, dict[str, float]]]:
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for table, lines_TxC in zip(
        breakdown.TABLES, np.sum(sums_Nx2xTxC, axis=0, dtype=np.float64), strict=True
    ):
        lines = zip(breakdown.names(table, len(lines_TxC)), lines_TxC.tolist(), strict=True)
        tables[table] = {
            n: _scores(loss / w, correct / w, int(w), None) for n, (loss, w, correct) in lines if w
        }
    return tables


def mean(
    shares: Sequence[float],
    scores: Sequence[dict[str, float]],
    tokens_per_byte: Sequence[float | None],
) -> dict[str, float]:
    """Returns the mean scores of a mixture, given its folders' shares of the tokens; of one folder, its own scores."""
    if len(scores) == 1:
        return scores[0]
    total = math.fsum(shares)

    def weighted(values: Iterable[float]) -> float:
        return math.fsum(map(operator.mul, shares, values)) / total

    names = [name for name in scores[0] if all(name in folder for folder in scores)]
    means = {
        name: weighted(folder[name] for folder in scores) for name in names if name not in DERIVED
    }
    predictions = sum(folder["predictions"] for folder in scores)
    ratio = None
    if None not in tokens_per_byte:
        ratio = 1 / weighted(1 / ratio for ratio in tokens_per_byte)
    joined = _scores(means["loss"], means["accuracy"], predictions, ratio) | means
    # the errors of several folders are independent
    for key in ("loss_se_draws", "loss_se_records"):
        if key in names:
            errors = map(operator.mul, shares, (folder[key] for folder in scores))
            joined[key] = math.hypot(*errors) / total
    return joined


def _scores(
    loss: float, accuracy: float, predictions: int, tokens_per_byte: float | None
) -> dict[str, float]:
    scores = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "accuracy": accuracy,
        "predictions": predictions,
    }
    if tokens_per_byte is not None:
        scores["bits_per_byte"] = loss / math.log(2) * tokens_per_byte
    return scores


def per_row(
    eval_step: EvalStep,
    params: Any,
    batches: Batches,
    *,
    mesh: Mesh,
    rows: int,
    total: int | None = None,
) -> Any:
    """Returns what `eval_step` gives for each row, in the order of the batches' rows; arguments as in `score`."""
    results: list[Any] = []
    bar = tqdm(
        batches,
        desc="evaluation",
        total=total,
        unit=" batches",
        leave=False,
        dynamic_ncols=True,
        disable=not (cluster.is_primary() and can_draw(sys.stderr)),
    )
    for batch in cluster.with_progress(bar):
        batch = put_batch(batch, mesh, rows)
        distributed.compile_together(eval_step, params, batch)
        results.append(eval_step(params, batch))
        jax.block_until_ready(results[-3:-2])  # run at most a few batches ahead
    order = np.argsort(logical_rows(mesh, rows))
    return jax.tree.map(
        lambda *parts: np.concatenate([part[order] for part in parts]), *jax.device_get(results)
    )
