"""What a task's metrics and loss must be."""

import jax.numpy as jnp
import pytest

from mlm.errors import InputError
from mlm.model.loss import Mean
from tests.training.toy import Toy, toy


def mean_of_rows(weights_BxL, dtype=jnp.float32) -> Mean:
    return Mean(jnp.sum(weights_BxL, -1).astype(dtype), jnp.sum(weights_BxL, -1))


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        # no sum of each row
        ("padding", jnp.mean),
        ("padding", lambda weights_BxL: Mean(jnp.sum(weights_BxL), jnp.float32(1))),
        ("padding", lambda weights_BxL: Mean(weights_BxL, weights_BxL)),
        ("padding", lambda weights_BxL: mean_of_rows(weights_BxL, jnp.bfloat16)),
        # names that the log has, or that TensorBoard takes for two
        *((name, mean_of_rows) for name in ("loss", "own/metric", "kind", "masks")),
        ("consecutive_nonfinite", mean_of_rows),
    ],
)
def test_an_ill_formed_metric_is_refused_by_its_name(name, metric):
    class IllFormed(Toy):
        def metrics(self, logits_BxL, inputs, intermediates):
            return {name: metric(inputs["weights"])}

    with pytest.raises(InputError, match=rf"IllFormed\.metrics: {name} "):
        IllFormed(toy().config)


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
