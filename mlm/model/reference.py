"""transformers' own Flax modules, unmodified, called as `Model` is: the reference for ours, and slower.

The head runs on every position, attention is flax's, and dropout depends on the mesh: within a device's rows it is
drawn from the number of the first one.
"""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import transformers
from jax import Array

from mlm.errors import InputError
from mlm.model.base import Params
from mlm.model.module import Model, position_ids, take_tokens
from mlm.model.partition_rules import REPLICATED, PartitionRules


class TransformersModel(Model):
    """A masked language model by transformers' FlaxXForMaskedLM, whose X is `flax_name`."""

    flax_name: str = ""
    first_position: int = 0
    rules: PartitionRules = REPLICATED

    def setup(self) -> None:
        module_class = getattr(transformers, f"Flax{self.flax_name}ForMaskedLM").module_class
        make = functools.partial(module_class, self.config, dtype=jnp.dtype(self.dtype))
        if self.gradient_checkpointing:
            if not hasattr(module_class, "gradient_checkpointing"):
                what = f"transformers' {module_class.__name__} recomputes no layers"
                raise InputError(f"config.model.remat = true: {what}; set it to false.")
            make = functools.partial(make, gradient_checkpointing=True)
        self.stock = make()
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
        inputs = {
            "input_ids": ids_BxL,
            "attention_mask": attention_BxL,
            "token_type_ids": jnp.zeros_like(ids_BxL),
            "position_ids": position_ids(attention_BxL, self.first_position),
            "head_mask": None,
        }
        names = inspect.signature(type(self.stock).__call__).parameters
        inputs = {name: value for name, value in inputs.items() if name in names}
        return [], take_tokens(predicted_BxK, self.stock(**inputs, deterministic=not has_dropout).logits)

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
    def with_attention(self, make: Callable[[int, int], Callable], lengths: Collection[int]) -> Self:
        """Returns the model as it is: it has its own attention."""
        return self

    @nn.nowrap
    def partition_rules(self) -> PartitionRules:
        return self.rules
