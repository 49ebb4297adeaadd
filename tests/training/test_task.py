"""What a task's metrics must be."""

import jax.numpy as jnp
import pytest

from mlm.errors import InputError
from mlm.model.loss import Mean
from tests.training.toy import Toy, toy


def ill_formed(mean):
    """A task whose metric is what `mean` makes of the weights, [B, L]."""

    class IllFormed(Toy):
        def metrics(self, logits_BxL, inputs, intermediates):
            return mean(inputs["weights"])

    return IllFormed(toy().config)


@pytest.mark.parametrize(
    "mean",
    [
        lambda weights_BxL: jnp.mean(weights_BxL),
        lambda weights_BxL: Mean(jnp.sum(weights_BxL), jnp.float32(1)),
        lambda weights_BxL: Mean(weights_BxL, weights_BxL),
        lambda weights_BxL: Mean(
            jnp.sum(weights_BxL, -1).astype(jnp.bfloat16), jnp.sum(weights_BxL, -1)
        ),
    ],
)
def test_a_metric_that_is_no_sum_of_each_row_is_refused(mean):
    with pytest.raises(InputError, match=r"IllFormed\.metrics: padding .*float32"):
        ill_formed(lambda weights_BxL: {"padding": mean(weights_BxL)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda sums: sums.loss_B.mean(), "must return a RowSums"),
        (tuple, "must return a RowSums"),
        (lambda sums: sums._replace(loss_B=sums.loss_B.sum(keepdims=True)), "loss .*float32"),
    ],
)
def test_a_loss_that_is_no_sum_of_each_row_is_refused_by_its_name(change, words):
    class IllFormed(Toy):
        def loss(self, logits_BxL, inputs):
            return change(super().loss(logits_BxL, inputs))

    with pytest.raises(InputError, match=rf"IllFormed\.loss: {words}"):
        IllFormed(toy().config)


@pytest.mark.parametrize("name", ["loss", "own/metric", "kind", "masks", "consecutive_nonfinite"])
def test_a_metric_with_a_name_of_mlms_own_is_refused(name):
    with pytest.raises(InputError, match=rf"IllFormed\.metrics: {name} "):
        ill_formed(
            lambda weights_BxL: {name: Mean(jnp.sum(weights_BxL, -1), jnp.sum(weights_BxL, -1))}
        )
