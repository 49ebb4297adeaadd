"""What all models share, as linen modules: documents and positions, attention, the layers, and the way to the logits.

A model is a `Model` with a body and a head under transformers' names, as in roberta.py and modernbert.py. The last
layer and the head read the predicted tokens alone. Positions do not depend on ordinary tokens, so no replacement token
can shift them.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, V padded vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

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
from mlm.model.attention import Attention
from mlm.model.keys import in_32_bits
from mlm.model.layers import Noise
from mlm.model.partition_rules import PartitionRules
from mlm.model.rotary import Rotation

Params = dict[str, Any]
# Heads, as transformers' classes name them, and what the classes return.
MASKED_LM = "MaskedLM"
SEQUENCES = "SequenceClassification"
TOKENS = "TokenClassification"
OUTPUTS = {
    MASKED_LM: FlaxMaskedLMOutput,
    SEQUENCES: FlaxSequenceClassifierOutput,
    TOKENS: FlaxTokenClassifierOutput,
}


class RowInfo(NamedTuple):
    """What the layers are told of a batch of rows besides their vectors."""

    segments_BxL: Array  # int32: the document of each token, 0 for padding
    positions: Any  # of the tokens, as the family has them: int32 [B, L], or rotations
    token_types_BxL: Array | None  # int32; None for 0
    noise: Noise | None  # None for no dropout
    # int32: those that are computed after a layer's attention; None for all
    tokens_BxK: Array | None = None


def position_ids(attention_BxL: Array, first: int) -> Array:
    """Returns `first`, `first` + 1, ... on real tokens, one less than `first` on padding."""
    attention_BxL = attention_BxL.astype(jnp.int32)
    return jnp.cumsum(attention_BxL, axis=-1, dtype=jnp.int32) * attention_BxL + (first - 1)


def segment_and_position_ids(
    ids_BxL: Array, attention_BxL: Array, first: int, cls_id: int | None = None
) -> tuple[Array, Array]:
    """Returns segments_BxL (documents from 1 up, 0 for padding) and positions_BxL, which start again at `cls_id`."""
    segments_BxL = attention_BxL.astype(jnp.int32)
    positions_BxL = position_ids(attention_BxL, first)
    if cls_id is None:
        return segments_BxL, positions_BxL
    starts_BxL = (ids_BxL == cls_id) & (segments_BxL > 0)
    before_BxL = jax.lax.cummax(jnp.where(starts_BxL, positions_BxL - first, 0), axis=1)
    documents_BxL = segments_BxL * (1 + jnp.cumsum(starts_BxL, axis=1, dtype=jnp.int32))
    return documents_BxL, positions_BxL - segments_BxL * before_BxL


def take_tokens(tokens_BxK: Array | None, x_BxLxH: Array) -> Array:
    """Returns x at some tokens of each row, [B, K, H]; all of x if `tokens_BxK` is None."""
    if tokens_BxK is None:
        return x_BxLxH
    return jnp.take_along_axis(x_BxLxH, tokens_BxK[..., None], axis=1)


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a model is computed; all but `cls_id` change its numbers by rounding alone."""

    attend: Attention = attention.xla
    cls_id: int | None = None  # if set, it starts a document that sees no other
    # number of first layers whose feed-forward block is recomputed for the gradient
    recomputed_feed_forwards: int = 0

    def feed_forward(self, layer: nn.Module, *inputs: Any) -> Array:
        """Returns what the layer's feed-forward block does, recomputed for the gradient if it is to be."""
        block = type(layer).feed_forward
        if layer.index < self.recomputed_feed_forwards:
            block = nn.remat(block)
        return block(layer, *inputs)


class AttentionKernel(nn.Module):
    """Calls the kernel, with dropout of the probabilities: one mask for all rows and heads."""

    config: PretrainedConfig
    compute: Compute
    window: int = 0  # tokens that a token sees on each side, 0 for the whole row

    def __call__(
        self,
        q_BxLxH: Array,
        k_BxLxH: Array,
        v_BxLxH: Array,
        rows: RowInfo,
        rotation: Rotation | None = None,
    ) -> Array:
        """Returns what each token reads [B, L, H]."""
        length = q_BxLxH.shape[1]
        rate = attention.dropout_rate(self.config)
        dropout_mask_LxL = None
        if rows.noise is not None and rate > 0:
            ones_1xLxL = jnp.ones((1, length, length), q_BxLxH.dtype)
            # The seed is this module's, so that each layer drops other pairs of tokens.
            dropout_mask_LxL = layers.dropout(ones_1xLxL, rate, rows.noise.seed_of(self))[0]
        # Parameters are drawn with a row of one token, which can't be split over devices.
        attend = attention.xla if self.is_initializing() else self.compute.attend
        return attend(
            q_BxLxH,
            k_BxLxH,
            v_BxLxH,
            rows.segments_BxL,
            heads=self.config.num_attention_heads,
            window=self.window,
            isolated=self.compute.cls_id is not None,
            dropout_mask_LxL=dropout_mask_LxL,
            rotation=rotation,
        )


class Layers(nn.Module):
    """The layers, named "0", "1", ..."""

    config: PretrainedConfig
    compute: Compute
    layer_class: type[nn.Module]

    @nn.compact
    def __call__(self, x_BxLxH: Array, rows: RowInfo) -> list[Array]:
        """Returns x and what each layer makes of it; the last computes `rows.tokens_BxK` alone."""
        states = [x_BxLxH]
        last = self.config.num_hidden_layers - 1
        of_all = rows._replace(tokens_BxK=None)
        for index in range(last + 1):
            layer = self.layer_class(self.config, self.compute, index, name=str(index))
            states.append(layer(states[-1], rows if index == last else of_all))
        return states


def vocabulary_logits(
    transform: Callable, x_BxKxH: Array, embedding_VxH: Array, bias_V: Array
) -> Array:
    """Returns logits_BxKxV of a language-model head, the transformed x times the embeddings, in the type of x."""
    # with three axes, a TPU would copy the logits
    x_NxH = transform(x_BxKxH.reshape(-1, x_BxKxH.shape[-1]))
    logits_NxV = layers.add_bias(layers.product(x_NxH, embedding_VxH.astype(x_NxH.dtype).T), bias_V)
    return logits_NxV.reshape(*x_BxKxH.shape[:-1], -1)


class Model(nn.Module):
    """A body and a head, which transformers' classes can call too.

    A family's `setup` makes `self.body`, of layers of `self.layer_type`, and a head for each `head_name`. A changed
    model has `partition_rules` for parameters of other names, and `in_transformers = True` if some class of
    transformers computes as it does; otherwise an export has Flax weights alone.
    """

    config: PretrainedConfig
    dtype: Any = jnp.float32
    gradient_checkpointing: bool = False  # recompute each layer for the gradient
    head_name: str = MASKED_LM
    compute: Compute = Compute()

    # Class attributes, not fields.
    layer_class: ClassVar[type[nn.Module]]
    in_transformers: ClassVar[bool] = True
    # Values of the config that the modules compute; others are refused.
    computes: ClassVar[dict[str, tuple]] = {
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",),
    }

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith("mlm.") and "in_transformers" not in vars(cls):
            cls.in_transformers = False

    # What a family has

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
    ) -> RowInfo:
        """Returns what the layers are told; `positions_BxL` is None for those that transformers counts."""
        segments_BxL, counted_BxL = segment_and_position_ids(
            ids_BxL, attention_BxL, self.first_position, self.compute.cls_id
        )
        positions_BxL = counted_BxL if positions_BxL is None else positions_BxL
        return RowInfo(segments_BxL, positions_BxL, token_types_BxL, noise)

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
            noise = Noise(jax.random.bits(self.make_rng("dropout"), (), jnp.uint32), rows_B)
        rows = self.make_rows(ids_BxL, attention_BxL, token_types_BxL, positions_BxL, noise)
        of_rows = self.head_name == SEQUENCES
        if of_rows and not all_states:
            predicted_BxK = jnp.zeros((len(ids_BxL), 1), jnp.int32)
        states = self.body(ids_BxL, rows._replace(tokens_BxK=predicted_BxK))
        if of_rows:
            return states, self.predict(states[-1][:, :1], noise)[:, 0]
        return states, self.predict(states[-1], noise)

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
    @in_32_bits
    def init_params(self, key: Array) -> Params:
        """Returns float32 parameters, drawn as transformers' `init_weights` draws them."""
        ids_BxL = jnp.zeros((1, 1), jnp.int32)
        rngs = {"params": jax.random.split(key)[0]}
        return self.init(rngs, ids_BxL, jnp.ones_like(ids_BxL), method="states_and_logits")[
            "params"
        ]

    # How it is called

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
            raise ValueError(
                "output_attentions: attention kernels don't return them; use transformers' own class."
            )
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
        if not self.in_transformers:
            return
        computes = dict(self.computes)
        if self.head_name == MASKED_LM:
            computes["tie_word_embeddings"] = (True,)
        elif self.head_name == SEQUENCES:
            computes["classifier_pooling"] = ("cls",)
        for key in ("hidden_act", "hidden_activation", "classifier_activation"):
            computes[key] = tuple(layers.ACTIVATIONS)
        for key, values in computes.items():
            if (value := getattr(self.config, key, values[0])) not in values:
                raise ValueError(
                    f"config.{key} = {value!r}: this model computes {', '.join(map(str, values))} alone."
                )
