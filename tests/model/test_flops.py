"""FLOPs: worked out on paper, and as XLA counts them in the compiled gradient."""

import jax
import numpy as np
import pytest

from mlm.model import flops
from mlm.training import train
from tests.support.tiny import meshes_of, random_batch, slow, tiny_run


def test_local_layers_count_their_window_alone():
    for length, window in ((64, 4), (9, 4), (8, 7), (8, 8), (8, 20)):
        near = np.abs(np.arange(length)[:, None] - np.arange(length)) <= window
        assert flops.mean_keys(length, window) == pytest.approx(near.sum(1).mean())


def test_flops_of_short_rows_and_growing_batches_are_those_of_their_steps():
    """Nine of ten steps read short rows, the first five of them eight."""
    task = tiny_run(
        "train.steps=10", "data.short_length=8", "data.lanes=4", "data.batch_stages=((8, 5),)"
    )
    short, long = (32 * task.flops_per_token(length) for length in (8, 32))
    assert short < long
    assert task.useful_flops(10) == pytest.approx((5 * 8 + 4 * 16) * short + 16 * long)


@pytest.mark.standard
@pytest.mark.parametrize("family", ["roberta", slow("modernbert")])
def test_xla_counts_as_many_in_the_gradient(family):
    """All of it is matrix products, but for a few percent of softmax, norms and the like."""
    sizes = (
        "model.hidden_size=256",
        "model.intermediate_size=1024",
        "model.heads=4",
        "model.layers=2",
        "data.global_batch=8",
        "masking.rate=0.25",
    )
    with meshes_of(1):
        task = tiny_run(f"model.family={family}", *sizes, mesh=(1, 1, 1))
    batch = random_batch(8)
    params = jax.eval_shape(task.module.init_params, jax.random.key(0))
    compiled = jax.jit(train.make_gradient(task)).lower(params, batch, np.int32(0)).compile()
    useful = 8 * 32 * task.flops_per_token(32)
    assert 1.0 < compiled.cost_analysis()["flops"] / useful < 1.1
