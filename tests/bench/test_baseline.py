"""The baseline computes what it stands for: the same loss and gradient as our step, where the masks are the same."""

import dataclasses

import jax
import pytest

from mlm.bench import baseline
from mlm.model.families import family_of
from mlm.training.train import make_gradient
from tests.support.pytorch import draw
from tests.support.tiny import INFO, assert_close, random_batch, tiny_run

pytestmark = pytest.mark.usefixtures("one_device")


def test_same_loss_and_gradient_on_the_same_masks():
    # no padding, to which the baseline's loss gives its share
    info = dataclasses.replace(INFO, vocab_size=512)
    run = tiny_run(mesh=(1, 1, 1), info=info)
    batch = random_batch(16, info=info)
    params = jax.device_get(run.init().params)
    drawn = draw(run, [batch])
    assert (drawn["labels"] == baseline.IGNORED).any()
    config = run.module.config
    model = family_of(config).transformers_model(config, "float32")
    arrays = [drawn[name][0] for name in ("ids", "attention", "labels")]
    value, grads = jax.jit(
        jax.value_and_grad(lambda params: baseline.loss(model, params, arrays, None))
    )(params)
    ours, sums = jax.jit(make_gradient(run))(params, batch, 0)
    assert float(sums["loss"].sum / sums["loss"].weight) == pytest.approx(float(value), rel=1e-5)
    assert_close(ours, grads, 1e-4, "gradient")
