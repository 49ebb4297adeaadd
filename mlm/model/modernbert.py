"""ModernBERT (Warner et al., 2024, arXiv 2412.13663) as linen modules.

Pre-norm, but none before the first attention; rotary positions; gated feed-forward; all but every third layer attend to
a window; the decoder's bias is the only one. transformers has it in PyTorch only: the tree has PyTorch's module names
and Flax's leaf names, and kernels that PyTorch fuses have an axis for their parts.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, I intermediate size, D head size,
C classes, N = B x K.
"""

import copy
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from transformers import ModernBertConfig, PretrainedConfig

from mlm.model import classifier_heads as heads
from mlm.model import layers
from mlm.model import partition_rules as rules
from mlm.model.layers import Dense, Dropout, Embedding, LayerNorm, Noise, product
from mlm.model.module import (
    MASKED_LM,
    AttentionKernel,
    Compute,
    Layers,
    Model,
    RowInfo,
    take_tokens,
    vocabulary_logits,
)
from mlm.model.rotary import rotations


def truncated_normal(config: ModernBertConfig, stddev: float) -> layers.Initializer:
    """Returns how a kernel is drawn, as in transformers: cut off at `initializer_cutoff_factor` deviations."""
    cutoff = config.initializer_cutoff_factor
    return lambda key, shape, dtype=jnp.float32: (
        stddev * jax.random.truncated_normal(key, -cutoff, cutoff, shape, dtype)
    )


def wide(config: ModernBertConfig) -> layers.Initializer:
    """Returns how embeddings and kernels are drawn but those of output projections."""
    return truncated_normal(config, config.initializer_range)


def narrow(config: ModernBertConfig) -> layers.Initializer:
    """Returns how kernels of output projections are drawn."""
    stddev = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    return truncated_normal(config, stddev)


def window(config: ModernBertConfig, index: int) -> int:
    """Returns how many tokens layer `index` sees on each side, 0 for the whole row."""
    return config.local_attention // 2 if index % config.global_attn_every_n_layers else 0


class SplitDense(nn.Module):
    """Returns the products of x with each of `parts` kernels that PyTorch has as one; without bias."""

    features: int
    parts: int
    kernel_init: layers.Initializer

    @nn.compact
    def __call__(self, x_BxLxH: Array) -> list[Array]:
        kernel = self.param(
            "kernel", self.kernel_init, (x_BxLxH.shape[-1], self.parts, self.features)
        )
        kernel = kernel.astype(x_BxLxH.dtype)
        return [product(x_BxLxH, kernel[:, part]) for part in range(self.parts)]


class Embeddings(nn.Module):
    config: ModernBertConfig
    dtype: Any

    def setup(self) -> None:
        config = self.config
        self.tok_embeddings = Embedding(
            config.vocab_size, config.hidden_size, wide(config), self.dtype
        )
        self.norm = LayerNorm(config.norm_eps, use_bias=False)
        self.dropout = Dropout(config.embedding_dropout)

    def __call__(self, ids_BxL: Array, noise: Noise | None) -> Array:
        return self.dropout(self.norm(self.tok_embeddings(ids_BxL)), noise)


class SelfAttention(nn.Module):
    config: ModernBertConfig
    compute: Compute
    window: int

    def setup(self) -> None:
        config = self.config
        self.Wqkv = SplitDense(config.hidden_size, 3, wide(config))
        self.kernel = AttentionKernel(config, self.compute, self.window)
        self.Wo = Dense(config.hidden_size, narrow(config), use_bias=False)
        self.dropout = Dropout(config.attention_dropout)

    def __call__(self, x_BxLxH: Array, rows: RowInfo) -> Array:
        rotation = rows.positions["local" if self.window else "global"]
        context_BxLxH = self.kernel(*self.Wqkv(x_BxLxH), rows, rotation)
        context_BxKxH = take_tokens(rows.tokens_BxK, context_BxLxH)
        return self.dropout(self.Wo(context_BxKxH), rows.noise, rows.tokens_BxK)


class GatedFeedForward(nn.Module):
    config: ModernBertConfig

    def setup(self) -> None:
        config = self.config
        self.Wi = SplitDense(config.intermediate_size, 2, wide(config))
        self.Wo = Dense(config.hidden_size, narrow(config), use_bias=False)
        self.dropout = Dropout(config.mlp_dropout)

    def __call__(self, x_BxLxH: Array, rows: RowInfo) -> Array:
        inner_BxLxI, gate_BxLxI = self.Wi(x_BxLxH)
        inner_BxLxI = layers.ACTIVATIONS[self.config.hidden_activation](inner_BxLxI) * gate_BxLxI
        return self.Wo(self.dropout(inner_BxLxI, rows.noise, rows.tokens_BxK))


class Layer(nn.Module):
    config: ModernBertConfig
    compute: Compute
    index: int
    attention_class = SelfAttention
    feed_forward_class = GatedFeedForward

    def setup(self) -> None:
        config = self.config
        self.attn = self.attention_class(config, self.compute, window(config, self.index))
        self.mlp = self.feed_forward_class(config)
        self.mlp_norm = LayerNorm(config.norm_eps, use_bias=False)
        if self.index:
            self.attn_norm = LayerNorm(config.norm_eps, use_bias=False)

    def __call__(self, x_BxLxH: Array, rows: RowInfo) -> Array:
        attended_BxLxH = self.attn(self.attn_norm(x_BxLxH) if self.index else x_BxLxH, rows)
        sum_BxLxH = take_tokens(rows.tokens_BxK, x_BxLxH) + attended_BxLxH
        return self.compute.feed_forward(self, sum_BxLxH, rows)

    def feed_forward(self, sum_BxLxH: Array, rows: RowInfo) -> Array:
        """Feed-forward block with the norm before it: residual sum in, residual sum out."""
        return sum_BxLxH + self.mlp(self.mlp_norm(sum_BxLxH), rows)


class Body(nn.Module):
    """Embeddings and layers, which all heads share."""

    config: ModernBertConfig
    dtype: Any
    compute: Compute
    layer_class: type[Layer]

    def setup(self) -> None:
        self.embeddings = Embeddings(self.config, self.dtype)
        self.layers = Layers(self.config, self.compute, self.layer_class)
        self.final_norm = LayerNorm(self.config.norm_eps, use_bias=False)

    def __call__(self, ids_BxL: Array, rows: RowInfo) -> list[Array]:
        return self.layers(self.embeddings(ids_BxL, rows.noise), rows)


class PredictionHead(nn.Module):
    config: ModernBertConfig

    @nn.compact
    def __call__(self, x_BxKxH: Array) -> Array:
        x_BxKxH = Dense(self.config.hidden_size, narrow(self.config), use_bias=False, name="dense")(
            x_BxKxH
        )
        x_BxKxH = layers.ACTIVATIONS[self.config.classifier_activation](x_BxKxH)
        return LayerNorm(self.config.norm_eps, use_bias=False, name="norm")(x_BxKxH)


class DecoderBias(nn.Module):
    """The bias of the decoder, whose kernel is the embedding."""

    entries: int

    @nn.compact
    def __call__(self) -> Array:
        return self.param("bias", nn.initializers.zeros, (self.entries,))


class ModernBertModule(Model):
    layer_class = Layer
    computes: ClassVar = {
        "decoder_bias": (True,),
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), (False,)),
    }

    def setup(self) -> None:
        config = self.config
        self.body = Body(config, self.dtype, self.compute, self.layer_type, name="model")
        self.head = PredictionHead(config)
        if self.head_name == MASKED_LM:
            self.decoder = DecoderBias(config.vocab_size)
        else:
            heads.add_classifier(self, init=truncated_normal(config, config.hidden_size**-0.5))

    @nn.nowrap
    def check_config(self) -> None:
        super().check_config()
        if self.in_transformers and self.config.local_attention < 2:
            raise ValueError(
                f"config.local_attention = {self.config.local_attention}: a window has 2 tokens or more."
            )

    def make_rows(
        self,
        ids_BxL: Array,
        attention_BxL: Array,
        token_types_BxL: Array | None,
        positions_BxL: Array | None,
        noise: Noise | None,
    ) -> RowInfo:
        if positions_BxL is None and self.compute.cls_id is None:
            # rotations that all rows share
            positions_BxL = jnp.arange(ids_BxL.shape[1], dtype=jnp.int32)[None]
        rows = super().make_rows(ids_BxL, attention_BxL, token_types_BxL, positions_BxL, noise)
        return rows._replace(positions=rotations(self.config, rows.positions))

    def predict(self, x_BxKxH: Array, noise: Noise | None) -> Array:
        x_BxKxH = self.body.final_norm(x_BxKxH)
        if self.head_name == MASKED_LM:
            embedding_VxH = self.body.embeddings.tok_embeddings.embedding
            return vocabulary_logits(self.head, x_BxKxH, embedding_VxH, self.decoder())
        return heads.classify(self, self.head(x_BxKxH), noise)

    @nn.nowrap
    def partition_rules(self) -> rules.PartitionRules:
        head = (
            rules.MODERNBERT_LM_HEAD if self.head_name == MASKED_LM else rules.MODERNBERT_CLASSIFIER
        )
        return rules.MODERNBERT + head

    @nn.nowrap
    def windows(self) -> list[int]:
        return [window(self.config, index) for index in range(self.config.num_hidden_layers)]


def as_transformers_4(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a config, perhaps from a file of transformers 5, with a ModernBERT's layers and bases as 4 has them.

    Raises ValueError for those that it can't say.
    """
    if getattr(config, "rope_scaling", None):
        raise ValueError("rope_scaling, which is not supported")
    config = copy.copy(config)
    if hasattr(config, "rope_parameters"):
        rope = config.rope_parameters
        types = config.layer_types
        del config.rope_parameters, config.layer_types
        for kind, name in (("full_attention", "global"), ("sliding_attention", "local")):
            if rope[kind].get("rope_type", "default") != "default":
                raise ValueError(f"rope_type {rope[kind]['rope_type']}, only default")
            setattr(config, f"{name}_rope_theta", rope[kind]["rope_theta"])
        every = next(
            (i for i, kind in enumerate(types) if i and kind == "full_attention"), len(types)
        )
        in_config = config.global_attn_every_n_layers  # may be more than there are layers
        if type(in_config) is int and in_config > len(types) == every:
            every = in_config
        if types != [
            "sliding_attention" if i % every else "full_attention" for i in range(len(types))
        ]:
            raise ValueError("layer_types are not one global layer in every so many")
        config.global_attn_every_n_layers = every
    if getattr(config, "local_rope_theta", 0) is None:
        config.local_rope_theta = config.global_rope_theta
    return config
