"""A loaded model on devices: for rows of ids, or its parameters on the mesh of a run.

Dimensions: B rows, L tokens in a row, K positions in a row, V vocabulary entries, C classes.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm.model.keys import in_32_bits
from mlm.pretrained.load import Pretrained
from mlm.training import sharding

# To compile few programs, a batch has a power of two of rows, at most ROWS, padded to a multiple of
# LENGTHS tokens.
ROWS = 8
LENGTHS = 32


def make_forward(
    model: Pretrained, activation: Callable[[jax.Array], jax.Array] = lambda logits: logits
) -> Callable[..., list[np.ndarray]]:
    """Puts a model on the first device; returns a function of rows of ids, and of positions in them if it fills masks.

    It gives the `activation` of the float32 logits of each row: [K, V] at its positions; of a
    classifier [C], or of token labels [L, C].
    """
    module = model.module
    params = jax.device_put(model.params)
    compute = jax.jit(in_32_bits(lambda *columns: activation(module.logits(*columns))))

    def forward(
        rows: Sequence[list[int]], positions: Sequence[list[int]] | None = None
    ) -> list[np.ndarray]:
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(rows):
            by_length.setdefault(-(-len(ids) // LENGTHS), []).append(index)
        batches = [
            group[i : i + ROWS] for group in by_length.values() for i in range(0, len(group), ROWS)
        ]
        outputs = [np.empty(0)] * len(rows)
        tokens = rows if positions is None else positions
        for chosen in batches:
            # copies, whose outputs go unread
            batch = chosen + chosen[:1] * (_power_of_two(len(chosen)) - len(chosen))
            columns = pad([rows[index] for index in batch], model, LENGTHS)
            if positions is not None:
                count = _power_of_two(max(len(positions[index]) for index in batch))
                columns += (
                    np.array([np.resize(positions[index], count) for index in batch], np.int32),
                )
            with jax.default_matmul_precision("highest"):  # float32 products on a TPU or GPU too
                computed = jax.device_get(compute(params, *columns))
            for index, output in zip(chosen, computed, strict=False):
                outputs[index] = output if output.ndim == 1 else output[: len(tokens[index])]
        return outputs

    return forward


def pad(rows: Sequence[list[int]], model: Pretrained, multiple: int) -> tuple[np.ndarray, ...]:
    """Returns ids_BxL and attention_BxL, int32, of a multiple of tokens, or of as many as the model can read."""
    length = min(-(-max(map(len, rows)) // multiple) * multiple, model.longest_row)
    pad_id = model.config.pad_token_id
    ids_BxL = np.array([ids + [pad_id] * (length - len(ids)) for ids in rows], np.int32)
    attention_BxL = np.arange(length) < np.array([len(ids) for ids in rows])[:, None]
    return ids_BxL, attention_BxL.astype(np.int32)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def put_on_devices(config: ConfigDict, model: Pretrained) -> tuple[Mesh, Pretrained]:
    """Returns the mesh, and the model with its vocabulary padded and its parameters there."""
    mesh = sharding.mesh_of(config.mesh)
    sharding.check_batch(mesh, rows=config.evaluate.batch, key="evaluate.batch")
    padded = model.padded()
    rules = padded.module.partition_rules()
    shardings = sharding.tree_shardings(padded.params, mesh, padded.params, rules)
    params = sharding.put_tree(padded.params, shardings)
    return mesh, dataclasses.replace(padded, params=params)
