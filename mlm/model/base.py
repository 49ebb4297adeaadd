"""A model beside its way from tokens to logits: transformers' call, partition rules, initial parameters."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from transformers.modeling_flax_outputs import (
    FlaxMaskedLMOutput,
    FlaxSequenceClassifierOutput,
    FlaxTokenClassifierOutput,
)
from transformers.utils import ModelOutput

from mlm.model import layers
from mlm.model.keys import in_32_bits
from mlm.model.partition_rules import PartitionRules

Params = dict[str, Any]
MASKED_LM, SEQUENCES, TOKENS = "MaskedLM", "SequenceClassification", "TokenClassification"  # transformers' heads
COMPUTES = {MASKED_LM: {"tie_word_embeddings": (True,)}, SEQUENCES: {"classifier_pooling": ("cls",)}}
ACTIVATIONS = dict.fromkeys(("hidden_act", "hidden_activation", "classifier_activation"), tuple(layers.ACTIVATIONS))
OUTPUTS = {MASKED_LM: FlaxMaskedLMOutput, SEQUENCES: FlaxSequenceClassifierOutput, TOKENS: FlaxTokenClassifierOutput}


class ModelBase(nn.Module):
    """What `Model` has beside the way to its logits."""

    in_transformers = True  # a class attribute, not a field; see `Model`
    computes: ClassVar = {  # of its config's values
        **dict.fromkeys(("is_decoder", "add_cross_attention"), (False,)),
        "position_embedding_type": ("absolute",),
    }

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith("mlm.") and "in_transformers" not in vars(cls):
            cls.in_transformers = False

    def __call__(
        self,
        input_ids: Array,
        attention_mask: Array,
        token_type_ids: Array | None = None,
        position_ids: Array | None = None,
        head_mask: Array | None = None,
        deterministic: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> ModelOutput | tuple:
        """Returns transformers' output: logits, and the hidden states if asked for.

        Args:
          input_ids, attention_mask, token_type_ids, position_ids: int32 [B, L]; positions by default as transformers
            counts them, over the tokens that `attention_mask` keeps.
          head_mask: not read.
          output_attentions: must be false: kernels don't return their probabilities.
        """
        self.check_config()
        if output_attentions:
            raise ValueError("output_attentions: attention kernels don't return them; use transformers' own class.")
        states, logits = self.states_and_logits(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            has_dropout=not deterministic,
            all_states=output_hidden_states,
        )
        hidden_states = tuple(states) if output_hidden_states else None
        if return_dict:
            return OUTPUTS[self.head_name](logits=logits, hidden_states=hidden_states)
        return (logits,) if hidden_states is None else (logits, hidden_states)

    @nn.nowrap
    def check_config(self) -> None:
        """Raises ValueError for a value that would be ignored; a changed module may compute what it asks for."""
        for key, values in (self.computes | COMPUTES.get(self.head_name, {}) | ACTIVATIONS).items():
            if self.in_transformers and (value := getattr(self.config, key, values[0])) not in values:
                raise ValueError(f"config.{key} = {value!r}: this model computes {', '.join(map(str, values))} alone.")

    @property
    def first_position(self) -> int:
        """The position of a document's first token."""
        return 0

    def predict(self, x_BxKxH: Array, noise: layers.Noise | None) -> Array:
        """Returns the head's logits [B, K, V or classes] of last hidden states; a row is classified by its first."""
        raise NotImplementedError

    @nn.nowrap
    def partition_rules(self) -> PartitionRules:
        """Returns how the parameters are split over the mesh: a rule for each parameter, a parameter for each rule."""
        raise NotImplementedError

    @nn.nowrap
    def windows(self) -> list[int]:
        """Returns for each layer how many tokens it sees on each side, 0 for the whole row."""
        return [0] * self.config.num_hidden_layers

    @nn.nowrap
    def logits(self, *inputs: Any) -> Array:
        """Returns the logits alone; `inputs` are those of `forward`."""
        return self.forward(*inputs)[0]

    @nn.nowrap
    @in_32_bits
    def init_params(self, key: Array) -> Params:
        """Returns float32 parameters, drawn as transformers' `init_weights` draws them."""
        ids_BxL, rngs = jnp.zeros((1, 1), jnp.int32), {"params": jax.random.split(key)[0]}
        return self.init(rngs, ids_BxL, jnp.ones_like(ids_BxL), method="states_and_logits")["params"]
