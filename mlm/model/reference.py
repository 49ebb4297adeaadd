"""transformers' own Flax modules, unmodified, called as `Model` is: the reference for ours, and slower.

The head runs on every position, attention is flax's, and dropout depends on the mesh: within a device's rows it is
drawn from the number of the first one.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import transformers
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax import Array
from transformers import PretrainedConfig

from mlm.errors import InputError
from mlm.model import flops
from mlm.model.attention import Attention
from mlm.model.module import Compute, Params, position_ids, take_tokens
from mlm.model.partition_rules import PartitionRules


@dataclasses.dataclass(frozen=True)
class TransformersModel:
    """A masked language model by FlaxXForMaskedLM, whose name in transformers is `name`."""

    name: str
    config: PretrainedConfig
    dtype: str
    first_position: int  # of a document
    rules: PartitionRules
    recompute_layers: bool = False
    compute: ClassVar[Compute] = Compute()  # kernels and isolation are ours alone
    in_transformers: ClassVar[bool] = True

    @property
    def module(self) -> nn.Module:
        """The linen module."""
        module_class = getattr(transformers, f"Flax{self.name}ForMaskedLM").module_class
        module = module_class(self.config, dtype=jnp.dtype(self.dtype))
        if not self.recompute_layers:
            return module
        if not hasattr(module, "gradient_checkpointing"):
            what = f"transformers' {module_class.__name__} recomputes no layers"
            raise InputError(f"config.model.remat = true: {what}; set it to false.")
        return module.clone(gradient_checkpointing=True)

    def _inputs(self, ids_BxL: Array, attention_BxL: Array) -> dict[str, Any]:
        """Returns the inputs that the module takes, by name."""
        inputs = {
            "input_ids": ids_BxL,
            "attention_mask": attention_BxL,
            "token_type_ids": jnp.zeros_like(ids_BxL),
            "position_ids": position_ids(attention_BxL, self.first_position),
            "head_mask": None,
        }
        names = inspect.signature(type(self.module).__call__).parameters
        return {name: value for name, value in inputs.items() if name in names}

    def logits(self, *inputs: Any) -> Array:
        """Returns the logits alone; `inputs` are those of `forward`."""
        return self.forward(*inputs)[0]

    def forward(
        self,
        params: Params,
        ids_BxL: Array,
        attention_BxL: Array,
        predicted_BxK: Array | None = None,
        dropout_key: Array | None = None,
        rows_B: Array | None = None,
    ) -> tuple[Array, dict[str, Any]]:
        """Returns logits_BxKxV and no intermediates, as `Model.forward` does."""
        rngs = {}
        if dropout_key is not None:
            rngs["dropout"] = dropout_key if rows_B is None else jax.random.fold_in(dropout_key, rows_B[0])
        inputs = self._inputs(ids_BxL, attention_BxL)
        output = self.module.apply({"params": params}, **inputs, deterministic=dropout_key is None, rngs=rngs)
        return take_tokens(predicted_BxK, output.logits), {}

    def with_attention(self, make: Callable[[int], Attention]) -> Self:
        """Returns the model as it is: it has its own attention."""
        return self

    def partition_rules(self) -> PartitionRules:
        """Returns how the parameters are split over the mesh."""
        return self.rules

    def flops_per_token(self, params: Params, *, length: int, predicted_share: float, vocab_size: int) -> float:
        """Returns the useful FLOPs of a training step per token, as `Model.flops_per_token` does."""
        return flops.train_flops_per_token(
            {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()},
            hidden=self.config.hidden_size,
            keys=[length] * self.config.num_hidden_layers,
            predicted_share=predicted_share,
            vocab_size=vocab_size,
        )

    def init_params(self, key: Array) -> Params:
        """Returns float32 parameters as transformers draws them."""
        ids_1x1 = jnp.ones((1, 1), jnp.int32)
        return self.module.init({"params": jax.random.split(key)[0]}, **self._inputs(ids_1x1, ids_1x1))["params"]
