"""Heads that classify rows or tokens, as transformers' classes have them.

Dimensions: B rows, L tokens in a row, K predictions in a row, H size of a token's vector, O classes, or numbers.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from transformers import PretrainedConfig

from mlm.model import layers
from mlm.model.layers import Dense, Dropout, Initializer, Noise
from mlm.model.module import SEQUENCES, Model


def add_classifier(
    model: Model, *, rows: type[nn.Module] | None = None, init: Initializer | None = None
) -> None:
    """Gives a model its classifier, in its `setup`: of rows one of the class `rows`; else dropout and `Logits`."""
    config = model.config
    if rows is not None and model.head_name == SEQUENCES:
        model.classifier = rows(config)
    else:
        init = init or nn.initializers.normal(config.initializer_range)
        model.dropout = Dropout(dropout_rate(config))
        model.classifier = Logits(config.num_labels, init)


def classify(model: Model, x_BxKxH: Array, noise: Noise | None) -> Array:
    """Returns the logits of a classifier that `add_classifier` has made."""
    if isinstance(model.classifier, Logits):
        return model.classifier(model.dropout(x_BxKxH, noise))
    return model.classifier(x_BxKxH, noise)


def dropout_rate(config: PretrainedConfig) -> float:
    """Returns the dropout rate of a classification head: that of the layers, unless it has its own."""
    rate = config.classifier_dropout
    return config.hidden_dropout_prob if rate is None else rate


class ClassificationHead(nn.Module):
    config: PretrainedConfig

    @nn.compact
    def __call__(self, x_BxKxH: Array, noise: Noise | None) -> Array:
        config = self.config
        rate = dropout_rate(self.config)
        init = nn.initializers.normal(config.initializer_range)
        x_BxKxH = Dropout(rate, name="first_dropout")(x_BxKxH, noise)
        x_BxKxH = jnp.tanh(Dense(config.hidden_size, init, name="dense")(x_BxKxH))
        x_BxKxH = Dropout(rate, name="last_dropout")(x_BxKxH, noise)
        return Logits(config.num_labels, init, name="out_proj")(x_BxKxH)


class Logits(nn.Module):
    """The last layer of a classification head: x @ kernel + bias in float32, see `logits`."""

    features: int
    kernel_init: Initializer

    @nn.compact
    def __call__(self, x_BxLxH: Array) -> Array:
        kernel_HxO = self.param("kernel", self.kernel_init, (x_BxLxH.shape[-1], self.features))
        bias_O = self.param("bias", nn.initializers.zeros, (self.features,))
        return logits(x_BxLxH, kernel_HxO, bias_O)


@jax.custom_vjp
def logits(x_BxLxH: Array, kernel_HxO: Array, bias_O: Array) -> Array:
    """Returns x @ kernel + bias in float32, whatever the type of x: the last layer of a head.

    Of a bfloat16 array, XLA rounds some of the copies that it keeps or computes again, and not others
    (xla_allow_excess_precision), so two numbers computed from it can't be compared.
    """
    kernel_HxO = kernel_HxO.astype(x_BxLxH.dtype)
    return jnp.matmul(x_BxLxH, kernel_HxO, preferred_element_type=jnp.float32) + bias_O


def _logits_gradients(saved: tuple[Array, ...], grad_BxLxO: Array) -> tuple[Array, ...]:
    x_BxLxH, kernel_HxO, bias_O = saved
    grad_BxLxO, d_bias_O = layers.bias_gradient(bias_O, grad_BxLxO.astype(x_BxLxH.dtype))
    inputs = (x_BxLxH, kernel_HxO.astype(x_BxLxH.dtype))
    d_x_BxLxH, d_kernel_HxO = layers.product_gradients(inputs, grad_BxLxO)
    return d_x_BxLxH, d_kernel_HxO.astype(kernel_HxO.dtype), d_bias_O


logits.defvjp(lambda *arrays: (logits(*arrays), arrays), _logits_gradients)
