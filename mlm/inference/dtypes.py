"""How far bfloat16 is from float32: the same parameters, rows and masks in both.

Dimensions: B rows, K predictions in a row, V entries of the padded vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm.data import batches
from mlm.data.manifest import Manifest
from mlm.model.loss import mask_padding, prediction_scores, sum_rows
from mlm.model.masking import TokenMasking
from mlm.model.module import Model, Params
from mlm.training import evaluation, sharding
from mlm.training.task import Batch

DTYPES = ("float32", "bfloat16")


def compare(
    config: ConfigDict,
    manifest: Manifest,
    params: Params,
    modules: Sequence[Model],
    masking: TokenMasking,
    *,
    split: str,
    mesh: Mesh,
    batch_count: int | None = None,
) -> dict[str, Any]:
    """Returns loss and accuracy of `modules`, one for each of DTYPES, under one draw of masks, and their differences.

    Only `batch_count` batches of evaluate.batch rows are read if it is given.
    """
    rows, step = (
        config.evaluate.batch,
        _make_step(modules, masking, config.evaluate.seed, mesh, sharding.shardings_of(params)),
    )
    read = batches.eval_batches(manifest, split=split, batch=rows, rows=sharding.local_rows(mesh, rows))
    columns = evaluation.per_row(step, params, itertools.islice(read, batch_count), mesh=mesh, rows=rows)
    weight_N, *sums = (column.astype(np.float64) for column in columns)
    losses, corrects, (same_N, apart_N) = sums[:2], sums[2:4], sums[4:]
    count = max(float(weight_N.sum()), 1.0)
    scores = {
        dtype: {"loss": float(loss_N.sum()) / count, "accuracy": float(correct_N.sum()) / count}
        for dtype, loss_N, correct_N in zip(DTYPES, losses, corrects, strict=True)
    }
    first, second = (scores[dtype] for dtype in DTYPES)
    return {
        "rows": int(np.count_nonzero(weight_N)),
        "predictions": int(weight_N.sum()),
        **scores,
        "loss_difference": second["loss"] - first["loss"],
        "accuracy_difference": second["accuracy"] - first["accuracy"],
        "same_prediction": float(same_N.sum()) / count,
        "largest_loss_difference": float(np.max(np.abs(losses[1] - losses[0]) / np.maximum(weight_N, 1), initial=0)),
        "largest_logit_difference": float(np.max(apart_N, initial=0)),
    }


def _make_step(
    modules: Sequence[Model], masking: TokenMasking, mask_seed: int, mesh: Mesh, param_shardings: Params
) -> Callable:
    """Returns the jitted `(params, batch)` -> weight, losses, correct, same prediction, largest difference; [B]."""

    def step(params: Params, batch: Batch) -> tuple[jax.Array, ...]:
        names, size = ("input_ids", "attention_mask", "record_id", "epoch"), masking.vocab_size
        masked = masking(jax.random.key(mask_seed), *(batch[name] for name in names))
        weights_BxK = masked.weights_BxK * batch["valid"][:, None]
        sums, logits, top = [], [], []
        for module in modules:
            logits_BxKxV = module.logits(params, masked.ids_BxL, batch["attention_mask"], masked.positions_BxK)
            sums.append(sum_rows(prediction_scores(logits_BxKxV, masked.labels_BxK, weights_BxK, size)))
            logits.append(logits_BxKxV.astype(jnp.float32))
            top.append(jnp.argmax(mask_padding(logits[-1], size), axis=-1))
        same_B = jnp.sum((top[0] == top[1]) * weights_BxK, axis=-1)
        apart_BxKxV = jnp.abs(logits[0] - logits[1])[..., :size] * weights_BxK[..., None]
        losses, corrects = zip(*((rows.loss_B, rows.correct_B) for rows in sums), strict=True)
        return sums[0].weight_B, *losses, *corrects, same_B, jnp.max(apart_BxKxV, axis=(1, 2))

    return evaluation.jit_eval_step(step, mesh, param_shardings)


def summary(comparison: dict[str, Any]) -> str:
    """Returns the result of `compare` as a sentence."""
    first, second = (comparison[dtype] for dtype in DTYPES)
    return (
        f"{' and '.join(DTYPES)} on the same {comparison['rows']:,} rows and masks: loss {first['loss']:.4f} and "
        f"{second['loss']:.4f} nats, accuracy {first['accuracy']:.2%} and {second['accuracy']:.2%}; "
        f"{comparison['same_prediction']:.2%} of {comparison['predictions']:,} predictions are the same, the loss of "
        f"a row differs by at most {comparison['largest_loss_difference']:.4f} nats, a logit by "
        f"{comparison['largest_logit_difference']:.3f}"
    )
