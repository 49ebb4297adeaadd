"""transformers' ModernBERT: its configuration, its parameter tree, its numbers (Warner et al., 2024, arXiv 2412.13663).

Pre-norm, but none before the first attention; rotary positions; gated feed-forward; all but every third layer attend to
a window; the decoder's bias is the only one. transformers has it in PyTorch only: the tree has PyTorch's module names
and Flax's leaf names, and kernels that PyTorch fuses have an axis for their parts.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size, I intermediate size, D head size,
C classes, N = B x K.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from transformers import ModernBertConfig

from mlm.model import layers
from mlm.model.attention import Rotation
from mlm.model.network import Network, Params, segment_and_position_ids


class ModernBert(Network):
    """ModernBERT, as transformers' ModernBertForMaskedLM in PyTorch."""

    config_class = ModernBertConfig
    name = "ModernBert"
    body = "model"
    lm_head = ("head", "decoder")
    stack = ("model", "layers")
    embedding = ("model", "embeddings", "tok_embeddings", "embedding")
    decoder_bias = ("decoder", "bias")
    architecture = Network.architecture | {
        "activation": "hidden_activation",
        "layer_norm_eps": "norm_eps",
        "local_attention": "local_attention",
        "global_every": "global_attn_every_n_layers",
    }

    @staticmethod
    def _settings(model: Mapping[str, Any], special_ids: Mapping[str, int]) -> dict[str, Any]:
        sizes = {"max_position_embeddings": model["positions"], "classifier_activation": model["activation"]}
        bases = {key: model[key] for key in ("global_rope_theta", "local_rope_theta")}
        return {**sizes, **bases, "cls_token_id": special_ids["cls"], "sep_token_id": special_ids["sep"]}

    @staticmethod
    def set_dropout(config: ModernBertConfig, model: Mapping[str, Any]) -> None:
        """Sets the dropout rates to those of the config's group `model`, of the classification head too."""
        config.attention_dropout = model["attention_dropout"]
        config.embedding_dropout = config.mlp_dropout = config.classifier_dropout = model["hidden_dropout"]

    @classmethod
    def init_params(cls, config: ModernBertConfig, key: Array, head: str = "MaskedLM") -> Params:
        """Returns float32 parameters drawn as in transformers: truncated normal, narrower for output projections."""
        size, inner, stddev = config.hidden_size, config.intermediate_size, config.initializer_range
        less, cutoff = stddev / math.sqrt(2 * config.num_hidden_layers), config.initializer_cutoff_factor
        keys = iter(jax.random.split(key, 4 * config.num_hidden_layers + 3))

        def draw(stddev: float, *shape: int) -> Array:
            return stddev * jax.random.truncated_normal(next(keys), -cutoff, cutoff, shape, jnp.float32)

        def norm() -> Params:
            return {"scale": jnp.ones(size, jnp.float32)}

        def layer(index: int) -> Params:
            attention = {"Wqkv": {"kernel": draw(stddev, size, 3, size)}, "Wo": {"kernel": draw(less, size, size)}}
            mlp = {"Wi": {"kernel": draw(stddev, size, 2, inner)}, "Wo": {"kernel": draw(less, inner, size)}}
            first = {"attn_norm": norm()} if index else {}
            return first | {"attn": attention, "mlp_norm": norm(), "mlp": mlp}

        body = {
            "embeddings": {"tok_embeddings": {"embedding": draw(stddev, config.vocab_size, size)}, "norm": norm()},
            "layers": {str(index): layer(index) for index in range(config.num_hidden_layers)},
            "final_norm": norm(),
        }
        params = {"model": body, "head": {"dense": {"kernel": draw(less, size, size)}, "norm": norm()}}
        if head == "MaskedLM":
            return params | {"decoder": {"bias": jnp.zeros(config.vocab_size, jnp.float32)}}
        kernel = draw(size**-0.5, size, config.num_labels)
        return params | {"classifier": {"kernel": kernel, "bias": jnp.zeros(config.num_labels, jnp.float32)}}

    @staticmethod
    def window(config: ModernBertConfig) -> int:
        """Returns how many tokens local layers see on each side, 0 if there are no such layers."""
        has_local = min(config.global_attn_every_n_layers, config.num_hidden_layers) > 1
        return config.local_attention // 2 if has_local else 0

    def _positions(self, ids_BxL: Array, attention_BxL: Array) -> tuple[Array, dict[str, Rotation]]:
        """Returns segments_BxL and the rotations of "global" and "local" layers: one row if all rows share them."""
        config = self.config
        segments_BxL, positions_BxL = segment_and_position_ids(ids_BxL, attention_BxL, 0, self.cls_id)
        if self.cls_id is None:
            positions_BxL = jnp.arange(ids_BxL.shape[1])[None]
        size = config.hidden_size // config.num_attention_heads
        exponents = (np.arange(0, size, 2, np.float32) / size).astype(np.float64)

        def rotation(theta: float) -> Rotation:
            # Rounded as in PyTorch: at position 8,000, the last bit of a frequency is worth 5e-4 rad.
            frequencies = np.float32(1) / (theta**exponents).astype(np.float32)
            angles = positions_BxL[..., None].astype(jnp.float32) * frequencies
            return jnp.cos(angles), jnp.sin(angles)

        bases = {"global": config.global_rope_theta, "local": config.local_rope_theta}
        return segments_BxL, {kind: rotation(base) for kind, base in bases.items()}

    def _embed(self, params, ids_BxL, rotations, seed, rows_B):
        x_BxLxH = params["tok_embeddings"]["embedding"][ids_BxL].astype(self.dtype)
        return layers.dropout(self._norm(params["norm"], x_BxLxH), self.config.embedding_dropout, seed, rows_B)

    def _layer(self, index, params, x_BxLxH, segments_BxL, rotations, seeds, rows_B, wanted_BxK):
        is_local, rate = index % self.config.global_attn_every_n_layers > 0, self.config.attention_dropout
        window = self.window(self.config) if is_local else 0
        with jax.named_scope("attn_norm"):
            normed_BxLxH = self._norm(params["attn_norm"], x_BxLxH) if index else x_BxLxH
        with jax.named_scope("attn/Wqkv"):
            qkv = _parts(params["attn"]["Wqkv"], normed_BxLxH)
        with jax.named_scope("attn"):
            rotation = rotations["local" if is_local else "global"]
            context_BxLxH = self._attend(qkv, segments_BxL, seeds[0], window, rotation)
        context_BxLxH, x_BxLxH = self._at(wanted_BxK, context_BxLxH, x_BxLxH)
        with jax.named_scope("attn/Wo"):
            projected_BxLxH = layers.dense(params["attn"]["Wo"], context_BxLxH)
            sum_BxLxH = x_BxLxH + layers.dropout(projected_BxLxH, rate, seeds[1], rows_B, wanted_BxK)
        return self._remat(index, self._feed_forward)(params, sum_BxLxH, seeds[2], rows_B, wanted_BxK)

    def _feed_forward(self, params, sum_BxLxH, seed, rows_B, wanted_BxK):
        with jax.named_scope("mlp_norm"):
            normed_BxLxH = self._norm(params["mlp_norm"], sum_BxLxH)
        with jax.named_scope("mlp/Wi"):
            inner_BxLxI, gate_BxLxI = _parts(params["mlp"]["Wi"], normed_BxLxH)
            inner_BxLxI = layers.ACTIVATIONS[self.config.hidden_activation](inner_BxLxI) * gate_BxLxI
            inner_BxLxI = layers.dropout(inner_BxLxI, self.config.mlp_dropout, seed, rows_B, wanted_BxK)
        with jax.named_scope("mlp/Wo"):
            return sum_BxLxH + layers.dense(params["mlp"]["Wo"], inner_BxLxI)

    def _last_norm(self, params, x_BxLxH):
        with jax.named_scope("model/final_norm"):
            return self._norm(params["final_norm"], x_BxLxH)

    def _head(self, params, x_NxH):
        x_NxH = layers.dense(params["head"]["dense"], x_NxH)
        return self._norm(params["head"]["norm"], layers.ACTIVATIONS[self.config.classifier_activation](x_NxH))

    def classify(self, params, x_BxKxH, seeds, rows_B, *, of_tokens):
        """Returns logits_BxKxC of the classification head, which is the same for rows and tokens."""
        x_BxKxH = layers.dropout(self._head(params, x_BxKxH), self.config.classifier_dropout, seeds[0], rows_B)
        return layers.logits(x_BxKxH, params["classifier"]["kernel"], params["classifier"]["bias"])

    def _norm(self, params: Params, x_BxLxH: Array) -> Array:
        return layers.layer_norm(params, x_BxLxH, self.config.norm_eps)


def _parts(params: Params, x_BxLxH: Array) -> list[Array]:
    """Returns the products of x with each part of a kernel [H, parts, O]."""
    kernel = params["kernel"].astype(x_BxLxH.dtype)
    return [layers.product(x_BxLxH, kernel[:, part]) for part in range(kernel.shape[1])]
