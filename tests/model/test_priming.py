"""Primed parameters: the first loss is the unigram entropy, the values and the tree are what they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import RobertaConfig

from mlm.data.manifest import DatasetInfo
from mlm.errors import InputError
from mlm.model import families, priming
from mlm.tasks import pretraining
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from tests.model.models import numbered
from tests.support.tiny import INFO, tiny_config

COUNTS = np.random.default_rng(0).zipf(1.2, 512).clip(0, 10_000).astype(np.float32)


@pytest.mark.standard
@pytest.mark.parametrize("family", ["modernbert", "roberta"])
def test_first_loss_is_the_unigram_entropy(family, manifest):
    config = tiny_config(
        "model.init=primed", "model.hidden_size=64", "data.lanes=2", f"model.family={family}"
    )
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    run = Pretraining(config, DatasetInfo.from_manifest(manifest), mesh=mesh, manifest=manifest)
    entropy = manifest.splits["validation"].unigram_entropy
    stock, primed = (
        pretraining.score_split(config, manifest, mesh, run.eval_step, state.params, "validation")[
            "loss"
        ]
        for state in (run.init(), run.initial_state())
    )
    assert abs(primed - entropy) < 0.3
    assert stock > entropy + 0.8


# Of what priming adds to each parameter, the sum weighted by the cosine of each entry's number.
GOLDEN = {
    "roberta": {
        "lm_head/bias": -0.975,
        "roberta/embeddings/position_embeddings/embedding": -7.6358,
        "roberta/embeddings/token_type_embeddings/embedding": -0.9783,
        "roberta/embeddings/word_embeddings/embedding": 40.8218,
        "roberta/encoder/layer/0/attention/output/dense/kernel": -4.8574,
        "roberta/encoder/layer/0/attention/self/key/kernel": -0.0284,
        "roberta/encoder/layer/0/attention/self/query/kernel": -0.1666,
        "roberta/encoder/layer/0/attention/self/value/kernel": -0.8263,
    },
    "modernbert": {
        "decoder/bias": -1.3515,
        "model/embeddings/tok_embeddings/embedding": 55.2053,
        "model/layers/0/attn/Wo/kernel": -4.4964,
        "model/layers/0/attn/Wqkv/kernel": 7.7588,
        "model/layers/1/attn/Wo/kernel": -4.3087,
        "model/layers/1/attn/Wqkv/kernel": -4.0452,
    },
}


@pytest.mark.parametrize("family", GOLDEN)
def test_golden_parameters(family):
    """Heads look at the neighbours, in rotary layers too. The tree is the stock one; what isn't named is untouched."""
    layers = 2 if family == "modernbert" else 1
    model = tiny_config(f"model.family={family}", f"model.layers={layers}").model
    module = families.make_module(model, INFO)
    stock = numbered(jax.eval_shape(module.init_params, jax.random.key(0)))
    prime = jax.jit(lambda params, counts, key: priming.prime(params, module.config, counts, key))
    params = prime(stock, COUNTS, jax.random.key(1))
    found = {}
    for (name, new), (_, old) in zip(
        sharding.named_leaves(params), sharding.named_leaves(stock), strict=True
    ):
        assert (new.shape, new.dtype) == (old.shape, old.dtype), name
        added = np.ravel(np.float64(new) - np.float64(old))
        if added.any():
            found[name] = np.sum(added * np.cos(np.arange(added.size)))
    assert found == pytest.approx(GOLDEN[family], abs=1e-3)


@pytest.mark.parametrize("shapes", [{}, {"bias": (7,)}])
def test_a_changed_model_with_other_parameters_is_refused(shapes):
    task = Pretraining.without_data(tiny_config("model.init=primed"), info=INFO)
    init = task.module.init_params

    def changed(key):
        return init(key) | {"lm_head": {name: jnp.zeros(shape) for name, shape in shapes.items()}}

    object.__setattr__(task.module, "init_params", changed)
    with pytest.raises(InputError, match=r"model.init = primed.*stock"):
        task.init_params(jax.random.key(0), COUNTS)


def test_each_head_has_an_offset_of_its_own():
    assert priming._offsets(RobertaConfig(num_attention_heads=5)) == [-1, 1, -2, 2, -3]
