"""FLOPs: worked out on paper, as published for RoBERTa's sizes, and as XLA counts them in the compiled gradient."""

import jax
import numpy as np
import pytest

from mlm.model import flops
from mlm.tasks.pretraining import Pretraining
from mlm.training import recipe, sharding
from tests.fixtures import INFO, random_batch, slow, tiny_config

SIZES = {
    "base": {"hidden": 768, "intermediate": 3072, "vocab_size": 50_265},
    "large": {"hidden": 1024, "intermediate": 4096, "vocab_size": 50_265},
}


def test_by_hand():
    """A layer: 2 x (4 x 2 x 2 + 2 x 2 x 8) + 4 x 4 x 2 = 128, 72 of them behind the attention; the head: 48."""
    sizes = {"hidden": 2, "intermediate": 8, "gated": False, "vocab_size": 10}
    count = flops.train_flops_per_token
    assert count(keys=1 * [4], predicted_share=0.5, **sizes) == 3 * (56 + 0.5 * (72 + 48))
    assert count(keys=5 * [4], predicted_share=1, **sizes) == 3 * (5 * 128 + 48)
    assert count(keys=5 * [4], predicted_share=0, **sizes) == 3 * (5 * 128 - 72)
    assert count(keys=0 * [4], predicted_share=1, **sizes) == 3 * 48


@pytest.mark.parametrize(
    ("size", "length", "body", "head"),
    [("base", 128, 523.8, 235.2), ("base", 512, 566.2, 235.2), ("large", 512, 1962.9, 315.1)],
)
def test_robertas_sizes(size, length, body, head):
    """MFLOP per token: 3 x (24 H^2 L + 4 S H L) of the body, 3 x (2 H^2 + 2 H V) of the head on every position.

    Of the last layer, 3 x 18 H^2 are needed at the predicted positions alone.
    """
    keys = {"base": 12, "large": 24}[size] * [length]
    count = {
        share: flops.train_flops_per_token(**SIZES[size], keys=keys, gated=False, predicted_share=share) / 1e6
        for share in (0, 0.15, 1)
    }
    tail = 3 * 18 * SIZES[size]["hidden"] ** 2 / 1e6
    assert count[0] + tail == pytest.approx(body, abs=0.05)
    assert count[1] == pytest.approx(body + head, abs=0.1)
    assert count[0.15] == pytest.approx(body + 0.15 * head - 0.85 * tail, abs=0.1)


def test_local_layers_count_their_window_alone():
    for length, window in ((64, 4), (9, 4), (8, 7), (8, 8), (8, 20)):
        near = np.abs(np.arange(length)[:, None] - np.arange(length)) <= window
        assert flops.mean_keys(length, window) == pytest.approx(near.sum(1).mean())


@pytest.mark.parametrize("family", ["roberta", slow("modernbert")])
def test_xla_counts_as_many(family):
    """All of a gradient is matrix products, but for a few percent of softmax, norms and the like."""
    config = tiny_config(
        f"model.family={family}",
        "model.hidden_size=256",
        "model.intermediate_size=1024",
        "model.heads=4",
        "model.layers=2",
        "data.global_batch=8",
    )
    model = Pretraining(config, INFO, mesh=sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]))
    batch = random_batch(8)
    gradient = model.make_gradient(INFO.length)
    params = jax.eval_shape(lambda: model.network.init_params(model.network.config, jax.random.key(0)))
    counted = jax.jit(gradient).lower(params, batch, np.int32(0)).compile().cost_analysis()["flops"]
    masked = jax.eval_shape(model.masking, jax.random.key(0), *[batch[key] for key in batch])
    share = masked.positions_BxK.shape[1] / INFO.length
    size = model.network.config.vocab_size
    expected = 8 * 32 * recipe.flops_per_token(model.run, size, length=INFO.length, rate=share)
    assert 1.0 < counted / expected < 1.1
