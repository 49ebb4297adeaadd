"""Our step against PyTorch: the same weights and batches give the same loss, gradient and AdamW updates; float32.

The masks are ours (TokenMasking), drawn beforehand; PyTorch runs its full head, with the label -100 everywhere else.
Ours is the step that `train` or `classify` runs: the head on the tokens that it needs, a padded vocabulary, eight
devices.
"""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file
from transformers import FlaxRobertaForMaskedLM, ModernBertConfig

from mlm.data.examples import Examples, Split, Words
from mlm.data.manifest import DatasetInfo
from mlm.model import families, weights
from mlm.pretrained import load
from mlm.tasks.classification import Classification
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.training.train import make_gradient
from tests.support.pytorch import run_torch
from tests.support.tiny import random_batch, slow, tiny_config, tiny_run

pytestmark = pytest.mark.standard

STEPS = 20
RECIPE = (
    "model.layers=2",
    "model.positions=32",
    "model.init_stddev=0.2",  # large: every array has a gradient that is well above rounding
    f"train.steps={STEPS}",
    "schedule.warmup_steps=5",
    "optimizer.learning_rate=0.002",
    "optimizer.weight_decay=0.1",
    "optimizer.clip_norm=1.8",  # between the smallest and the largest norm
    "log.every=1",
)
# The tokenizer's special tokens are at other ids in the second: every position moves with the pad id.
INFO = {
    pad: DatasetInfo(
        vocab_size=500,
        special_ids={"pad": pad, "cls": 0, "sep": 2, "unk": 4, "mask": 5 - pad // 3},
        all_special_ids=(0, 1, 2, 3, 4, 5),
        length=32,
        records=200,
    )
    for pad in (1, 3)
}


def draw(run: Pretraining, batches: list[dict]) -> dict[str, np.ndarray]:
    """Returns what PyTorch reads: masked ids, attention, and labels that are -100 where nothing is predicted."""
    columns = ("input_ids", "attention_mask", "record_id", "epoch")
    masking = jax.jit(run.masking)
    masked = [masking(jax.random.key(0), *(batch[column] for column in columns)) for batch in batches]
    labels = []
    for each in masked:
        row_labels = np.full(each.ids_BxL.shape, -100)
        rows, slots = np.nonzero(each.weights_BxK)
        row_labels[rows, np.asarray(each.positions_BxK)[rows, slots]] = np.asarray(each.labels_BxK)[rows, slots]
        labels.append(row_labels)
    return {
        "ids": np.stack([each.ids_BxL for each in masked]).astype(np.int64),
        "attention": np.stack([batch["attention_mask"] for batch in batches]).astype(np.int64),
        "labels": np.stack(labels).astype(np.int64),
    }


def random_examples(info: DatasetInfo, *, of_tokens: bool) -> Examples:
    """Returns 32 rows of 8 to 32 tokens with random labels; of tokens, every third one has a label."""
    batch, rng = random_batch(32, 0, info), np.random.default_rng(0)
    lengths_B = rng.integers(info.length // 4, info.length + 1, 32)
    real_BxL = (batch["attention_mask"] > 0) & (np.arange(info.length) < lengths_B[:, None])
    words = Words([], *np.nonzero(real_BxL & (np.arange(info.length) % 3 == 2))) if of_tokens else None
    count = len(words.row_W) if words else 32
    labels = rng.choice(3, count, p=(0.1, 0.1, 0.8)).astype(np.int32)  # uneven: the classifier's bias has to move
    starts = np.cumsum([0, *real_BxL.sum(axis=1)])
    return Examples(
        splits={"train": Split(batch["input_ids"][real_BxL], starts, labels, truncated=0, words=words)},
        labels=("no", "perhaps", "yes"),
        length=info.length,
        multiple=info.length,  # all batches are padded to this
        pad_id=info.special_ids["pad"],
        vocab_size=info.vocab_size,
        tokenizer_fingerprint="",
        fingerprint="",
    )


def make_classification(info: DatasetInfo, *overrides: str) -> tuple[Classification, list[dict], dict[str, np.ndarray]]:
    """Returns the task, its batches, and what PyTorch reads of them."""
    config = tiny_config(*overrides)
    body = families.named(config.model.family).make_config(config.model, info.vocab_size, info.special_ids)
    examples = random_examples(info, of_tokens=config.classify.kind == "tokens")
    task = Classification(config, examples, body, None)
    batches = list(itertools.islice(task.batches(0), STEPS))
    names = {"ids": "input_ids", "attention": "attention_mask", "labels": "label"}
    inputs = {ours: np.stack([batch[name] for batch in batches]).astype(np.int64) for ours, name in names.items()}
    return task, batches, inputs | {"labels": np.where(inputs["labels"] < 0, -100, inputs["labels"])}


def make_pretraining(info: DatasetInfo, *overrides: str) -> tuple[Pretraining, list[dict], dict[str, np.ndarray]]:
    """Returns the task, its batches, and what PyTorch reads of them."""
    task = tiny_run(*overrides, info=info)
    batches = [random_batch(16, seed % 4, info) for seed in range(STEPS)]  # four, again and again: they can be learnt
    return task, batches, draw(task, batches)


# The head, the pad id, transformers' version, more of the recipe. ModernBERT's window is a quarter of the row.
LM, CLASSES, TOKENS = "MaskedLM", "SequenceClassification", "TokenClassification"
PRELAYERNORM = ("model.family=roberta_prelayernorm",)
BERT = ("model.family=bert",)
MODERNBERT = ("model.family=modernbert", "model.layers=4", "model.local_attention=8", "model.global_rope_theta=100")
MODERNBERT += ("optimizer.clip_norm=2.5",)
CASES = {
    "roberta, pad 1": (LM, 1, 4, ()),
    "roberta, pad 3": (LM, 3, 4, ()),
    "prelayernorm": (LM, 1, 4, PRELAYERNORM),
    "prelayernorm, transformers 5": (LM, 1, 5, PRELAYERNORM),
    "bert": (LM, 3, 4, BERT),
    "bert, transformers 5": (LM, 1, 5, BERT),
    "bert, classes": (CLASSES, 1, 4, BERT),
    "bert, tokens": (TOKENS, 3, 5, (*BERT, "classify.kind=tokens")),
    "modernbert": (LM, 3, 4, MODERNBERT),
    "modernbert, transformers 5": (LM, 1, 5, MODERNBERT),
    "roberta, classes": (CLASSES, 3, 4, ()),
    "prelayernorm, classes": (CLASSES, 1, 4, PRELAYERNORM),
    "modernbert, classes": (CLASSES, 3, 4, MODERNBERT),
    "modernbert, classes, transformers 5": (CLASSES, 1, 5, MODERNBERT),
    "roberta, tokens": (TOKENS, 1, 4, ("classify.kind=tokens",)),
    "modernbert, tokens": (TOKENS, 3, 4, (*MODERNBERT, "classify.kind=tokens")),
}
QUICK = ("bert", "modernbert", "modernbert, classes")


@pytest.fixture(scope="module", params=[case if case in QUICK else slow(case) for case in CASES])
def both(request, tmp_path_factory):
    """Runs both; returns (ours, theirs): losses, gradient norms, first gradient, parameters after 20 updates."""
    head, pad, version, more = CASES[request.param]
    info, make = INFO[pad], make_pretraining if head == LM else make_classification
    task, batches, inputs = make(info, *RECIPE, *more)
    assert all((batch["attention_mask"] == 0).any() for batch in batches), "no row has padding"
    state, family = task.initial_state(), families.family_of(task.module.config)
    first = jax.device_get(state.params)

    folder = tmp_path_factory.mktemp("torch")
    config = task.module.config.to_dict() | {"vocab_size": info.vocab_size}
    values = task.config.optimizer
    recipe = {key: values[key] for key in ("learning_rate", "b1", "b2", "eps", "weight_decay", "clip_norm")}
    settings = {"head": head, "config": config, "recipe": recipe | {"warmup_steps": 5, "steps": STEPS}}
    (folder / "settings.json").write_text(json.dumps(settings))
    save_file(weights.to_torch(family.resize_vocabulary(first, info.vocab_size)), folder / "params.safetensors")
    save_file(inputs, folder / "batches.safetensors")
    run_torch(version, "tests/pytorch/reference.py", folder)

    losses, norms, moments = [], [], None
    for batch in batches:
        state, metrics = task.train_step(state, sharding.put_batch(batch, task.mesh, 16))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        moments = moments or jax.device_get(optax.tree.get(state.opt_state, "mu"))
    scale = (1 - values.b1) * min(1, values.clip_norm / norms[0])  # Adam's first moment is this, times the gradient
    grads = jax.tree.map(lambda moment: moment / scale, moments)
    ours = {"losses": losses, "norms": norms}
    for name, tree in {"gradient": grads, "trained": state.params, "first": first}.items():
        ours[name] = weights.to_torch(family.resize_vocabulary(jax.device_get(tree), info.vocab_size))
    ours["clip_norm"] = values.clip_norm
    ours["padding"] = np.asarray(families.at_path(grads, family.embedding))[info.vocab_size :]
    theirs = json.loads((folder / "losses.json").read_text())
    theirs |= {name: load_file(folder / f"{name}.safetensors") for name in ("gradient", "trained")}
    return ours, theirs


def test_loss(both):
    """To 1e-5, relative, at each of the 20 updates."""
    ours, theirs = both
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-5)
    assert theirs["losses"][-1] < theirs["losses"][0] - 0.1, "nothing was learnt: the comparison is empty"


def test_every_gradient(both):
    """To 1e-4 of the largest value of each array.

    The gradient of a key's bias is 0 but for rounding (a softmax does not change if all its inputs move together):
    there, both must be under 1e-5 of the query's.
    """
    ours, theirs = both[0]["gradient"], both[1]["gradient"]
    assert ours.keys() == theirs.keys()
    for name, theirs_ in theirs.items():
        if name.endswith("attention.self.key.bias"):
            scale = 0.1 * np.abs(theirs[name.replace("key", "query")]).max()
        else:
            scale = np.abs(theirs_).max()
            assert scale > 1e-5, f"{name}: has no gradient to compare"
        worst = np.abs(ours[name] - theirs_).max() / scale
        assert worst < 1e-4, f"{name}: {worst:.1e}"


def test_padding_of_the_vocabulary_has_no_gradient(both):
    padding = both[0]["padding"]
    assert padding.shape[0] == 12
    assert not padding.any()


def test_gradient_norm_and_clipping(both):
    ours, theirs = both
    np.testing.assert_allclose(ours["norms"], theirs["norms"], rtol=1e-4)
    assert max(theirs["norms"]) > ours["clip_norm"] > min(theirs["norms"]), (
        "clipping must act in some updates and not in others"
    )


def test_twenty_updates_of_adamw(both):
    """Parameters to 1e-4, absolute, after warmup, clipping and decay; they have moved at least ten times as far."""
    ours, theirs = both
    for name, value in theirs["trained"].items():
        worst = np.abs(ours["trained"][name] - value).max()
        assert worst < 1e-4, f"{name}: {worst:.1e}"
        if not name.endswith("attention.self.key.bias"):
            assert np.abs(value - ours["first"][name]).max() > 1e-3, f"{name}: has hardly moved"


@pytest.mark.slow
def test_masked_head_equals_the_stock_head():
    """Loss and every gradient: FlaxRobertaForMaskedLM's own call, and the one-hot loss of run_mlm_flax.py."""
    info = dataclasses.replace(INFO[1], vocab_size=512)  # a multiple of 128: no padding, of which stock knows nothing
    run = tiny_run("model.layers=2", "model.positions=32", info=info)
    params = run.init().params
    batch = random_batch(16, 0, info)
    drawn = {name: value[0] for name, value in draw(run, [batch]).items()}
    stock = FlaxRobertaForMaskedLM(run.module.config, _do_init=False)

    def loss(params):
        logits = stock(drawn["ids"], drawn["attention"], params=params).logits
        labels = jax.nn.one_hot(drawn["labels"], 512)  # -100: no class
        predicted = drawn["labels"] >= 0
        return jnp.sum(optax.softmax_cross_entropy(logits, labels) * predicted) / predicted.sum()

    expected, wanted = jax.jit(jax.value_and_grad(loss))(params)
    found, sums = jax.jit(make_gradient(run))(params, sharding.put_batch(batch, run.mesh, 16), jnp.zeros((), jnp.int32))
    assert float(sums["loss"].sum / sums["loss"].weight) == pytest.approx(float(expected), rel=1e-6)
    scales = {name: np.abs(value).max() for name, value in sharding.named_leaves(wanted)}
    for (name, one), (_, other) in zip(sharding.named_leaves(found), sharding.named_leaves(wanted), strict=True):
        scale = scales[name.replace("key/bias", "query/bias")]  # a key's bias has no gradient but rounding
        assert np.abs(one - other).max() < 1e-5 * scale, name


@pytest.mark.slow
@pytest.mark.parametrize("generation", [4, 5])
def test_modernbert_s_logits_late_in_a_long_row(generation, tmp_path):
    """At positions near 8,192 an angle shows the last bit of its rotary frequency; logits of up to 10."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 128}
    config = ModernBertConfig(vocab_size=500, **sizes, pad_token_id=1, cls_token_id=0, initializer_range=0.2)
    params = jax.device_get(families.MODERNBERT.make_module(config).init_params(jax.random.key(0)))
    (tmp_path / "config.json").write_text(config.to_json_string())
    save_file(weights.to_torch(params), tmp_path / "model.safetensors")
    ids_1xL = np.random.default_rng(0).integers(5, 500, (1, 8192))
    np.save(tmp_path / "ids.npy", ids_1xL)
    run_torch(generation, "tests/pytorch/logits.py", tmp_path, 64)
    last = np.arange(8192 - 64, 8192)[None]
    ours = load.load(str(tmp_path), head=load.LM_HEAD).module.logits(params, ids_1xL, ids_1xL > 0, last)
    theirs = np.load(tmp_path / "logits.npy")
    assert 5 < np.abs(theirs).max() < 20
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
