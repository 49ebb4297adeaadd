"""What a config makes of the families: transformers' own classes in the loop, metrics of one's own, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm.errors import InputError
from mlm.model import families
from mlm.model.loss import Mean
from mlm.model.roberta import RobertaModule
from mlm.tasks.pretraining import Pretraining
from mlm.training import train
from tests.support.tiny import (
    INFO,
    assert_close,
    meshes_of,
    random_batch,
    slow,
    tiny_config,
    tiny_run,
)

STOCK = "model.implementation=transformers"


ROBERTA = {"max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-6}
BERT = {"max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "silu"}
BERT |= {"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.2}
MODERNBERT = {"norm_eps": 1e-6, "classifier_activation": "silu", "cls_token_id": 0}
MODERNBERT |= {"local_rope_theta": 7.0, "global_rope_theta": 9.0}
MODERNBERT |= {"attention_dropout": 0.3, "classifier_dropout": 0.2}
MODERNBERT |= {"mlp_dropout": 0.2, "embedding_dropout": 0.2}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("roberta", ROBERTA),
        ("xlm_roberta", ROBERTA | {"model_type": "xlm-roberta"}),
        ("bert", BERT),
        ("modernbert", MODERNBERT),
    ],
)
def test_transformers_config_says_what_ours_does(family, expected):
    settings = [f"family={family}", "layer_norm_eps=1e-6", "activation=silu"]
    settings += ["hidden_dropout=0.2", "attention_dropout=0.3"]
    if family == "modernbert":
        settings += ["local_rope_theta=7", "global_rope_theta=9"]
    model = tiny_config(*(f"model.{setting}" for setting in settings)).model
    config = families.find(family).make_config(model, 497, INFO.special_ids)
    expected = expected | {"vocab_size": 512, "pad_token_id": 1, "initializer_range": 0.02}
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.architectures == [f"{families.find(family).name}ForMaskedLM"]


@pytest.mark.parametrize("family", families.FAMILIES.values())
def test_a_family_s_parameters_are_where_it_says(family):
    """And a vocabulary is resized in word embedding and decoder's bias alone."""
    small, large = (
        jax.eval_shape(
            family.module(family.config_class(num_hidden_layers=2, vocab_size=size)).init_params,
            jax.random.key(0),
        )
        for size in (77, 80)
    )
    assert small.keys() == {family.body, *family.lm_head}
    assert families.at_path(small, family.stack).keys() == {"0", "1"}
    ones = jax.tree.map(lambda leaf: np.broadcast_to(1, leaf.shape), small)
    resized = family.resize_vocabulary(ones, 80)
    assert jax.tree.map(np.shape, resized) == jax.tree.map(np.shape, large)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.attention=fused"], r"config\.model\.attention = fused.* 32 tokens"),
        (
            ["model.family=modernbert", STOCK],
            r"config\.model\.family = 'modernbert'.*model\.implementation = mlm",
        ),
        (
            ["data.isolate_documents=true", STOCK],
            r"config\.data\.isolate_documents.*model\.implementation = mlm",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(overrides, words):
    with pytest.raises(InputError, match=words):
        tiny_run(*overrides)


def test_rows_longer_than_the_position_table_are_refused():
    with pytest.raises(InputError, match=r"config\.model\.positions = 64: .* 65 tokens"):
        families.make_module(tiny_config().model, dataclasses.replace(INFO, length=65))


# Transformers' own classes -------------------------------------------------------------------------------------------


@pytest.mark.standard
@pytest.mark.parametrize("family", ["roberta", slow("bert")])
def test_the_loop_trains_transformers_own_class(family):
    """Equal to ours in the loss, the gradient and the parameters of a step without dropout."""
    with meshes_of(1):
        ours, theirs = (
            tiny_run(f"model.family={family}", *keys, mesh=(1, 1, 1)) for keys in ((), (STOCK,))
        )
    params = ours.init().params  # transformers draws BERT's head wider
    (one, means), (other, stock) = (
        jax.jit(train.make_gradient(run))(params, random_batch(16), np.int32(0))
        for run in (ours, theirs)
    )
    assert_close(one, other, 1e-4, "gradient")
    assert float(means["loss"].sum) == pytest.approx(float(stock["loss"].sum), rel=1e-5)


# A module of one's own -----------------------------------------------------------------------------------------------


def entropy(logits_BxKxV):
    return -jnp.sum(jax.nn.softmax(logits_BxKxV) * jax.nn.log_softmax(logits_BxKxV), axis=(1, 2))


class Entropy(RobertaModule):
    def predict(self, x_BxKxH, noise):
        logits = super().predict(x_BxKxH, noise)
        self.sow("intermediates", "entropy", entropy(logits))
        return logits


class SownMetric(Pretraining):
    def make_model(self):
        return families.make_module(self.config.model, self.info, module_class=Entropy)

    def metrics(self, logits_BxKxV, masked, intermediates):
        (sown_B,) = intermediates["entropy"]
        ones_B = jnp.ones_like(sown_B)
        return {"sown": Mean(sown_B, ones_B), "expected": Mean(entropy(logits_BxKxV), ones_B)}


@pytest.mark.standard
@meshes_of(1)
def test_what_a_module_sows_is_a_metric():
    run = tiny_run("train.accumulate=2", "model.remat=true", mesh=(1, 1, 1))
    task = SownMetric(run.config, run.info, mesh=run.mesh)
    params = task.init().params
    _, means = jax.jit(train.make_gradient(task))(params, random_batch(16), np.int32(0))
    assert float(means["sown"].sum) == pytest.approx(float(means["expected"].sum), rel=1e-5)


def test_a_module_of_ones_own_isolates_documents_and_is_no_class_of_transformers():
    run = tiny_run("data.isolate_documents=true")
    assert (
        SownMetric(run.config, run.info, mesh=run.mesh).module.compute.cls_id
        == run.module.compute.cls_id
        == 0
    )
    with pytest.raises(InputError, match=r"config\.model\.implementation = transformers: Entropy "):
        SownMetric.without_data(tiny_config(STOCK))
    attention = type("Kernel", (Pretraining,), {"make_attention": lambda *_: None})
    with pytest.raises(
        InputError, match=r"config\.model\.implementation = transformers: .* Kernel\.make_attention"
    ):
        attention.without_data(tiny_config(STOCK))
