"""Pseudo-perplexity (Salazar et al., 2020, Masked Language Model Scoring): each ordinary token masked in turn.

It is exp of minus the mean, over all ordinary tokens, of the log probability of a token given all others of its row.

Dimensions: B copies of rows in a batch, L tokens in a row, N rows, P ordinary tokens in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlm.errors import InputError
from mlm.model.loss import RowSums, masked_cross_entropy
from mlm.model.roberta import Network, Params
from mlm.training import evaluation, sharding

Batch = dict[str, Any]


def score(
    step: Callable[[Params, Batch], RowSums],
    params: Params,
    ids_NxL: np.ndarray,
    attention_NxL: np.ndarray,
    *,
    special_ids: tuple[int, ...],
    mesh: Mesh,
    batch: int,
) -> dict[str, float]:
    """Returns the scores of some rows, whatever the batch size and the devices.

    Args:
      step: of `make_step`.
      params: placed as the step has them.
      ids_NxL, attention_NxL: the rows, the same on every host.
      special_ids: tokens that are not scored.
      mesh: of the batch.
      batch: B, over all hosts.

    Returns:
      pseudo_perplexity, pseudo_loss (nats a token), pseudo_accuracy, pseudo_tokens and pseudo_rows (their numbers).

    Raises:
      InputError: the rows hold no ordinary token.
    """
    start, stop = sharding.local_rows(mesh, batch)
    copies = masked_copies(ids_NxL, attention_NxL, special_ids=special_ids, batch=batch)
    local = ({name: column[start:stop] for name, column in copy.items()} for copy in copies)
    found = evaluation.score(step, params, local, mesh=mesh, rows=batch, tokens_per_byte=None)
    names = {"perplexity": "perplexity", "loss": "loss", "accuracy": "accuracy", "predictions": "tokens"}
    return {f"pseudo_{new}": found[old] for old, new in names.items()} | {"pseudo_rows": len(ids_NxL)}


def make_step(
    *, network: Network, mask_id: int, vocab_size: int, mesh: Mesh, param_shardings: Params
) -> Callable[[Params, Batch], RowSums]:
    """Returns the jitted `(params, batch) -> RowSums`, on every host, without dropout.

    Of each row it masks the token at "position" and predicts it; a row whose "valid" is 0 counts nothing.
    """

    def step(params: Params, batch: Batch) -> RowSums:
        ids_BxL, position_Bx1 = batch["input_ids"], batch["position"][:, None]
        label_Bx1 = jnp.take_along_axis(ids_BxL, position_Bx1, axis=1)
        masked_BxL = jnp.where(jnp.arange(ids_BxL.shape[1]) == position_Bx1, mask_id, ids_BxL)
        logits_Bx1xV = network.masked_logits(params, masked_BxL, batch["attention_mask"], position_Bx1)
        return masked_cross_entropy(logits_Bx1xV, label_Bx1, batch["valid"][:, None], vocab_size)

    return jax.jit(
        step,
        in_shardings=(param_shardings, NamedSharding(mesh, sharding.BATCH)),
        out_shardings=NamedSharding(mesh, P()),
    )


def masked_copies(
    ids_NxL: np.ndarray, attention_NxL: np.ndarray, *, special_ids: tuple[int, ...], batch: int
) -> Iterator[Batch]:
    """Yields batches of B copies, one for each ordinary token: rows as they are, "position", "valid".

    The last batch is filled up with copies whose "valid" is 0.

    Raises:
      InputError: there is no ordinary token.
    """
    row_P, position_P = np.nonzero((attention_NxL > 0) & ~np.isin(ids_NxL, special_ids))
    if not len(row_P):
        raise InputError("--pseudo: the rows of the sample hold special tokens alone; look at the shards.")
    for start in range(0, len(row_P), batch):
        place_B = start + np.arange(batch)
        index_B = np.minimum(place_B, len(row_P) - 1)
        yield {
            "input_ids": ids_NxL[row_P[index_B]],
            "attention_mask": attention_NxL[row_P[index_B]],
            "position": position_P[index_B].astype(np.int32),
            "valid": (place_B < len(row_P)).astype(np.float32),
        }


def sample(batches: Iterable[Batch], *, count: int, records: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids_NxL, attention_NxL) of `count` records, evenly spread over a split; all if it has no more.

    Args:
      batches: of `eval_batches`, all rows of each.
      count: N.
      records: of the split.
    """
    count = min(count, records)
    wanted = (2 * np.arange(count) + 1) * records // (2 * count)  # the middle of each of `count` stretches
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in batches:
        chosen = np.isin(batch["record_id"], wanted) & (batch["valid"] > 0)
        rows.append((batch["input_ids"][chosen], batch["attention_mask"][chosen]))
    ids_NxL, attention_NxL = (np.concatenate(column) for column in zip(*rows, strict=True))
    return ids_NxL, attention_NxL
