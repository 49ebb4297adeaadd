"""Pseudo-perplexity (Salazar et al., 2020, Masked Language Model Scoring): each ordinary token masked in turn.

Dimensions: B copies of rows in a batch, L tokens in a row, K predictions in it, N rows, P ordinary
tokens in them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm.data import batches
from mlm.data.manifest import Manifest
from mlm.errors import DamageError, InputError
from mlm.inference.forward import put_on_devices
from mlm.model.loss import Mean, masked_cross_entropy
from mlm.model.module import Model, Params
from mlm.pretrained.load import Pretrained
from mlm.training import evaluation, sharding
from mlm.training.task import Batch


def score_split(
    config: ConfigDict,
    manifest: Manifest,
    params: Params,
    *,
    split: str,
    count: int,
    module: Model,
    mesh: Mesh,
) -> dict[str, float]:
    """Returns the scores of `count` rows spread evenly over a split, see `score`."""
    rows = config.evaluate.batch
    # every host needs all of them
    read = batches.eval_batches(manifest, split=split, batch=rows, rows=(0, rows))
    ids_NxL, attention_NxL = sample(read, count=count, records=manifest.splits[split].records)
    step = make_step(
        module,
        manifest.special_ids["mask"],
        manifest.vocab_size,
        mesh,
        sharding.shardings_of(params),
    )
    return score(
        step,
        params,
        ids_NxL,
        attention_NxL,
        special_ids=manifest.all_special_ids,
        mesh=mesh,
        batch=rows,
    )


def score(
    step: Callable[[Params, Batch], dict[str, Mean]],
    params: Params,
    ids_NxL: np.ndarray,
    attention_NxL: np.ndarray,
    *,
    special_ids: tuple[int, ...],
    mesh: Mesh,
    batch: int,
) -> dict[str, float]:
    """Returns pseudo_perplexity, pseudo_loss (nats per token), pseudo_accuracy, pseudo_tokens, pseudo_rows (counts)."""
    row_P, position_P = np.nonzero((attention_NxL > 0) & ~np.isin(ids_NxL, special_ids))
    if not len(row_P):
        raise InputError(
            "--pseudo: the rows of the sample hold special tokens alone; check the shards."
        )
    copies = batches_of_copies(
        (ids_NxL, attention_NxL), row_P, position_P, position_P + 1, mesh=mesh, batch=batch
    )
    scores = evaluation.score(step, params, copies, mesh=mesh, rows=batch, tokens_per_byte=None)
    names = {
        "perplexity": "perplexity",
        "loss": "loss",
        "accuracy": "accuracy",
        "predictions": "tokens",
    }
    return {f"pseudo_{new}": scores[old] for old, new in names.items()} | {
        "pseudo_rows": len(ids_NxL)
    }


def make_step(
    module: Model,
    mask_id: int,
    vocab_size: int,
    mesh: Mesh,
    param_shardings: Params,
    predictions: int = 1,
) -> Callable[[Params, Batch], dict[str, Mean]]:
    """Returns the jitted step: each row's tokens from "position" to "stop" are masked, the first of them predicted."""

    def step(params: Params, batch: Batch) -> dict[str, Mean]:
        ids_BxL = batch["input_ids"]
        stop_Bx1 = batch["stop"][:, None]
        positions_BxK = batch["position"][:, None] + jnp.arange(predictions, dtype=jnp.int32)
        place_L = jnp.arange(ids_BxL.shape[1], dtype=jnp.int32)
        hidden_BxL = (place_L >= positions_BxK[:, :1]) & (place_L < stop_Bx1)
        masked_BxL = jnp.where(hidden_BxL, mask_id, ids_BxL)
        weights_BxK = batch["valid"][:, None] * (positions_BxK < stop_Bx1)
        positions_BxK = jnp.minimum(positions_BxK, len(place_L) - 1)
        labels_BxK = jnp.take_along_axis(ids_BxL, positions_BxK, axis=1)
        logits_BxKxV = module.logits(params, masked_BxL, batch["attention_mask"], positions_BxK)
        return masked_cross_entropy(logits_BxKxV, labels_BxK, weights_BxK, vocab_size).metrics()

    return evaluation.jit_eval_step(step, mesh, param_shardings)


def batches_of_copies(
    rows_NxL: tuple[np.ndarray, ...],
    row_P: np.ndarray,
    position_P: np.ndarray,
    stop_P: np.ndarray,
    *,
    mesh: Mesh,
    batch: int,
) -> Iterator[Batch]:
    """Yields this host's rows of batches for `make_step`, one for each copy of a row of (ids, attention mask).

    The last batch is padded with "valid" 0.
    """
    ids_NxL, attention_NxL = rows_NxL
    for start in range(0, len(row_P), batch):
        place_B = start + np.arange(*sharding.local_rows(mesh, batch))
        index_B = np.minimum(place_B, len(row_P) - 1)
        yield {
            "input_ids": ids_NxL[row_P[index_B]],
            "attention_mask": attention_NxL[row_P[index_B]],
            "position": position_P[index_B].astype(np.int32),
            "stop": stop_P[index_B].astype(np.int32),
            "valid": (place_B < len(row_P)).astype(np.float32),
        }


def make_scorer(
    config: ConfigDict, model: Pretrained, mask_id: int
) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Puts a model on the devices; returns a function of padded rows and columns of copies, as `make_step` takes them.

    It gives minus the log probability of all that each copy predicts, in nats, and whether its
    logits are the largest; raises DamageError where they are not finite.
    """
    mesh, padded, shardings, params = put_on_devices(config, model)
    rows = config.evaluate.batch
    vocab_size = model.config.vocab_size
    step_of = functools.cache(
        functools.partial(make_step, padded.module, mask_id, vocab_size, mesh, shardings)
    )

    def score_copies(
        rows_NxL: tuple[np.ndarray, ...], *copies_P: np.ndarray, predictions: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        copies = batches_of_copies(rows_NxL, *copies_P, mesh=mesh, batch=rows)
        with jax.default_matmul_precision("highest"):  # float32 products on a TPU or GPU too
            means = evaluation.per_row(step_of(predictions), params, copies, mesh=mesh, rows=rows)
        nats_P = means["loss"].sum
        is_exact_P = means["accuracy"].sum == means["accuracy"].weight
        if not np.isfinite(nats_P).all():
            raise DamageError(
                f"{model.source}: gives probabilities that are not finite; take a good copy of its weights."
            )
        return nats_P[: len(copies_P[0])].astype(np.float64), is_exact_P[: len(copies_P[0])]

    return score_copies


def sample(batches: Iterable[Batch], *, count: int, records: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids_NxL, attention_NxL) of `count` of a split's `records`, evenly spread; all if there are fewer."""
    count = min(count, records)
    middles = (2 * np.arange(count) + 1) * records // (2 * count)  # of `count` stretches of records
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in batches:
        chosen = np.isin(batch["record_id"], middles) & (batch["valid"] > 0)
        rows.append((batch["input_ids"][chosen], batch["attention_mask"][chosen]))
    ids_NxL, attention_NxL = (np.concatenate(column) for column in zip(*rows, strict=True))
    return ids_NxL, attention_NxL
