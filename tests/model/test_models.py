"""The models as a Flax user has them: transformers' classes, their numbers and initial values, linen's own tools."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from flax import linen
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import mlm.model
from mlm.errors import InputError
from mlm.export import export
from mlm.model import bert, families, weights
from mlm.model.families import FAMILIES
from mlm.model.loss import Mean
from mlm.model.module import Compute
from mlm.model.roberta import RobertaModule
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.workdir import Workdir
from tests.support.pytorch import torch_python
from tests.support.tiny import INFO, pretrain, random_batch, slow, tiny_config, tiny_run

SIZES = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 128, "max_position_embeddings": 40, "pad_token_id": 1, "initializer_range": 0.1}
WIDER = {("classifier", "kernel"), ("cls", "predictions", "transform", "dense", "kernel")}  # drawn by Flax's classes
CLASSES = [
    *("RobertaForMaskedLM", "RobertaForSequenceClassification", slow("RobertaForTokenClassification")),
    *("BertForMaskedLM", "BertForSequenceClassification", slow("BertForTokenClassification")),
    *("RobertaPreLayerNormForMaskedLM", slow("RobertaPreLayerNormForSequenceClassification")),
    slow("RobertaPreLayerNormForTokenClassification"),
]


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of four rows, one with padding."""
    ids = np.random.default_rng(0).integers(5, 500, (4, 32)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1, 20:] = 0
    return np.where(mask > 0, ids, 1), mask


def make(name: str, **kwargs):
    """Returns a model, whose config has two token types and three labels."""
    cls = getattr(mlm.model, name)
    types = {} if "ModernBert" in name else {"type_vocab_size": 2}
    return cls(cls.config_class(**SIZES, **types, num_labels=3), seed=3, **kwargs)


@pytest.mark.standard
@pytest.mark.parametrize("name", CLASSES)
def test_a_model_is_transformers_own(name):
    """Its class, its draws, its logits and hidden states, with token types and positions given too."""
    model, stock = make(name), getattr(transformers, f"Flax{name}")
    reference = stock(model.config, seed=3)
    assert isinstance(model, stock)
    ours, theirs = flatten_dict(model.params), flatten_dict(reference.params)
    others = {path for path in theirs if not np.array_equal(ours[path], theirs[path])}
    assert ours.keys() == theirs.keys() and others <= WIDER, "another draw"
    for path in others:
        assert np.std(ours[path]) == pytest.approx(model.config.initializer_range, rel=0.2)
    params = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), reference.params)
    (ids, mask), types = inputs(), np.repeat([[0] * 16 + [1] * 16], 4, 0)
    for arguments in ({}, {"token_type_ids": types}, {"position_ids": np.repeat([np.arange(2, 34)], 4, 0)}):
        arguments |= {"params": params, "output_hidden_states": True}
        found, expected = model(ids, mask, **arguments), reference(ids, mask, **arguments)
        real = mask > 0 if found.logits.ndim == 3 else ...
        scale = np.abs(expected.logits).max()
        np.testing.assert_allclose(found.logits[real], expected.logits[real], atol=2e-6 * scale)
        for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
            np.testing.assert_allclose(one[mask > 0], other[mask > 0], atol=1e-5)


@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "FlaxModernBertForMaskedLM", slow("BertForMaskedLM")])
@pytest.mark.parametrize("kind", ["flax", "safetensors"])
def test_a_model_is_saved_and_read_as_transformers_does(name, kind, tmp_path):
    model, (ids, mask) = make(name), inputs()
    if kind == "flax":
        model.save_pretrained(tmp_path)
        architectures = json.loads((tmp_path / "config.json").read_text())["architectures"]
        assert architectures == [name.removeprefix("Flax")]
    else:
        model.config.save_pretrained(tmp_path)
        tensors = weights.to_torch(jax.device_get(model.params))
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = type(model).from_pretrained(str(tmp_path))
    np.testing.assert_array_equal(again(ids, mask).logits, model(ids, mask).logits)
    classifier = getattr(mlm.model, name.replace("MaskedLM", "SequenceClassification"))
    assert classifier.from_pretrained(str(tmp_path))(ids, mask).logits.shape == (4, 3)


@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "FlaxModernBertForMaskedLM"])
def test_linen_s_tools_work(name):
    """`capture_intermediates`, `sow` in a module of one's own, and `tabulate`."""
    model, (ids, mask) = make(name), inputs()
    variables = {"params": model.params}
    _, state = model.module.apply(variables, ids, mask, capture_intermediates=True, mutable=["intermediates"])
    shapes = {"/".join(path): jax.tree.leaves(value)[0].shape for path, value in flatten_dict(state).items()}
    layer = "roberta/encoder/layer/1" if name.startswith("Roberta") else "model/layers/1"
    assert shapes[f"intermediates/{layer}/__call__"] == (4, 32, 64)

    class Entropy(type(model.module)):
        def predict(self, x_BxKxH, rows_B):
            logits = super().predict(x_BxKxH, rows_B)
            self.sow("intermediates", "entropy", -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), -1))
            return logits

    module = Entropy(model.config)
    _, state = module.apply(variables, ids, mask, mutable=["intermediates"])
    assert 5 < state["intermediates"]["entropy"][0].mean() < np.log(500)
    table = linen.tabulate(model.module, jax.random.key(0), console_kwargs={"width": 200})(ids, mask)
    assert (layer in table and "word_embeddings" in table) or "tok_embeddings" in table


@pytest.mark.standard
@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "FlaxModernBertForMaskedLM"])
def test_dropout_as_transformers_asks_for_it(name):
    """On with `train` alone; and recomputed layers, or some feed-forward blocks, have the same gradient."""
    model, (ids, mask) = make(name), inputs()
    for key in ("hidden_dropout_prob", "mlp_dropout", "embedding_dropout"):
        setattr(model.config, key, 0.3)
    plain, key = model(ids, mask).logits, jax.random.key(1)
    np.testing.assert_array_equal(model(ids, mask, dropout_rng=key).logits, plain)
    assert np.abs(model(ids, mask, dropout_rng=key, train=True).logits - plain).max() > 0.1

    def gradient(module):
        return jax.jit(jax.grad(lambda params: jnp.sum(module.logits(params, ids, mask, None, key) ** 2)))(model.params)

    expected = gradient(model.module)
    recomputed = [Compute(recomputed_feed_forwards=1), Compute(recompute_layers=True)]
    for module in (
        *(model.module.clone(compute=each) for each in recomputed),
        model.module.clone(gradient_checkpointing=True),
    ):
        text = str(
            jax.make_jaxpr(jax.grad(lambda params, module=module: jnp.sum(module.logits(params, ids, mask))))(
                model.params
            )
        )
        assert "checkpoint" in text or "remat" in text
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()), gradient(module), expected
        )


def test_what_kernels_do_not_return_is_refused():
    model, (ids, mask) = make("RobertaForMaskedLM"), inputs()
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, mask, output_attentions=True)


@pytest.mark.standard
@pytest.mark.parametrize("model_type", ["xlm-roberta", "camembert"])
def test_roberta_under_another_name_keeps_it(model, model_type, tmp_path):
    """A folder of the architecture loads, and is exported as what it is."""
    family = FAMILIES[model_type]
    config = family.config_class.from_dict(model.config.to_dict() | {"model_type": model_type})
    config.architectures = [f"{family.name}ForMaskedLM"]
    export.export(dataclasses.replace(model, config=config), UPath(tmp_path / "export"), scores=None, name="x")
    again = load.load(str(tmp_path / "export"), head=load.LM_HEAD)
    assert again.config.model_type == model_type and type(again.config) is family.config_class
    content = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (content["model_type"], content["architectures"]) == (model_type, [f"{family.name}ForMaskedLM"])
    assert (tmp_path / "export" / "flax_model.msgpack").is_file() == (family.flax_class("MaskedLM") is not None)
    ids, mask = inputs()
    np.testing.assert_array_equal(
        again.module.logits(again.params, ids, mask), model.module.logits(model.params, ids, mask)
    )


STOCK = ("model.implementation=transformers", "model.layers=2", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")


@pytest.mark.standard
@pytest.mark.parametrize("family", ["roberta", slow("roberta_prelayernorm"), slow("bert"), slow("xlm_roberta")])
def test_the_loop_trains_transformers_own_class(family):
    """Equal to ours in losses, gradients and parameters without dropout; with it, each device draws its own."""
    runs = [
        tiny_run(f"model.family={family}", "model.layers=2"),
        tiny_run(f"model.family={family}", *STOCK, mesh=(2, 2, 2)),
    ]
    states, norms = [run.init() for run in runs], []
    first = sharding.put_tree(jax.device_get(states[0].params), sharding.shardings_of(states[1].params))
    states[1] = states[1].replace(params=first)  # transformers draws BERT's head wider
    for step in range(3):
        for index, run in enumerate(runs):
            batch = sharding.put_batch(random_batch(16, step), run.mesh, 16)
            states[index], metrics = run.train_step(states[index], batch)
            norms.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(norms[::2], norms[1::2], rtol=1e-5)
    ours, theirs = (flatten_dict(jax.device_get(state.params)) for state in states)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_allclose(theirs[path], value, atol=1e-4, err_msg="/".join(path))


OTHERS = ["electra", "distilbert", "albert", slow("roformer"), slow("big_bird")]


@pytest.mark.standard
@pytest.mark.parametrize("family", OTHERS)
def test_the_loop_trains_any_flax_class_of_transformers(family):
    """Its loss, on the same masks, is that of the class as it is called outside."""
    run = tiny_run(f"model.family={family}", "model.implementation=transformers", "model.layers=2")
    state, batch = run.init(), sharding.put_batch(random_batch(16), run.mesh, 16)
    masked = jax.device_get(run.inputs(batch, 0))
    flax_class = getattr(transformers, f"Flax{run.module.flax_name}ForMaskedLM")
    model = flax_class(run.module.config, _do_init=False)
    inputs = {"input_ids": masked.ids_BxL, "attention_mask": masked.attention_BxL}
    if family != "distilbert":
        inputs["token_type_ids"] = np.zeros_like(masked.ids_BxL)  # Flax's ELECTRA takes 1 by default
    logits = model(**inputs, params=jax.device_get(state.params)).logits
    picked = np.take_along_axis(np.asarray(logits), masked.positions_BxK[..., None], 1)[..., : INFO.vocab_size]
    losses = optax.softmax_cross_entropy_with_integer_labels(picked, masked.labels_BxK)
    expected = float(jnp.sum(losses * masked.weights_BxK) / masked.weights_BxK.sum())
    assert float(run.train_step(state, batch)[1]["loss"]) == pytest.approx(expected, rel=1e-5)
    flops = run.flops_per_token(32) / tiny_run("model.layers=2").flops_per_token(32)
    assert 0.9 < flops < 1.1, "a model of the same sizes does about as much"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["electra", "distilbert", "albert"])
def test_the_export_of_any_flax_class_gives_pytorch_its_logits(family, manifest, tokenizer_folder, tmp_path):
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(tokenizer_folder, str(workdir.tokenizer))
    other = ("model.implementation=transformers", "data.lanes=2", "train.steps=2", "model.init_stddev=0.2")
    pretrain(tiny_config(f"model.family={family}", *other), workdir, manifest)
    model = load.load(workdir, head=load.LM_HEAD)
    export.export(model, UPath(tmp_path / "export"), scores=None, name=family, torch_python=torch_python(5))
    assert load.load(str(tmp_path / "export"), head=load.LM_HEAD).config.model_type == family


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["model.family=electra"], ["config.model.family = 'electra'", "model.implementation = transformers"]),
        (
            ["model.family=gpt_neo", "model.implementation=transformers"],
            ["config.model.family = gpt_neo", "in Flax", "electra"],
        ),
        (
            ["model.family=bart", "model.implementation=transformers"],
            ["config.model.family = bart", "in Flax", "electra"],
        ),
        (["model.family=albert", "model.implementation=transformers", "model.remat=true"], ["config.model.remat"]),
        (["model.family=electra", "model.implementation=transformers", "model.init=primed"], ["config.model.init"]),
    ],
)
def test_what_transformers_has_not_in_flax_is_refused(overrides, names):
    with pytest.raises(InputError) as error:
        tiny_run(*overrides)
    assert all(name in str(error.value) for name in names), error.value


def test_parameters_without_partition_rules_are_not_split():
    with pytest.raises(InputError, match=r"config\.mesh\.fsdp = 4.* no partition rules"):
        tiny_run("model.family=electra", "model.implementation=transformers", mesh=(2, 4, 1))


class Unruled(RobertaModule):
    def partition_rules(self):
        return super().partition_rules()[1:]


class Overruled(RobertaModule):
    def partition_rules(self):
        return (*super().partition_rules(), (r"lm_head/decoder/kernel", P()))


@pytest.mark.parametrize(("module", "name"), [(Unruled, "word_embeddings/embedding"), (Overruled, "lm_head/decoder")])
def test_partition_rules_fit_the_parameters_both_ways(module, name):
    class Changed(Pretraining):
        def make_model(self):
            return families.make_module(self.config.model, self.info, module_class=module)

    run = tiny_run()
    with pytest.raises(InputError, match=rf"partition_rules\(\).* \S*{name}"):
        Changed(run.config, run.info, mesh=run.mesh)


class QueryNorm(bert.SelfAttention):
    def __call__(self, x_BxLxH, rows):
        self.sow("intermediates", "norm", jnp.linalg.norm(self.query(x_BxLxH), axis=-1).mean(-1))
        return super().__call__(x_BxLxH, rows)


class NormBlock(bert.AttentionBlock):
    self_attention_class = QueryNorm


class NormLayer(bert.Layer):
    attention_class = NormBlock


class NormModule(RobertaModule):
    layer_class = NormLayer


class SownMetric(Pretraining):
    def make_model(self):
        return families.make_module(self.config.model, self.info, module_class=NormModule)

    def metrics(self, logits_BxKxV, masked, intermediates):
        (norm_B,) = intermediates["roberta"]["encoder"]["layer"]["0"]["attention"]["self"]["norm"]
        return {"query_norm": Mean(norm_B, jnp.ones_like(norm_B))}


@pytest.mark.standard
@pytest.mark.parametrize("settings", [(), ("train.accumulate=2", "model.remat=true")])
def test_what_a_layer_sows_is_a_metric(settings):
    run = tiny_run(*settings)
    task = SownMetric(run.config, run.info, mesh=run.mesh)
    state, batch = task.init(), sharding.put_batch(random_batch(16), task.mesh, 16)
    masked = task.inputs(batch, 0)
    _, sown = task.module.forward(state.params, masked.ids_BxL, masked.attention_BxL, masked.positions_BxK)
    (norm_B,) = sown["roberta"]["encoder"]["layer"]["0"]["attention"]["self"]["norm"]
    expected = float(norm_B.mean())
    assert float(task.train_step(state, batch)[1]["query_norm"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.standard
def test_dropout_of_transformers_own_class():
    run = tiny_run("model.implementation=transformers", "model.hidden_dropout=0.3")
    params, (ids, mask) = run.init().params, inputs()
    key, rows = jax.random.key(0), np.arange(4, dtype=np.uint32)
    logits = [run.module.logits(params, ids, mask, None, key, rows + first) for first in (0, 0, 4)]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert np.abs(logits[0] - logits[2]).max() > 0.01, "other rows, the same places dropped"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.family=modernbert", "config.model.family = 'modernbert'"),
        ("data.isolate_documents=true", "config.data.isolate_documents = True"),
        ("model.attention=fused", "config.model.attention = 'fused'"),
        ("model.remat_feed_forward=1", "config.model.remat_feed_forward = 1"),
    ],
)
def test_what_transformers_own_class_cannot_do_is_refused(override, words):
    with pytest.raises(InputError, match=words) as error:
        tiny_config("model.implementation=transformers", override)
    assert "model.implementation = mlm" in str(error.value)


def test_weights_of_a_modernbert_without_head_are_taken_and_others_refused(tmp_path):
    model, (ids, mask) = make("FlaxModernBertForMaskedLM"), inputs()
    model.config.save_pretrained(tmp_path)
    body = {f"model.{name}": value for name, value in weights.to_torch(jax.device_get(model.params["model"])).items()}
    bare = {name.removeprefix("model."): value for name, value in body.items()}
    states = model(ids, mask, output_hidden_states=True).hidden_states
    for tensors in (body, bare):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        again = type(model).from_pretrained(str(tmp_path))(ids, mask, output_hidden_states=True)
        np.testing.assert_array_equal(again.hidden_states[-1], states[-1])
    save_file({f"encoder.{name}": value for name, value in bare.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors.*model/embeddings"):
        type(model).from_pretrained(str(tmp_path))
