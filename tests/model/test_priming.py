"""Primed parameters: heads look where they should, the first loss is the unigram entropy, the tree is the stock one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import keystr

from mlm.data import batches
from mlm.data.manifest import DatasetInfo
from mlm.model import attention, priming
from mlm.model.families import family_of
from mlm.tasks import pretraining
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from tests.support.tiny import INFO, slow, tiny_config, tiny_run

COUNTS = np.random.default_rng(0).zipf(1.2, 512).clip(0, 10_000).astype(np.float32)


def primed(*overrides: str):
    run = tiny_run(*overrides)
    params = jax.jit(run.module.init_params)(jax.random.key(0))
    prime = jax.jit(lambda params, counts, key: priming.prime(params, run.module.config, counts, key))
    return run, prime(params, COUNTS, jax.random.key(1)), params


FAMILIES = ("roberta", "roberta_prelayernorm", "bert", "modernbert")


@pytest.mark.standard
@pytest.mark.parametrize(
    ("family", "width", "heads"),
    [
        ("roberta", 128, 4),
        ("roberta_prelayernorm", 128, 4),
        ("modernbert", 128, 4),
        ("bert", 128, 4),
        slow("modernbert", 96, 2),
        slow("roberta", 128, 2),
        slow("roberta", 96, 1),
    ],
)
def test_each_head_attends_to_its_offset(family, width, heads):
    """In the first layer, and with rotary positions in a local layer too."""
    sizes = (f"model.hidden_size={width}", f"model.heads={heads}", "model.layers=2")
    run, params, _ = primed(f"model.family={family}", *sizes)
    found: list = []

    def attend(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation):
        if rotation is not None:
            q_BxLxH, k_BxLxH = (attention.rotate(x, *rotation) for x in (q_BxLxH, k_BxLxH))
        q, k = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxLxH, k_BxLxH))
        scores_BxNxQxK = jnp.einsum("bqnd,bknd->bnqk", q, k) / np.sqrt(width // heads)
        found.append(jax.nn.softmax(scores_BxNxQxK).mean(0))
        return v_BxLxH

    ids = np.random.default_rng(1).integers(5, INFO.vocab_size, (64, 32)).astype(np.int32)
    module = run.module.with_attention(lambda window: attend)
    read = jax.jit(lambda *inputs: (module.logits(*inputs), list(found))[1])
    of_layers = [np.asarray(each) for each in read(params, ids, np.ones_like(ids))]
    assert len(of_layers) == 2
    for weight_HxLxL in of_layers[: 2 if family == "modernbert" else 1]:
        for head, offset in zip(range(heads), (-1, 1, -2, 2), strict=False):
            at = {d: np.diagonal(weight_HxLxL[head], d)[3:-3].mean() for d in range(-8, 9) if d != 0}
            assert max(at, key=at.get) == offset, f"head {head} looks at {at}"
            assert at[offset] > 2 * np.median(list(at.values()))


@pytest.mark.standard
@pytest.mark.parametrize("family", ["modernbert", slow("roberta"), slow("roberta_prelayernorm")])
def test_first_loss_is_the_unigram_entropy(family, manifest):
    config = tiny_config("model.init=primed", "model.hidden_size=64", "data.lanes=2", f"model.family={family}")
    mesh = sharding.make_mesh(data=8, fsdp=1, tensor=1)
    run = Pretraining(config, DatasetInfo.from_manifest(manifest), mesh=mesh, manifest=manifest)
    entropy = manifest.splits["validation"].unigram_entropy
    stock, primed = (
        pretraining.score_split(config, manifest, mesh, run.eval_step, state.params, "validation")["loss"]
        for state in (run.init(), run.initial_state())
    )
    assert abs(primed - entropy) < 0.3
    assert stock > entropy + 0.8


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_is_the_stock_one_and_the_rest_untouched(family):
    run, params, stock = primed(f"model.family={family}")
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(lambda a: (a.shape, a.dtype), stock)
    changed = {
        keystr(path, simple=True, separator="/")
        for (path, new), old in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(stock), strict=True)
        if not np.array_equal(new, old)
    }
    body, layer = family_of(run.module.config).body, "/".join((*family_of(run.module.config).stack, "0"))
    if family == "modernbert":
        kernels = {f"{layer}/attn/{name}/kernel" for name in ("Wqkv", "Wo")}
        assert changed == {"decoder/bias", f"{body}/embeddings/tok_embeddings/embedding", *kernels}
        return
    assert changed == {
        "cls/predictions/bias" if family == "bert" else "lm_head/bias",
        *(f"{body}/embeddings/{name}_embeddings/embedding" for name in ("position", "token_type", "word")),
        *(f"{layer}/attention/self/{name}/kernel" for name in ("query", "key", "value")),
        f"{layer}/attention/output/dense/kernel",
    }


@pytest.mark.parametrize("init", ["stock", slow("primed")])
def test_the_key_decides(manifest, init):
    config = tiny_config(f"model.init={init}", "data.lanes=2")
    mesh = sharding.make_mesh(data=8, fsdp=1, tensor=1)
    run = Pretraining(config, DatasetInfo.from_manifest(manifest), mesh=mesh, manifest=manifest)
    state = run.initial_state()
    assert bool(np.any(state.params["lm_head"]["bias"])) == (init == "primed")


def test_counts_are_those_of_the_ordinary_tokens(manifest):
    counts = batches.count_tokens(manifest, split="train", records=10_000)
    assert counts.shape == (manifest.vocab_size,) and not counts[list(manifest.all_special_ids)].any()
    rows = [
        batch["input_ids"][batch["valid"] > 0]
        for batch in batches.eval_batches(manifest, split="train", batch=16, rows=(0, 16))
    ]
    ids = np.concatenate(rows)
    ordinary = ~np.isin(ids, manifest.all_special_ids)
    assert np.array_equal(counts, np.bincount(ids[ordinary], minlength=manifest.vocab_size))
