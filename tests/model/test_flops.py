"""FLOPs: worked out on paper, and as XLA counts them in the compiled gradient."""

import jax
import numpy as np
import pytest

from mlm.model import flops
from mlm.training import train
from tests.support.tiny import meshes_of, random_batch, slow, tiny_run

LAYER = (
    "attention/self/query",
    "attention/self/key",
    "attention/self/value",
    "attention/output/dense",
)


def shapes(
    layers: int, hidden: int, intermediate: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a RoBERTa's parameters; biases and norms are no products."""
    found = {
        "roberta/embeddings/word_embeddings/embedding": (vocab_size, hidden),
        "roberta/embeddings/position_embeddings/embedding": (514, hidden),
        "lm_head/dense/kernel": (hidden, hidden),
        "lm_head/bias": (vocab_size,),
    }
    for index in range(layers):
        layer = f"roberta/encoder/layer/{index}"
        found |= {f"{layer}/{name}/kernel": (hidden, hidden) for name in LAYER}
        found |= {f"{layer}/intermediate/dense/kernel": (hidden, intermediate)}
        found |= {f"{layer}/output/dense/kernel": (intermediate, hidden)}
        found |= {
            f"{layer}/output/dense/bias": (hidden,),
            f"{layer}/output/LayerNorm/scale": (hidden,),
        }
    return found


def test_by_hand():
    """A layer: 2 x (4 x 2 x 2 + 2 x 2 x 8) + 4 x 4 x 2 = 128, 72 of them behind the attention; the head: 48."""

    def count(layers: int, predicted_share: float) -> float:
        sizes = shapes(layers, 2, 8, 10)
        keys = layers * [4]
        return flops.train_flops_per_token(
            sizes, hidden=2, keys=keys, predicted_share=predicted_share, vocab_size=10
        )

    assert count(1, predicted_share=0.5) == 3 * (56 + 0.5 * (72 + 48))
    assert count(5, predicted_share=0) == 3 * (5 * 128 - 72)


def test_local_layers_count_their_window_alone():
    for length, window in ((64, 4), (9, 4), (8, 7), (8, 8), (8, 20)):
        near = np.abs(np.arange(length)[:, None] - np.arange(length)) <= window
        assert flops.mean_keys(length, window) == pytest.approx(near.sum(1).mean())


@pytest.mark.parametrize(
    ("layers", "window", "local"), [(5, 1, (1, 2, 4)), (3, 20, (1, 2)), (3, 40, (1, 2))]
)
def test_a_run_counts_the_windows_of_its_local_layers(layers, window, local):
    """A pair that a local layer leaves out saves two products of H multiply-adds, each forward and twice backward."""
    length = 32
    hidden = 48
    sizes = (f"model.layers={layers}", f"model.hidden_size={hidden}")
    all_global, counted = (
        length
        * tiny_run(
            "model.family=modernbert", *sizes, f"model.local_attention={2 * size}"
        ).flops_per_token(length)
        for size in (length, window)
    )
    left_out = sum(abs(query - key) > window for query in range(length) for key in range(length))
    assert all_global - counted == pytest.approx(len(local) * left_out * 2 * hidden * 2 * 3)


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
    )
    with meshes_of(1):
        task = tiny_run(f"model.family={family}", "data.global_batch=8", *sizes, mesh=(1, 1, 1))
    batch = random_batch(8)
    params = jax.eval_shape(task.module.init_params, jax.random.key(0))
    compiled = jax.jit(train.make_gradient(task)).lower(params, batch, np.int32(0)).compile()
    masked = jax.eval_shape(task.inputs, batch, 0)
    useful = 8 * 32 * task.flops_per_token(32, masked.positions_BxK.shape[1] / 32)
    assert 1.0 < compiled.cost_analysis()["flops"] / useful < 1.1
