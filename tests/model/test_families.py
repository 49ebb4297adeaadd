"""What a config makes of the families: transformers' own classes in the loop, metrics of one's own, and refusals."""

import dataclasses
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from flax.traverse_util import flatten_dict

from mlm.errors import InputError
from mlm.export import export
from mlm.model import families
from mlm.model.loss import Mean
from mlm.model.roberta import RobertaModule
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding, train
from mlm.workdir import Workdir
from tests.support.pytorch import torch_python
from tests.support.tiny import INFO, meshes_of, pretrain, random_batch, slow, tiny_config, tiny_run

STOCK = "model.implementation=transformers"


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "roberta",
            {"max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-6},
        ),
        ("xlm_roberta", {"max_position_embeddings": 66, "model_type": "xlm-roberta"}),
        ("camembert", {"max_position_embeddings": 66, "model_type": "camembert"}),
        ("bert", {"max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "silu"}),
        ("modernbert", {"local_rope_theta": 7.0, "global_rope_theta": 9.0, "global_attn_every_n_layers": 2}),
        ("modernbert", {"norm_eps": 1e-6, "classifier_activation": "silu", "mlp_dropout": 0.2, "cls_token_id": 0}),
        ("modernbert", {"attention_dropout": 0.3, "embedding_dropout": 0.2, "classifier_dropout": 0.2}),
        ("electra", {"embedding_size": 32, "attention_probs_dropout_prob": 0.3, "classifier_dropout": None}),
        ("distilbert", {"hidden_dim": 64, "dropout": 0.2, "attention_dropout": 0.3, "activation": "silu"}),
        ("big_bird", {"attention_type": "original_full"}),
    ],
)
def test_transformers_config_says_what_ours_does(family, expected):
    activation = "gelu" if family == "electra" else "silu"  # whose head in PyTorch has no other
    settings = ["layer_norm_eps=1e-6", f"activation={activation}", "hidden_dropout=0.2", "attention_dropout=0.3"]
    settings += [f"family={family}"]
    if family == "modernbert":
        settings += ["local_rope_theta=7", "global_rope_theta=9", "global_every=2"]
    elif family not in families.FAMILIES:
        settings += ["implementation=transformers"]
    model = tiny_config(*(f"model.{setting}" for setting in settings)).model
    config = families.named(family).make_config(model, 497, INFO.special_ids)
    common = {"vocab_size": 512, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "initializer_range": 0.02}
    assert {key: getattr(config, key) for key in expected | common} == expected | common
    assert config.architectures == [f"{families.named(family).name}ForMaskedLM"]


@pytest.mark.parametrize("name", ["roberta", "bert", "modernbert", "electra"])
def test_the_vocabulary_is_resized_in_embedding_and_bias_alone(name):
    family = families.named(name)
    assert set(family.lm_head) | {family.body} == {path[0] for path in family._shapes}
    params = families.unflatten_dict({path: np.ones((5, 2)[: len(shape)]) for path, shape in family._shapes.items()})
    for size in (3, 8):
        for path, value in flatten_dict(family.resize_vocabulary(params, size)).items():
            is_resized = "/".join(path).endswith(("word_embeddings/embedding", "tok_embeddings/embedding", "s/bias"))
            is_resized |= path in (("lm_head", "bias"), ("decoder", "bias"), ("generator_lm_head", "bias"))
            assert len(value) == (size if is_resized else 5) and value[:5].all() and not value[5:].any(), path


def test_layers_have_the_windows_of_the_config():
    """And only the kernels that layers have are made."""
    for layers, every, windows in ((4, 3, [0, 8, 8, 0]), (2, 1, [0, 0]), (1, 3, [0])):
        sizes = (f"model.layers={layers}", f"model.global_every={every}", "model.local_attention=16")
        module = families.make_module(tiny_config("model.family=modernbert", *sizes).model, INFO)
        made = {}
        module.with_attention(lambda *length_and_window, made=made: made.setdefault(length_and_window), [32, 16])
        assert module.windows() == windows
        assert sorted(made) == sorted(itertools.product([16, 32], set(windows)))


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ["model.family=electra"],
            ["config.model.family = 'electra'", "pretraining alone, with model.implementation = transformers"],
        ),
        (["model.family=bart", STOCK], ["config.model.family = bart", "in Flax", "electra"]),
        (["model.family=albert", STOCK, "model.remat=true"], ["config.model.remat"]),
        (["model.family=electra", STOCK, "model.init=primed"], ["config.model.init"]),
        (["model.attention=fused"], ["config.model.attention = fused", "32 tokens"]),
        (["model.attention=cudnn", "model.attention_dropout=0.1"], ["config.model.attention = 'cudnn'"]),
        (["model.attention=fused", "data.short_length=16"], ["config.model.attention = fused", "16 tokens"]),
        (["model.family=modernbert", STOCK], ["config.model.family = 'modernbert'", "model.implementation = mlm"]),
        (
            ["data.isolate_documents=true", STOCK],
            ["config.data.isolate_documents", "model.implementation = mlm"],
        ),
        (["model.attention=fused", STOCK], ["config.model.attention = 'fused'", "model.implementation = mlm"]),
        (["model.remat_feed_forward=1", STOCK], ["config.model.remat_feed_forward = 1", "model.implementation = mlm"]),
    ],
)
def test_what_cannot_be_computed_is_refused(overrides, names):
    with pytest.raises(InputError) as error:
        tiny_run(*overrides)
    assert all(name in str(error.value) for name in names), error.value


def test_rows_longer_than_the_position_table_are_refused():
    with pytest.raises(InputError, match=r"config\.model\.positions = 64: .* 65 tokens"):
        families.make_module(tiny_config().model, dataclasses.replace(INFO, length=65))


# Transformers' own classes -------------------------------------------------------------------------------------------


@pytest.mark.standard
@pytest.mark.parametrize("family", ["roberta", *map(slow, ("bert", "xlm_roberta", "roberta_prelayernorm"))])
def test_the_loop_trains_transformers_own_class(family):
    """Equal to ours in losses, gradients and parameters without dropout; with it, each device draws its own."""
    runs = [
        tiny_run(f"model.family={family}"),
        tiny_run(f"model.family={family}", STOCK, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", mesh=(2, 2, 2)),
    ]
    states, norms = [run.init() for run in runs], []
    first = sharding.put_tree(jax.device_get(states[0].params), sharding.shardings_of(states[1].params))
    states[1] = states[1].replace(params=first)  # transformers draws BERT's head wider
    for step in range(2):
        for index, run in enumerate(runs):
            batch = sharding.put_batch(random_batch(16, step), run.mesh, 16)
            states[index], metrics = run.train_step(states[index], batch)
            norms.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(norms[::2], norms[1::2], rtol=1e-5)
    ours, theirs = (flatten_dict(jax.device_get(state.params)) for state in states)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_allclose(theirs[path], value, atol=1e-4, err_msg="/".join(path))


OTHERS = [slow("electra"), "distilbert", "albert", slow("roformer"), slow("big_bird")]


@pytest.mark.standard
@pytest.mark.parametrize("family", OTHERS)
@meshes_of(1)
def test_the_loop_trains_any_flax_class_of_transformers(family):
    """Its loss, on the same masks, is that of the class as it is called outside."""
    run = tiny_run(f"model.family={family}", STOCK, "model.layers=2", mesh=(1, 1, 1))
    state, batch = run.init(), sharding.put_batch(random_batch(16), run.mesh, 16)
    masked = jax.device_get(run.inputs(batch, 0))
    flax_class = getattr(transformers, f"Flax{run.module.flax_name}ForMaskedLM")
    model = flax_class(run.module.config, _do_init=False)
    inputs = {"input_ids": masked.ids_BxL, "attention_mask": masked.attention_BxL}
    if family != "distilbert":
        inputs["token_type_ids"] = np.zeros_like(masked.ids_BxL)  # Flax's ELECTRA takes 1 by default
    logits = jax.jit(lambda params: model(**inputs, params=params).logits)(state.params)
    picked = np.take_along_axis(np.asarray(logits), masked.positions_BxK[..., None], 1)[..., : INFO.vocab_size]
    losses = optax.softmax_cross_entropy_with_integer_labels(picked, masked.labels_BxK)
    expected = float(jnp.sum(losses * masked.weights_BxK) / masked.weights_BxK.sum())
    flops = run.flops_per_token(32) / tiny_run("model.layers=2", mesh=(1, 1, 1)).flops_per_token(32)
    assert 0.9 < flops < 1.1, "a model of the same sizes does about as much"
    assert float(run.train_step(state, batch)[1]["loss"]) == pytest.approx(expected, rel=1e-5)


def test_dropout_of_transformers_own_class():
    run = tiny_run(STOCK, "model.hidden_dropout=0.3")
    batch, key, rows = random_batch(4), jax.random.key(0), np.arange(4, dtype=np.uint32)
    params = jax.jit(run.module.init_params)(key)
    inputs = params, batch["input_ids"], batch["attention_mask"], None, key
    logits = jax.jit(lambda rows: run.module.logits(*inputs, rows))
    one, again, other = (logits(rows + first) for first in (0, 0, 4))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 0.01, "other rows, the same places dropped"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["distilbert", "albert", "electra"])
def test_the_export_of_any_flax_class_gives_pytorch_its_logits(family, manifest, tokenizer_folder, tmp_path):
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(tokenizer_folder, str(workdir.tokenizer))
    other = (STOCK, "data.lanes=2", "train.steps=2", "model.init_stddev=0.2")
    pretrain(tiny_config(f"model.family={family}", *other), workdir, manifest)
    model = load.load(workdir, head=load.LM_HEAD)
    export.export(model, UPath(tmp_path / "export"), scores=None, name=family, torch_python=torch_python(5))
    file = tmp_path / "export" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sinusoidal_pos_embds": True}))  # the table is the same
    assert load.load(str(tmp_path / "export"), head=load.LM_HEAD).config.model_type == family


# A module of one's own -----------------------------------------------------------------------------------------------


class Entropy(RobertaModule):
    def predict(self, x_BxKxH, noise):
        logits = super().predict(x_BxKxH, noise)
        self.sow("intermediates", "entropy", -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=(1, 2)))
        return logits


class SownMetric(Pretraining):
    def make_model(self):
        return families.make_module(self.config.model, self.info, module_class=Entropy)

    def metrics(self, logits_BxKxV, masked, intermediates):
        (entropy_B,) = intermediates["entropy"]
        return {"entropy": Mean(entropy_B, jnp.ones_like(entropy_B))}


@pytest.mark.standard
@meshes_of(1)
def test_what_a_module_sows_is_a_metric():
    run = tiny_run("train.accumulate=2", "model.remat=true", mesh=(1, 1, 1))
    task = SownMetric(run.config, run.info, mesh=run.mesh)
    params, batch = jax.jit(task.module.init_params)(jax.random.key(0)), random_batch(16)
    masked = task.inputs(batch, 0)
    _, sown = task.module.forward(params, masked.ids_BxL, masked.attention_BxL, masked.positions_BxK)
    _, means = jax.jit(train.make_gradient(task))(params, batch, np.int32(0))
    expected = float(sown["entropy"][0].mean())
    assert float(means["entropy"].sum / means["entropy"].weight) == pytest.approx(expected, rel=1e-5)


def test_a_module_of_ones_own_isolates_documents_and_is_no_class_of_transformers():
    run = tiny_run("data.isolate_documents=true")
    assert SownMetric(run.config, run.info, mesh=run.mesh).module.compute.cls_id == run.module.compute.cls_id == 0
    with pytest.raises(InputError, match=r"config\.model\.implementation = transformers: Entropy "):
        SownMetric.without_data(tiny_config(STOCK))
    attention = type("Kernel", (Pretraining,), {"make_attention": lambda *_: None})
    with pytest.raises(InputError, match=r"config\.model\.implementation = transformers: .* Kernel\.make_attention"):
        attention.without_data(tiny_config(STOCK))
