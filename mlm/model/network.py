"""What the model families share: the forward pass over their layers, the tied decoder, documents and positions.

A family is a subclass of `Network`, as in roberta.py. To add one, list it in families.py and mlm/config_rules.py, and
give it partition rules (mlm/training/sharding.py), FLOPs (mlm/training/recipe.py), priming, and checks of its
config.json (mlm/pretrained/load.py). Attention is one of several kernels, and the heads read the predicted tokens
alone. Positions do not depend on ordinary tokens, so no replacement token can shift them.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, V padded vocabulary, N = B x K.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import transformers
from jax import Array
from transformers import PretrainedConfig

from mlm.model import attention, layers
from mlm.model.attention import Attention, Rotation

Params = dict[str, Any]
Path = tuple[str, ...]  # of a parameter, or of a part of the tree


def at_path(params: Params, path: Path) -> Any:
    """Returns a parameter, or a part of the tree."""
    return functools.reduce(lambda tree, name: tree[name], path, params)


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


@dataclasses.dataclass(frozen=True)
class Network:
    """The forward pass of a family, equal to transformers' model on the same parameters."""

    # What transformers calls the parts.
    config_class: ClassVar[type[PretrainedConfig]]
    name: ClassVar[str]  # in transformers' classes: NAMEForMaskedLM
    body: ClassVar[str]  # what all heads share
    lm_head: ClassVar[Path]  # the parts of the language-model head
    stack: ClassVar[Path]  # holds the layers, "0", "1", ...
    embedding: ClassVar[Path]  # [V, H], the decoder's kernel too
    decoder_bias: ClassVar[Path]  # [V]
    # Keys of the config's group `model` that parameters depend on, and what transformers calls them.
    architecture: ClassVar[dict[str, str]] = {
        "hidden_size": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
    }

    config: PretrainedConfig
    dtype: str = "float32"
    remat: bool = False
    remat_feed_forward: int = 0  # number of first layers that recompute only their feed-forward block
    attention: Attention | None = None  # None for the kernel that runs on any device
    local_attention: Attention | None = None  # of layers that attend to a window
    cls_id: int | None = None  # if set, it starts a document that sees no other; `attention` must isolate them as well

    @classmethod
    def make_config(cls, model: Mapping[str, Any], vocab_size: int, special_ids: Mapping[str, int]) -> PretrainedConfig:
        """Returns transformers' config for the config group `model`, the vocabulary padded to a multiple."""
        config = cls.config_class(
            architectures=[f"{cls.name}ForMaskedLM"],
            vocab_size=-(-vocab_size // model["vocab_multiple"]) * model["vocab_multiple"],
            initializer_range=model["init_stddev"],
            pad_token_id=special_ids["pad"],
            bos_token_id=special_ids["cls"],
            eos_token_id=special_ids["sep"],
            **{name: model[key] for key, name in cls.architecture.items()},
            **cls._settings(model, special_ids),
        )
        cls.set_dropout(config, model)
        return config

    @classmethod
    def flax_class(cls, head: str) -> "type[transformers.FlaxPreTrainedModel] | None":
        """Returns transformers' Flax class with a head: MaskedLM, SequenceClassification or TokenClassification."""
        return getattr(transformers, f"Flax{cls.name}For{head}", None)

    @staticmethod
    def window(config: PretrainedConfig) -> int:
        """Returns how many tokens local layers see on each side, 0 if there are no such layers."""
        return 0

    def with_attention(self, make: Callable[[int], Attention]) -> Self:
        """Returns the network with the kernels `make(window)`; a window of 0 means the whole row."""
        window = self.window(self.config)
        return dataclasses.replace(self, attention=make(0), local_attention=make(window) if window else None)

    def masked_logits(self, params: Params, *inputs: Array | None) -> Array:
        """Returns logits_BxKxV of the full head at the positions, at K / L of its cost; `inputs` as for `encode`."""
        return self.head(params, self.encode(params, *inputs))

    def encode(
        self,
        params: Params,
        ids_BxL: Array,
        attention_BxL: Array,
        positions_BxK: Array | None = None,
        dropout_key: Array | None = None,
        rows_B: Array | None = None,
    ) -> Array:
        """Returns the hidden states that the heads read, [B, K, H] in `dtype`.

        Args:
          positions_BxK: the tokens to return, which the last layer computes alone; None for all, [B, L, H].
          dropout_key: None for no dropout.
          rows_B: uint32, index of each row in the global batch, which its dropout depends on; None for 0, 1, ...
        """
        last = self.config.num_hidden_layers - 1
        dropouts = 3 * self.config.num_hidden_layers + 1
        seeds = [None] * dropouts if dropout_key is None else list(jax.random.bits(dropout_key, (dropouts,)))
        segments_BxL, positions = self._positions(ids_BxL, attention_BxL)
        body = params[self.body]
        with jax.named_scope(f"{self.body}/embeddings"):
            x_BxLxH = self._embed(body["embeddings"], ids_BxL, positions, seeds[0], rows_B)
        layer = jax.checkpoint(self._layer, static_argnums=0) if self.remat else self._layer
        stack = at_path(params, self.stack)
        for index in range(self.config.num_hidden_layers):
            layer_seeds = seeds[3 * index + 1 : 3 * index + 4]
            wanted = positions_BxK if index == last else None
            with jax.named_scope("/".join((*self.stack, str(index)))):
                x_BxLxH = layer(index, stack[str(index)], x_BxLxH, segments_BxL, positions, layer_seeds, rows_B, wanted)
        return self._last_norm(body, x_BxLxH)

    def _last_norm(self, params: Params, x_BxLxH: Array) -> Array:
        """Applies the final layer norm, where the family has one."""
        return x_BxLxH

    def _attend(
        self,
        qkv_BxLxH: Sequence[Array],
        segments_BxL: Array,
        seed: Array | None,
        window: int = 0,
        rotation: Rotation | None = None,
    ) -> Array:
        """Returns the context of each token, which reads the whole row, or `window` tokens to each side."""
        length, rate = segments_BxL.shape[1], attention.dropout_rate(self.config)
        dropout_mask_LxL = None
        if seed is not None and rate > 0:
            dropout_mask_LxL = layers.dropout(jnp.ones((1, length, length), self.dtype), rate, seed)[0]
        attend = self.local_attention if window else self.attention
        if attend is None:
            sizes = {"heads": self.config.num_attention_heads, "window": window}
            attend = attention.make_kernel("xla", isolated=self.cls_id is not None, **sizes)
        return attend(*qkv_BxLxH, segments_BxL, dropout_mask_LxL, rotation)

    def _at(self, wanted_BxK: Array | None, *tokens: Array) -> tuple[Array, ...]:
        """Gathers the tokens at `wanted_BxK` from each [B, L, H]; returns all if it is None."""
        if wanted_BxK is None:
            return tokens
        return tuple(jnp.take_along_axis(x_BxLxH, wanted_BxK[..., None], axis=1) for x_BxLxH in tokens)

    def _remat(self, index: int, feed_forward: Callable) -> Callable:
        """Wraps the feed-forward block in jax.checkpoint, in the first `remat_feed_forward` layers."""
        return jax.checkpoint(feed_forward) if index < self.remat_feed_forward and not self.remat else feed_forward

    def head(self, params: Params, hidden_BxKxH: Array) -> Array:
        """Returns the logits of the vocabulary, [B, K, V] in the computation's type."""
        with jax.named_scope(self.lm_head[0]):
            # With three axes, a TPU would copy the logits.
            x_NxH = self._head(params, hidden_BxKxH.reshape(-1, hidden_BxKxH.shape[-1]))
            embedding_VxH = at_path(params, self.embedding).astype(self.dtype)
            logits_NxV = layers.add_bias(layers.product(x_NxH, embedding_VxH.T), at_path(params, self.decoder_bias))
            return logits_NxV.reshape(*hidden_BxKxH.shape[:2], -1)
