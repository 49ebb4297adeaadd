"""RoBERTa with pre-norm (Ott et al., 2019, fairseq) as linen modules.

Dimensions: B rows, L tokens in a row, K predictions in a row, H hidden size.
"""

from jax import Array

from mlm.model.layers import Noise
from mlm.model.module import RowInfo
from mlm.model.roberta import Layer, RobertaModule


class PreNormLayer(Layer):
    """Pre-norm: each norm precedes attention or the feed-forward block, and residual sums are never normed."""

    def __call__(self, x_BxLxH: Array, rows: RowInfo) -> Array:
        sum_BxLxH = self.attention(self.attention.LayerNorm(x_BxLxH), x_BxLxH, rows)
        return self.compute.feed_forward(self, sum_BxLxH, rows)

    def feed_forward(self, sum_BxLxH: Array, rows: RowInfo) -> Array:
        x_BxLxH = self.intermediate.LayerNorm(sum_BxLxH)
        return self.output(self.intermediate(x_BxLxH), sum_BxLxH, rows)


class PreNormModule(RobertaModule):
    """RoBERTa with pre-norm under any head."""

    body_name = "roberta_prelayernorm"
    layer_class = PreNormLayer

    def predict(self, x_BxKxH: Array, noise: Noise | None) -> Array:
        return super().predict(self.body.LayerNorm(x_BxKxH), noise)
