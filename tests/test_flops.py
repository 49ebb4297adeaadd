"""FLOPs: worked out on paper, as published for RoBERTa's sizes, and as XLA counts them in the compiled gradient."""

import dataclasses

import jax
import numpy as np
import pytest

from mlm import config as configs
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


@pytest.mark.parametrize(
    ("layers", "every", "window", "local"), [(4, 3, 4, (1, 2)), (5, 2, 1, (1, 3)), (2, 1, 4, ()), (3, 3, 40, (1, 2))]
)
def test_a_run_counts_the_windows_of_its_local_layers(layers, every, window, local):
    """A pair that a local layer leaves out saves two products of H multiply-adds, each forward and twice backward."""
    length, hidden = 32, 48
    sizes = (f"model.layers={layers}", f"model.local_attention={2 * window}", f"model.hidden_size={hidden}")
    runs = [
        configs.flatten(tiny_config("model.family=modernbert", *sizes, f"model.global_every={number}"))
        for number in (1, every)
    ]
    all_global, found = (length * recipe.flops_per_token(run, 500, length=length) for run in runs)
    left_out = sum(abs(query - key) > window for query in range(length) for key in range(length))
    assert all_global - found == pytest.approx(len(local) * left_out * 2 * hidden * 2 * 3)


def counted_and_useful(length: int, *overrides: str) -> tuple[float, float]:
    """Returns the FLOPs of the gradient of 8 rows: as XLA counts them in the compiled one, and the useful ones."""
    info = dataclasses.replace(INFO, length=length)
    config = tiny_config(
        "data.global_batch=8", f"shards.length={length}", f"model.positions={length}", "model.attention=xla", *overrides
    )
    model = Pretraining(config, info, mesh=sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]))
    batch = random_batch(8, info=info)
    gradient = model.make_gradient(length)
    params = jax.eval_shape(lambda: model.module.init_params(jax.random.key(0)))
    counted = jax.jit(gradient).lower(params, batch, np.int32(0)).compile().cost_analysis()["flops"]
    masked = jax.eval_shape(model.masking, jax.random.key(0), *[batch[key] for key in batch])
    share = masked.positions_BxK.shape[1] / length
    size = model.module.config.vocab_size
    return counted, 8 * length * recipe.flops_per_token(model.run, size, length=length, rate=share)


@pytest.mark.parametrize("family", ["roberta", slow("modernbert")])
def test_xla_counts_as_many(family):
    """All of a gradient is matrix products, but for a few percent of softmax, norms and the like."""
    sizes = ("model.hidden_size=256", "model.intermediate_size=1024", "model.heads=4", "model.layers=2")
    counted, useful = counted_and_useful(32, f"model.family={family}", *sizes)
    assert 1.0 < counted / useful < 1.1


@pytest.mark.slow
def test_xla_counts_as_many_in_windows():
    """Half of the useful FLOPs are attention, two fifths of that in three local layers.

    There, the kernel computes whole blocks: of as many queries as the window, with the keys of three blocks.
    """
    length, window, hidden = 512, 64, 64
    layers = ("model.layers=4", "model.global_every=4", f"model.local_attention={2 * window}")
    sizes = (f"model.hidden_size={hidden}", f"model.intermediate_size={hidden}", "model.heads=1")
    counted, useful = counted_and_useful(length, "model.family=modernbert", *layers, *sizes)
    inside = sum(abs(query - key) <= window for query in range(length) for key in range(length))
    outside = 8 * 3 * (length * 3 * window - inside)
    assert 1.0 < counted / (useful + outside * 2 * hidden * 2 * 3) < 1.05
