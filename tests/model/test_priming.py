"""Primed parameters: heads look where they should, the first loss is the unigram entropy, the tree is the stock one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm.data.manifest import DatasetInfo
from mlm.errors import InputError
from mlm.model import families, priming
from mlm.model.module import Compute
from mlm.model.rotary import rotate
from mlm.tasks import pretraining
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from tests.model.models import numbered
from tests.support.tiny import INFO, tiny_config

COUNTS = np.random.default_rng(0).zipf(1.2, 512).clip(0, 10_000).astype(np.float32)


def primed(family: str, draw=None, **sizes):
    """Returns (a module, its parameters primed, and as they were: drawn, or those of `draw`)."""
    model = tiny_config(
        f"model.family={family}", *(f"model.{name}={value}" for name, value in sizes.items())
    ).model
    module = families.make_module(model, INFO)
    init = module.init_params
    key = jax.random.key(0)
    params = draw(jax.eval_shape(init, key)) if draw else jax.jit(init)(key)
    prime = jax.jit(lambda params, counts, key: priming.prime(params, module.config, counts, key))
    return module, prime(params, COUNTS, jax.random.key(1)), params


@pytest.mark.standard
@pytest.mark.parametrize("family", ["roberta", "modernbert"])
def test_each_head_attends_to_its_offset(family):
    """In the first layer, and with rotary positions in a local layer too."""
    width = 128
    heads = 4
    module, params, _ = primed(family, hidden_size=width, heads=heads, layers=2)
    found: list = []

    def attend(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, *, rotation, **_):
        if rotation is not None:
            q_BxLxH, k_BxLxH = (rotate(x, *rotation) for x in (q_BxLxH, k_BxLxH))
        q, k = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxLxH, k_BxLxH))
        scores_BxNxQxK = jnp.einsum("bqnd,bknd->bnqk", q, k) / np.sqrt(width // heads)
        found.append(jax.nn.softmax(scores_BxNxQxK).mean(0))
        return v_BxLxH

    ids = np.random.default_rng(1).integers(5, INFO.vocab_size, (64, 32)).astype(np.int32)
    module = module.clone(compute=Compute(attend))
    read = jax.jit(lambda *inputs: (module.logits(*inputs), list(found))[1])
    of_layers = [np.asarray(each) for each in read(params, ids, np.ones_like(ids))]
    assert len(of_layers) == 2
    for weight_HxLxL in of_layers[: 2 if family == "modernbert" else 1]:
        for head, offset in enumerate((-1, 1, -2, 2)):
            at = {
                d: np.diagonal(weight_HxLxL[head], d)[3:-3].mean() for d in range(-8, 9) if d != 0
            }
            assert max(at, key=at.get) == offset, f"head {head} looks at {at}"
            assert at[offset] > 2 * np.median(list(at.values()))


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
    """The tree is the stock one, and what isn't named here is untouched."""
    _, params, stock = primed(family, numbered, layers=2 if family == "modernbert" else 1)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), stock
    )
    found = {}
    for (name, new), (_, old) in zip(
        sharding.named_leaves(params), sharding.named_leaves(stock), strict=True
    ):
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
