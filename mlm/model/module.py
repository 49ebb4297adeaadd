"""What all models share, as linen modules: documents and positions, attention, the layers, and the way to the logits.

A model is a `Model` with a body and a head under transformers' names, as in roberta.py and modernbert.py. Attention is
one of several kernels: `xla`, as flax computes it, runs on any device, and kernels.py has what is faster on some. The
last layer and the head read the predicted tokens alone. Positions do not depend on ordinary tokens, so no replacement
token can shift them.

Dimensions: B rows, L tokens in a row, K predictions in a row (or keys of an attention), Q queries, H hidden size = N
heads x head size, V padded vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from transformers import PretrainedConfig

from mlm.model import layers
from mlm.model.base import MASKED_LM, SEQUENCES, ModelBase, Params
from mlm.model.layers import Noise
from mlm.model.rotary import Rotation, rotate

# (q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL or None, rotation or None) -> context_BxLxH. Segments are
# int32: the document of each token, 0 for padding. The probabilities of all rows and heads are multiplied by one mask,
# keys x queries. Queries and keys are rotated first.
Attention = Callable[[Array, Array, Array, Array, Array | None, Rotation | None], Array]


class Rows(NamedTuple):
    """What the layers are told of a batch of rows besides their vectors."""

    segments_BxL: Array  # int32: the document of each token, 0 for padding
    positions: Any  # of the tokens, as the family has them: int32 [B, L], or rotations
    token_types_BxL: Array | None  # int32; None for 0
    noise: Noise | None  # None for no dropout


def position_ids(attention_BxL: Array, first: int) -> Array:
    """Returns `first`, `first` + 1, ... on real tokens, one less than `first` on padding."""
    attention_BxL = attention_BxL.astype(jnp.int32)
    return jnp.cumsum(attention_BxL, axis=-1, dtype=jnp.int32) * attention_BxL + (first - 1)


def segment_and_position_ids(
    ids_BxL: Array, attention_BxL: Array, first: int, cls_id: int | None = None
) -> tuple[Array, Array]:
    """Returns segments_BxL (documents from 1 up, 0 for padding) and positions_BxL, which start again at `cls_id`."""
    segments_BxL, positions_BxL = attention_BxL.astype(jnp.int32), position_ids(attention_BxL, first)
    if cls_id is None:
        return segments_BxL, positions_BxL
    starts_BxL = (ids_BxL == cls_id) & (segments_BxL > 0)
    before_BxL = jax.lax.cummax(jnp.where(starts_BxL, positions_BxL - first, 0), axis=1)
    documents_BxL = segments_BxL * (1 + jnp.cumsum(starts_BxL, axis=1, dtype=jnp.int32))
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


def xla(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, *, heads, isolated) -> Array:
    """An `Attention` of `heads` heads in plain jax; with `isolated`, tokens attend only within their document."""
    if rotation is not None:
        q_BxLxH, k_BxLxH = (rotate(x, *rotation) for x in (q_BxLxH, k_BxLxH))
    return weigh(q_BxLxH, k_BxLxH, v_BxLxH, allowed_keys(segments_BxL, segments_BxL, isolated), dropout_mask_LxL, heads)


def allowed_keys(queries_BxQ: Array, keys_BxK: Array, isolated: bool) -> Array:
    """Returns which keys each query attends to, bool, broadcastable to [B, 1, Q, K], given the segments of both."""
    allowed = (keys_BxK > 0)[:, None, None, :]
    return allowed & (queries_BxQ[:, None, :, None] == keys_BxK[:, None, None, :]) if isolated else allowed


def weigh(q_BxQxH, k_BxKxH, v_BxKxH, allowed_Bx1xQxK, dropout_mask, heads) -> Array:
    """Attention to the allowed keys; `dropout_mask` is [K, Q], or [B, 1, K, Q], or None."""
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxQxH, k_BxKxH, v_BxKxH))
    bias = jnp.where(allowed_Bx1xQxK, 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    scores_BxNxQxK = jnp.einsum("bqnd,bknd->bnqk", q / math.sqrt(q.shape[-1]), k) + bias
    probs_BxNxQxK = jax.nn.softmax(scores_BxNxQxK)
    if dropout_mask is not None:
        probs_BxNxQxK = probs_BxNxQxK * dropout_mask.mT
    return jnp.einsum("bnqk,bknd->bqnd", probs_BxNxQxK, v).reshape(q_BxQxH.shape)


def attention_dropout(config: PretrainedConfig) -> float:
    """Returns the dropout rate of the attention's probabilities, by either of transformers' names."""
    return getattr(config, "attention_dropout", None) or getattr(config, "attention_probs_dropout_prob", 0.0)


class AttentionKernel(nn.Module):
    """Calls the kernel, with dropout of the probabilities: one mask for all rows and heads."""

    config: PretrainedConfig
    compute: Compute

    def __call__(self, qkv: Sequence[Array], rows: Rows, rotation: Rotation | None = None) -> Array:
        """Returns what each token reads [B, L, H], of queries, keys and values of that shape."""
        length, rate, dropout_mask_LxL = qkv[0].shape[1], attention_dropout(self.config), None
        if rows.noise is not None and rate > 0:
            ones_1xLxL = jnp.ones((1, length, length), qkv[0].dtype)
            dropout_mask_LxL = layers.dropout(ones_1xLxL, rate, rows.noise.seed_of(self))[0]
        attend, default = self.kernels(self.config.num_attention_heads, self.compute.cls_id is not None)
        if attend is None or self.is_initializing():  # from one token, which can't be split over devices
            attend = default
        return attend(*qkv, rows.segments_BxL, dropout_mask_LxL, rotation)

    @nn.nowrap
    def kernels(self, heads: int, isolated: bool) -> tuple[Attention | None, Attention]:
        """Returns the kernel that was chosen for the layer, if any, and the one that runs on any device."""
        return self.compute.attend, functools.partial(xla, heads=heads, isolated=isolated)


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


def vocabulary_logits(transform: Callable, x_BxKxH: Array, embedding_VxH: Array, bias_V: Array) -> Array:
    """Returns logits_BxKxV of a language-model head, the transformed x times the embeddings, in the type of x."""
    x_NxH = transform(x_BxKxH.reshape(-1, x_BxKxH.shape[-1]))  # with three axes, a TPU would copy the logits
    logits_NxV = layers.add_bias(layers.product(x_NxH, embedding_VxH.astype(x_NxH.dtype).T), bias_V)
    return logits_NxV.reshape(*x_BxKxH.shape[:-1], -1)


class Model(ModelBase):
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
            noise = Noise(jax.random.bits(self.make_rng("dropout"), (), jnp.uint32), rows_B)
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
