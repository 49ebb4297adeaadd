"""A loss of a researcher's own, in the step."""

import jax
import pytest

from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from tests.support.tiny import INFO, random_batch, tiny_config


def test_the_gradient_is_that_of_the_mean_whatever_its_weights():
    """Also of weights that sum to less than 1."""

    class Light(Pretraining):
        def loss(self, logits_BxKxV, masked):
            return super().loss(logits_BxKxV, masked._replace(weights_BxK=masked.weights_BxK * 2**-10))

    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    tasks = [cls(tiny_config(), INFO, mesh=mesh) for cls in (Pretraining, Light)]
    batch = sharding.put_batch(random_batch(), mesh, 16)
    norms = [float(task.train_step(task.init(), batch)[1]["grad_norm"]) for task in tasks]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
