"""Masked spans of rows, scored: pseudo-perplexity, minimal pairs and `compare` are sums of these.

Dimensions: P spans, B of them in a batch, L tokens in a row, K predictions in it.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mlm.errors import DamageError
from mlm.inference.forward import pad
from mlm.model.loss import Mean, masked_cross_entropy
from mlm.model.module import Model, Params
from mlm.pretrained.load import Pretrained
from mlm.training import evaluation, sharding
from mlm.training.task import Batch

Rows = Sequence[Sequence[int]]  # of ids
Spans = tuple[np.ndarray, np.ndarray, np.ndarray]  # of each: its row, [first, stop) of its tokens


def score(
    module: Model,
    params: Params,
    mesh: Mesh,
    model: Pretrained,
    rows: Rows,
    spans_P: Spans,
    *,
    mask_id: int,
    batch: int,
    multiple: int,
    first_alone: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns minus the log probability of each span, in nats, float64, and whether its tokens have the largest logits.

    All tokens of a span are masked, and all are predicted, or the `first_alone`; the others of its
    row are seen. Rows are padded to a `multiple` of tokens, and predictions to a power of 4, so that
    few programs are compiled. What is not finite is a DamageError.

    Args:
      module, params: of the `model`, on the mesh, with a padded vocabulary.
    """
    row_P, first_P, stop_P = spans_P
    size_P = np.where(first_alone, 1, np.maximum(stop_P - first_P, 1))
    room_P = 4 ** np.ceil(np.log2(size_P) / 2).astype(int)
    length_P = np.array([len(rows[row]) for row in row_P])
    order_P = np.lexsort((length_P, room_P))
    batches = np.split(order_P, range(batch, len(order_P), batch))
    host_rows = slice(*sharding.local_rows(mesh, batch))

    def read(span_B: np.ndarray) -> Batch:
        """Returns this host's rows of a batch; what is missing of the last one are rows whose "valid" is 0."""
        place_B = np.arange(batch)
        row_B, first_B, stop_B = (
            x_P[span_B[np.minimum(place_B, len(span_B) - 1)]] for x_P in spans_P
        )
        ids_BxL, attention_BxL = pad([rows[row] for row in row_B], model, multiple)
        columns = {
            "input_ids": ids_BxL,
            "attention_mask": attention_BxL,
            "first": first_B.astype(np.int32),
            "stop": stop_B.astype(np.int32),
            "valid": (place_B < len(span_B)).astype(np.float32),
        }
        return {name: column[host_rows] for name, column in columns.items()}

    nats_P = np.empty(len(row_P))
    is_right_P = np.empty(len(row_P), bool)
    # float32 products on a TPU or GPU too
    precision = "highest" if jnp.dtype(module.dtype) == jnp.float32 else None
    for room, group in itertools.groupby(batches, lambda span_B: int(room_P[span_B].max())):
        chosen = list(group)
        step = _make_step(module, room, mask_id, model.config.vocab_size)
        jitted = evaluation.jit_eval_step(step, mesh, sharding.shardings_of(params))
        with jax.default_matmul_precision(precision):
            means = evaluation.per_row(
                jitted, params, map(read, chosen), mesh=mesh, rows=batch, total=len(chosen)
            )
        span_P = np.concatenate(chosen)
        loss, accuracy = (means[name] for name in ("loss", "accuracy"))
        nats_P[span_P] = loss.sum[: len(span_P)]
        is_right_P[span_P] = (accuracy.sum == accuracy.weight)[: len(span_P)]
    if not np.isfinite(nats_P).all():
        raise DamageError(
            f"{model.source}: gives probabilities that are not finite; take a good copy of its weights."
        )
    return nats_P, is_right_P


def _make_step(module: Model, room: int, mask_id: int, vocab_size: int) -> evaluation.EvalStep:
    """Returns the step: each row's tokens from "first" to "stop" are masked, and the first `room` of them predicted."""

    def step(params: Params, batch: Batch) -> dict[str, Mean]:
        ids_BxL = batch["input_ids"]
        stop_Bx1 = batch["stop"][:, None]
        positions_BxK = batch["first"][:, None] + jnp.arange(room, dtype=jnp.int32)
        place_L = jnp.arange(ids_BxL.shape[1], dtype=jnp.int32)
        hidden_BxL = (place_L >= positions_BxK[:, :1]) & (place_L < stop_Bx1)
        masked_BxL = jnp.where(hidden_BxL, mask_id, ids_BxL)
        weights_BxK = batch["valid"][:, None] * (positions_BxK < stop_Bx1)
        positions_BxK = jnp.minimum(positions_BxK, len(place_L) - 1)
        labels_BxK = jnp.take_along_axis(ids_BxL, positions_BxK, axis=1)
        logits_BxKxV = module.logits(params, masked_BxL, batch["attention_mask"], positions_BxK)
        return masked_cross_entropy(logits_BxKxV, labels_BxK, weights_BxK, vocab_size).metrics()

    return step
