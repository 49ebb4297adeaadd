"""transformers' own Flax modules, unmodified, called as `Model` is: the reference for ours, and slower.

The head runs on every position, attention is flax's, and dropout depends on the mesh: within a device's rows it is
drawn from the number of the first one.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from mlm.model.module import Model, Params, position_ids, take_tokens
from mlm.model.partition_rules import PartitionRules


class TransformersModel(Model):
    """A masked language model by `flax_class`, transformers' module for the architecture that `ours` computes."""

    flax_class: type[nn.Module] | None = None
    ours: Model | None = None

    def setup(self) -> None:
        self.stock = self.flax_class(
            self.config,
            dtype=jnp.dtype(self.dtype),
            gradient_checkpointing=self.gradient_checkpointing,
        )
        nn.share_scope(self, self.stock)  # its parameters have no prefix

    def states_and_logits(
        self,
        ids_BxL: Array,
        attention_BxL: Array,
        *,
        predicted_BxK: Array | None = None,
        has_dropout: bool = False,
        rows_B: Array | None = None,
    ) -> tuple[list[Array], Array]:
        """Returns no states, and the logits of `predicted_BxK`; see `Model.states_and_logits`."""
        output = self.stock(
            ids_BxL,
            attention_BxL,
            token_type_ids=jnp.zeros_like(ids_BxL),
            position_ids=position_ids(attention_BxL, self.ours.first_position),
            head_mask=None,
            deterministic=not has_dropout,
        )
        return [], take_tokens(predicted_BxK, output.logits)

    @nn.nowrap
    def forward(
        self,
        params: Params,
        ids_BxL: Array,
        attention_BxL: Array,
        predicted_BxK: Array | None = None,
        dropout_key: Array | None = None,
        rows_B: Array | None = None,
    ) -> tuple[Array, dict[str, Any]]:
        """As `Model.forward`, with other dropout for rows of another device."""
        if dropout_key is not None and rows_B is not None:
            dropout_key = jax.random.fold_in(dropout_key, rows_B[0])
        return super().forward(params, ids_BxL, attention_BxL, predicted_BxK, dropout_key)

    @nn.nowrap
    def partition_rules(self) -> PartitionRules:
        return self.ours.partition_rules()
