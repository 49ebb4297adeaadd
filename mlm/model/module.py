"""What all models share, as linen modules: their call, documents and positions, the attention kernel.

A model is a `Model` with a body and a head under transformers' names, as in roberta.py and modernbert.py. Attention is
one of several kernels, and the last layer and the head read the predicted tokens alone. Positions do not depend on
ordinary tokens, so no replacement token can shift them.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, V padded vocabulary, N = B x K.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array
from transformers import PretrainedConfig
from transformers.modeling_flax_outputs import (
    FlaxMaskedLMOutput,
    FlaxSequenceClassifierOutput,
    FlaxTokenClassifierOutput,
)
from transformers.utils import ModelOutput

from mlm.model import attention, flops, layers
from mlm.model.attention import Attention, Rotation
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


def position_ids(attention_BxL: Array, first: int) -> Array:
    """Returns `first`, `first` + 1, ... on real tokens, one less than `first` on padding."""
    attention_BxL = attention_BxL.astype(jnp.int32)
    return jnp.cumsum(attention_BxL, axis=-1) * attention_BxL + (first - 1)


def segment_and_position_ids(
    ids_BxL: Array, attention_BxL: Array, first: int, cls_id: int | None = None
) -> tuple[Array, Array]:
    """Returns segments_BxL (documents from 1 up, 0 for padding) and positions_BxL, which start again at `cls_id`."""
    segments_BxL, positions_BxL = attention_BxL.astype(jnp.int32), position_ids(attention_BxL, first)
    if cls_id is None:
        return segments_BxL, positions_BxL
    starts_BxL = (ids_BxL == cls_id) & (segments_BxL > 0)
    before_BxL = jax.lax.cummax(jnp.where(starts_BxL, positions_BxL - first, 0), axis=1)
    documents_BxL = segments_BxL * (1 + jnp.cumsum(starts_BxL, axis=1))
    return documents_BxL, positions_BxL - segments_BxL * before_BxL


def take_tokens(tokens_BxK: Array | None, x_BxLxH: Array) -> Array:
    """Returns x at some tokens of each row, [B, K, H]; all of x if `tokens_BxK` is None."""
    return x_BxLxH if tokens_BxK is None else jnp.take_along_axis(x_BxLxH, tokens_BxK[..., None], axis=1)


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


def vocabulary_logits(transform: Callable, x_BxKxH: Array, embedding_VxH: Array, bias_V: Array) -> Array:
    """Returns logits_BxKxV of a language-model head, the transformed x times the embeddings, in the type of x."""
    x_NxH = transform(x_BxKxH.reshape(-1, x_BxKxH.shape[-1]))  # with three axes, a TPU would copy the logits
    logits_NxV = layers.add_bias(layers.product(x_NxH, embedding_VxH.astype(x_NxH.dtype).T), bias_V)
    return logits_NxV.reshape(*x_BxKxH.shape[:-1], -1)


class AttentionKernel(nn.Module):
    """Calls the kernel, with dropout of the probabilities: one mask for all rows and heads."""

    config: PretrainedConfig
    compute: Compute
    window: int = 0  # tokens to each side; 0 for the whole row

    def __call__(self, qkv: Sequence[Array], rows: Rows, rotation: Rotation | None = None) -> Array:
        """Returns what each token reads [B, L, H], of queries, keys and values of that shape."""
        length, rate, dropout_mask_LxL = qkv[0].shape[1], attention.dropout_rate(self.config), None
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
    """A body and a head, called as transformers calls its modules.

    Its `setup` makes `self.body`, of layers of `self.layer_type`, and a head for each `head_name`. A changed model has
    `partition_rules` for parameters of other names, and `in_transformers = True` if some class of transformers computes
    as it does; otherwise an export has Flax weights alone.
    """

    in_transformers = True  # a class attribute, not a field
    computes: ClassVar = {"is_decoder": (False,), "position_embedding_type": ("absolute",)}  # of its config's values

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith("mlm.") and "in_transformers" not in vars(cls):
            cls.in_transformers = False

    config: PretrainedConfig
    dtype: Any = jnp.float32
    gradient_checkpointing: bool = False  # recompute each layer for the gradient
    head_name: str = MASKED_LM
    compute: Compute = Compute()

    @property
    def layer_type(self) -> type[nn.Module]:
        """The family's `layer_class`, recomputed for the gradient with `gradient_checkpointing`."""
        return nn.remat(self.layer_class) if self.gradient_checkpointing else self.layer_class

    @property
    def first_position(self) -> int:
        """The position of a document's first token."""
        return 0

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

    def predict(self, x_BxKxH: Array, noise: Noise | None) -> Array:
        """Returns the head's logits [B, K, V or classes] of last hidden states; a row is classified by its first."""
        raise NotImplementedError

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
        *,
        predicted_BxK: Array | None = None,
        rows_B: Array | None = None,
    ) -> ModelOutput | tuple:
        """Returns transformers' output: logits, and the hidden states if asked for.

        Args:
          input_ids, attention_mask, token_type_ids, position_ids: int32 [B, L]; positions by default as transformers
            counts them, over the tokens that `attention_mask` keeps.
          head_mask: not read.
          output_attentions: must be false: kernels don't return their probabilities.
          predicted_BxK: int32, the tokens to predict, for which alone the last layer and the head are computed; None
            for all. The last hidden state then has these alone.
          rows_B: uint32, each row's number in the global batch, which its dropout depends on; None for 0, 1, ...
        """
        self.check_config()
        if output_attentions:
            raise ValueError("output_attentions: attention kernels don't return them; use transformers' own class.")
        noise = None
        if not deterministic:
            rows_B = jnp.arange(len(input_ids), dtype=jnp.uint32) if rows_B is None else rows_B
            noise = Noise(jax.random.bits(self.make_rng("dropout")), rows_B)
        rows = self.make_rows(input_ids, attention_mask, token_type_ids, position_ids, noise)
        of_rows, tokens_BxK = self.head_name == SEQUENCES, predicted_BxK
        if of_rows:
            tokens_BxK = None if output_hidden_states else jnp.zeros((len(input_ids), 1), jnp.int32)
        states = self.body(input_ids, rows, tokens_BxK)  # [B, L, H] of the embeddings and of each layer
        logits = self.predict(states[-1][:, :1], noise)[:, 0] if of_rows else self.predict(states[-1], noise)
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

    @nn.nowrap
    def partition_rules(self) -> PartitionRules:
        """Returns how the parameters are split over the mesh: a rule for each parameter, a parameter for each rule."""
        raise NotImplementedError

    @nn.nowrap
    def with_attention(self, make: Callable[[int], Attention]) -> Self:
        """Returns the module with the kernels `make(window)`; a window of 0 is the whole row."""
        window = max(self.windows())
        local = make(window) if window else None
        return self.clone(compute=dataclasses.replace(self.compute, attend=make(0), attend_locally=local))

    @nn.nowrap
    def windows(self) -> list[int]:
        """Returns for each layer how many tokens it sees on each side, 0 for the whole row."""
        return [0] * self.config.num_hidden_layers

    @nn.nowrap
    def flops_per_token(self, params: Params, *, length: float, predicted_share: float, vocab_size: int) -> float:
        """Returns the useful FLOPs of a training step per token; see `flops.train_flops_per_token`."""
        return flops.train_flops_per_token(
            {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()},
            hidden=self.config.hidden_size,
            keys=[flops.mean_keys(length, window) for window in self.windows()],
            predicted_share=predicted_share,
            vocab_size=vocab_size if self.head_name == MASKED_LM else 0,
        )

    @nn.nowrap
    def logits(self, *inputs: Any) -> Array:
        """Returns the logits alone; `inputs` are those of `forward`."""
        return self.forward(*inputs)[0]

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
        output, sown = self.apply(
            {"params": params},
            ids_BxL,
            attention_BxL,
            deterministic=not has_dropout,
            predicted_BxK=predicted_BxK,
            rows_B=rows_B,
            rngs={"dropout": dropout_key} if has_dropout else {},
            mutable=["intermediates"],
        )
        return output.logits, sown.get("intermediates", {})

    @nn.nowrap
    def init_params(self, key: Array) -> Params:
        """Returns float32 parameters, drawn as transformers' `init_weights` draws them."""
        ids_BxL = jnp.zeros((1, 1), jnp.int32)
        return self.init({"params": jax.random.split(key)[0]}, ids_BxL, jnp.ones_like(ids_BxL))["params"]
