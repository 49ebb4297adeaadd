"""How far bfloat16 is from float32: the same parameters, rows and masks in both.

Dimensions: B rows, K predictions in a row, V entries of the padded vocabulary, N rows of the split.
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
from mlm.model.keys import make_key
from mlm.model.loss import mask_padding, masked_cross_entropy
from mlm.model.module import Model, Params
from mlm.model.token_masking import TokenMasking
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
    rows = config.evaluate.batch
    step = _make_step(modules, masking, evaluation.MASK_SEED, mesh, sharding.shardings_of(params))
    read = batches.eval_batches(
        manifest, split=split, batch=rows, rows=sharding.local_rows(mesh, rows)
    )
    scores = evaluation.per_row(
        step, params, itertools.islice(read, batch_count), mesh=mesh, rows=rows
    )
    scores = jax.tree.map(lambda column_N: column_N.astype(np.float64), scores)
    first, second = (scores[dtype] for dtype in DTYPES)
    predictions = int(first.weight_B.sum())
    by_dtype = {
        dtype: {
            "loss": scores[dtype].loss_B.sum() / max(predictions, 1),
            "accuracy": scores[dtype].correct_B.sum() / max(predictions, 1),
        }
        for dtype in DTYPES
    }
    difference_N = np.abs(second.loss_B - first.loss_B) / np.maximum(first.weight_B, 1)
    return {
        "rows": int(np.count_nonzero(first.weight_B)),
        "predictions": predictions,
        **by_dtype,
        "loss_difference": by_dtype["bfloat16"]["loss"] - by_dtype["float32"]["loss"],
        "accuracy_difference": by_dtype["bfloat16"]["accuracy"] - by_dtype["float32"]["accuracy"],
        "same_prediction": scores["same"].sum() / max(predictions, 1),
        "largest_loss_difference": float(np.max(difference_N, initial=0)),
        "largest_logit_difference": float(np.max(scores["apart"], initial=0)),
    }


def _make_step(
    modules: Sequence[Model],
    masking: TokenMasking,
    mask_seed: int,
    mesh: Mesh,
    param_shardings: Params,
) -> Callable[[Params, Batch], dict[str, Any]]:
    """Returns {dtype: RowSums, "same": predictions of a row that are equal, "apart": its largest logit difference}."""

    def step(params: Params, batch: Batch) -> dict[str, Any]:
        columns = (batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch"))
        masked = masking(make_key(mask_seed), *columns)
        size = masking.vocab_size
        weights_BxK = masked.weights_BxK * batch["valid"][:, None]
        logits = [
            module.logits(params, masked.ids_BxL, batch["attention_mask"], masked.positions_BxK)
            for module in modules
        ]
        sums = [
            masked_cross_entropy(x_BxKxV, masked.labels_BxK, weights_BxK, size)
            for x_BxKxV in logits
        ]
        first, second = (x_BxKxV.astype(jnp.float32) for x_BxKxV in logits)
        same_BxK = jnp.argmax(mask_padding(first, size), axis=-1) == jnp.argmax(
            mask_padding(second, size), axis=-1
        )
        apart_BxKxV = jnp.abs(first - second)[..., :size] * weights_BxK[..., None]
        differences = {
            "same": jnp.sum(same_BxK * weights_BxK, axis=-1),
            "apart": jnp.max(apart_BxKxV, axis=(1, 2)),
        }
        return dict(zip(DTYPES, sums, strict=True)) | differences

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
