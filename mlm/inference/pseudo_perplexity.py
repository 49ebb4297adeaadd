"""Pseudo-perplexity (Salazar et al., 2020, Masked Language Model Scoring): each ordinary token masked in turn.

Dimensions: L tokens in a row, N rows, P ordinary tokens in them.
"""

import math
from collections.abc import Iterable

import numpy as np
from jax.sharding import Mesh

from mlm.data import batches
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.errors import InputError
from mlm.inference import spans
from mlm.model.module import Model, Params
from mlm.pretrained.load import Pretrained
from mlm.training.task import Batch


def score_split(
    module: Model,
    params: Params,
    mesh: Mesh,
    model: Pretrained,
    manifest: Manifest,
    *,
    split: str,
    count: int,
    batch: int,
) -> dict[str, float]:
    """Returns the scores of `count` rows spread evenly over a split, see `score`."""
    # every host needs all of them
    read = batches.eval_batches(manifest, split=split, batch=batch, rows=(0, batch))
    rows = sample(read, count=count, records=manifest.splits[split].records)
    return score(module, params, mesh, model, rows, manifest, batch=batch)


def score(
    module: Model,
    params: Params,
    mesh: Mesh,
    model: Pretrained,
    rows: list[list[int]],
    data: Manifest | DatasetInfo,
    *,
    batch: int,
) -> dict[str, float]:
    """Returns pseudo_perplexity, pseudo_loss (nats per token), pseudo_accuracy, pseudo_tokens, pseudo_rows (counts).

    Arguments are as for `spans.score`; the rows are of the `data`.
    """
    special = data.all_special_ids
    places = [
        (row, place)
        for row, ids in enumerate(rows)
        for place in np.flatnonzero(~np.isin(ids, special))
    ]
    if not places:
        raise InputError(
            "--pseudo: the rows of the sample hold special tokens alone; check the shards."
        )
    row_P, place_P = np.array(places).T
    nats_P, is_right_P = spans.score(
        module,
        params,
        mesh,
        model,
        rows,
        (row_P, place_P, place_P + 1),
        mask_id=data.special_ids["mask"],
        batch=batch,
        multiple=data.length,
    )
    loss = float(nats_P.mean())
    return {
        "pseudo_perplexity": math.exp(min(loss, 700.0)),
        "pseudo_loss": loss,
        "pseudo_accuracy": float(is_right_P.mean()),
        "pseudo_tokens": len(places),
        "pseudo_rows": len(rows),
    }


def sample(batches: Iterable[Batch], *, count: int, records: int) -> list[list[int]]:
    """Returns the ids of `count` of a split's `records`, evenly spread; of all if there are fewer."""
    count = min(count, records)
    middles = (2 * np.arange(count) + 1) * records // (2 * count)  # of `count` stretches of records
    rows = []
    for batch in batches:
        chosen = np.isin(batch["record_id"], middles) & (batch["valid"] > 0)
        columns = (batch[name][chosen] for name in ("input_ids", "attention_mask"))
        rows += [
            ids_L[attention_L > 0].tolist() for ids_L, attention_L in zip(*columns, strict=True)
        ]
    return rows
