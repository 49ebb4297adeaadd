"""What all models share: attention, the layers, and the class of a model, from tokens to logits.

A model is a `Model` with a body and a head under transformers' names, as in roberta.py and modernbert.py. Attention is
one of several kernels: that of attention.py runs on any device, and kernels.py has what is faster on some. The last
layer and the head read the predicted tokens alone.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, V padded vocabulary.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from transformers import PretrainedConfig
from transformers.modeling_flax_outputs import (
    FlaxMaskedLMOutput,
    FlaxSequenceClassifierOutput,
    FlaxTokenClassifierOutput,
)
from transformers.utils import ModelOutput

from mlm.model import attention, layers
from mlm.model.attention import Attention, Rotation, segment_and_position_ids
from mlm.model.layers import Noise
from mlm.model.partition_rules import PartitionRules

Params = dict[str, Any]
MASKED_LM, SEQUENCES, TOKENS = "MaskedLM", "SequenceClassification", "TokenClassification"  # transformers' heads
COMPUTES = {MASKED_LM: {"tie_word_embeddings": (True,)}, SEQUENCES: {"classifier_pooling": ("cls",)}}
ACTIVATIONS = dict.fromkeys(("hidden_act", "hidden_activation", "classifier_activation"), tuple(layers.ACTIVATIONS))
OUTPUTS = {MASKED_LM: FlaxMaskedLMOutput, SEQUENCES: FlaxSequenceClassifierOutput, TOKENS: FlaxTokenClassifierOutput}


class Rows(NamedTuple):
    """What the layers are told of a batch of rows besides their vectors."""

    segments_BxL: Array  # int32: the document of each token, 0 for padding
    positions: Any  # of the tokens, as the family has them: int32 [B, L], or rotations
    token_types_BxL: Array | None  # int32; None for 0
    noise: Noise | None  # None for no dropout


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a model is computed; all but `cls_id` change its numbers by rounding alone."""

    attend: Attention | None = None  # None for the kernel that runs on any device
    attend_locally: Attention | None = None  # of layers that attend to a window
    cls_id: int | None = None  # if set, it starts a document that sees no other; the kernels must isolate them as well
    recomputed_feed_forwards: int = 0  # number of first layers whose feed-forward block is recomputed for the gradient

    def recomputed(self, feed_forward: Callable, index: int) -> Callable:
        """Returns the method of layer `index` that computes its feed-forward block, recomputed if it is to be."""
        return nn.remat(feed_forward) if index < self.recomputed_feed_forwards else feed_forward


def attention_dropout(config: PretrainedConfig) -> float:
    """Returns the dropout rate of the attention's probabilities, by either of transformers' names."""
    return getattr(config, "attention_dropout", None) or getattr(config, "attention_probs_dropout_prob", 0.0)


class AttentionKernel(nn.Module):
    """Calls the kernel, with dropout of the probabilities: one mask for all rows and heads."""

    config: PretrainedConfig
    compute: Compute
    window: int = 0  # tokens to each side that a token attends to; 0: the whole row

    def __call__(self, qkv: Sequence[Array], rows: Rows, rotation: Rotation | None = None) -> Array:
        """Returns what each token reads [B, L, H], of queries, keys and values of that shape."""
        length, rate, dropout_mask_LxL = qkv[0].shape[1], attention_dropout(self.config), None
        if rows.noise is not None and rate > 0:
            ones_1xLxL = jnp.ones((1, length, length), qkv[0].dtype)
            dropout_mask_LxL = layers.dropout(ones_1xLxL, rate, rows.noise.seed_of(self))[0]
        attend = self.compute.attend_locally if self.window else self.compute.attend
        if attend is None or self.is_initializing():  # from one token, which can't be split over devices
            heads, isolated = self.config.num_attention_heads, self.compute.cls_id is not None
            attend = attention.xla(heads=heads, isolated=isolated, window=self.window)
        return attend(*qkv, rows.segments_BxL, dropout_mask_LxL, rotation)


class Layers(nn.Module):
    """The layers, named "0", "1", ..."""

    config: PretrainedConfig
    compute: Compute
    layer_class: type[nn.Module]

    @nn.compact
    def __call__(self, x_BxLxH: Array, rows: Rows, tokens_BxK: Array | None) -> list[Array]:
        """Returns x and what each layer makes of it; the last computes `tokens_BxK` alone."""
        states, last = [x_BxLxH], self.config.num_hidden_layers - 1
        for index in range(self.config.num_hidden_layers):
            layer = self.layer_class(self.config, self.compute, index, name=str(index))
            states.append(layer(states[-1], rows, tokens_BxK if index == last else None))
        return states


class Model(nn.Module):
    """A body and a head, which transformers' classes can call too.

    Its `setup` makes `self.body`, of layers of `self.layer_type`, and a head for each `head_name`. A changed model has
    `partition_rules` for parameters of other names, and `in_transformers = True` if some class of transformers computes
    as it does; otherwise an export has Flax weights alone.
    """

    config: PretrainedConfig
    dtype: Any = jnp.float32
    gradient_checkpointing: bool = False  # recompute each layer for the gradient
    head_name: str = MASKED_LM
    compute: Compute = Compute()

    in_transformers = True  # a class attribute, not a field
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

    def predict(self, x_BxKxH: Array, noise: Noise | None) -> Array:
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

    @property
    def layer_type(self) -> type[nn.Module]:
        """The family's `layer_class`, recomputed for the gradient with `gradient_checkpointing`."""
        return nn.remat(self.layer_class) if self.gradient_checkpointing else self.layer_class

    def make_rows(
        self,
        ids_BxL: Array,
        attention_BxL: Array,
        token_types_BxL: Array | None,
        positions_BxL: Array | None,
        noise: Noise | None,
    ) -> Rows:
        """Returns what the layers are told; `positions_BxL` is None for those that transformers counts."""
        segments_BxL, counted_BxL = segment_and_position_ids(
            ids_BxL, attention_BxL, self.first_position, self.compute.cls_id
        )
        positions_BxL = counted_BxL if positions_BxL is None else positions_BxL
        return Rows(segments_BxL, positions_BxL, token_types_BxL, noise)

    def states_and_logits(
        self,
        ids_BxL: Array,
        attention_BxL: Array,
        token_types_BxL: Array | None = None,
        positions_BxL: Array | None = None,
        *,
        predicted_BxK: Array | None = None,
        has_dropout: bool = False,
        rows_B: Array | None = None,
        all_states: bool = False,
    ) -> tuple[list[Array], Array]:
        """Returns the hidden states [B, L, H], of the embeddings and of each layer, and the logits.

        Args:
          predicted_BxK: int32, the tokens to predict, for which alone the last layer and the head are computed; None
            for all. The last hidden state then has these alone.
          rows_B: uint32, each row's number in the global batch, which its dropout depends on; None for 0, 1, ...
          all_states: whether the last hidden state has all tokens where a row is classified, too.
        """
        noise = None
        if has_dropout:
            rows_B = jnp.arange(len(ids_BxL), dtype=jnp.uint32) if rows_B is None else rows_B
            noise = Noise(jax.random.bits(self.make_rng("dropout")), rows_B)
        rows = self.make_rows(ids_BxL, attention_BxL, token_types_BxL, positions_BxL, noise)
        of_rows = self.head_name == SEQUENCES
        if of_rows and not all_states:
            predicted_BxK = jnp.zeros((len(ids_BxL), 1), jnp.int32)
        states = self.body(ids_BxL, rows, predicted_BxK)
        logits = self.predict(states[-1][:, :1], noise)[:, 0] if of_rows else self.predict(states[-1], noise)
        return states, logits

    @nn.nowrap
    def with_attention(self, make: Callable[[int, int], Attention], lengths: Collection[int]) -> Self:
        """Returns the module with the kernels `make(length, window)` of rows; a window of 0 is the whole row."""

        def by_length(window: int) -> Attention:
            kernels = {length: make(length, window) for length in lengths}
            return lambda q_BxLxH, *rest: kernels[q_BxLxH.shape[1]](q_BxLxH, *rest)

        window = max(self.windows())
        local = by_length(window) if window else None
        return self.clone(compute=dataclasses.replace(self.compute, attend=by_length(0), attend_locally=local))

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
        """Returns the logits, and what modules `sow` as "intermediates"; `dropout_key` is None for no dropout."""
        has_dropout = dropout_key is not None
        (_, logits), sown = self.apply(
            {"params": params},
            ids_BxL,
            attention_BxL,
            predicted_BxK=predicted_BxK,
            has_dropout=has_dropout,
            rows_B=rows_B,
            rngs={"dropout": dropout_key} if has_dropout else {},
            mutable=["intermediates"],
            method="states_and_logits",
        )
        return logits, sown.get("intermediates", {})

    @nn.nowrap
    def logits(self, *inputs: Any) -> Array:
        """Returns the logits alone; `inputs` are those of `forward`."""
        return self.forward(*inputs)[0]

    @nn.nowrap
    def init_params(self, key: Array) -> Params:
        """Returns float32 parameters, drawn as transformers' `init_weights` draws them."""
        ids_BxL, rngs = jnp.zeros((1, 1), jnp.int32), {"params": jax.random.split(key)[0]}
        return self.init(rngs, ids_BxL, jnp.ones_like(ids_BxL), method="states_and_logits")["params"]
