"""From the config to the steps: which masks, which rate, which length a step has."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from mlm.errors import InputError
from mlm.inference import evaluate
from mlm.model import families
from mlm.model.masking import SpanMasking, WordMasking
from mlm.model.token_masking import TokenMasking, rate_schedule
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.training.train import split_rows
from mlm.workdir import Workdir
from tests.support.tiny import INFO, pretrain, random_batch, tiny_config, tiny_run

WORDS = np.arange(INFO.vocab_size) % 3 > 0


@pytest.mark.parametrize(("kind", "of"), [("token", TokenMasking), ("word", WordMasking), ("span", SpanMasking)])
def test_the_config_chooses_the_masks(kind, of):
    config = tiny_config(
        f"masking.kind={kind}", "masking.span_p=0.3", "masking.longest=7", "masking.static=true", "masking.end_rate=0.4"
    )
    model = Pretraining(config, INFO, word_starts_V=WORDS)
    assert type(model.masking) is of
    assert (model.masking.rate, model.masking.end_rate, model.masking.static) == (0.2, 0.4, True)
    assert (model.eval_masking.rate, model.eval_masking.end_rate) == (0.2, 0.0)
    assert getattr(model.masking, "longest", 7) == 7
    assert getattr(model.masking, "span_p", 0.3) == 0.3


def test_a_tokenizer_of_another_size_is_refused():
    with pytest.raises(InputError, match=r"masking.kind = word: the tokenizer has 499 entries, the shards .* 500"):
        Pretraining(tiny_config("masking.kind=word"), INFO, word_starts_V=WORDS[1:])


def test_the_rate_goes_from_the_first_step_to_the_last():
    assert rate_schedule(0.3, 0.0, 12) is None
    rate = rate_schedule(0.3, 0.15, 11)
    np.testing.assert_allclose([rate(step) for step in (0, 5, 10)], [0.3, 0.225, 0.15], rtol=1e-6)
    assert tiny_run("masking.rate=0.3", "masking.end_rate=0.1").flops_per_token(32) == pytest.approx(
        tiny_run("masking.rate=0.2").flops_per_token(32)
    )


def test_the_step_predicts_at_the_rate_of_its_position():
    run = tiny_run("masking.rate=0.5", "masking.end_rate=0.1", "train.steps=3", "log.every=1")
    state, batch = run.init(), sharding.put_batch(random_batch(), run.mesh, 16)
    for rate in (0.5, 0.3, 0.1):
        state, _ = run.train_step(state, batch)
        expected = rate * np.sum(random_batch()["input_ids"] > 4)
        assert abs(float(state.window["loss"].weight) - expected) < 8, "16 rows, each rounded up or down at random"
    assert run.train_step._cache_size() == 1, "one trace for all rates"


@pytest.mark.parametrize("kind", ["word", "span"])
def test_the_step_takes_the_masks_of_words(kind):
    mesh = sharding.make_mesh(data=8, fsdp=1, tensor=1)
    run = Pretraining(tiny_config(f"masking.kind={kind}"), INFO, mesh=mesh, word_starts_V=WORDS)
    state, metrics = run.train_step(run.init(), sharding.put_batch(random_batch(), mesh, 16))
    assert np.isfinite(metrics["loss"])
    assert 0.1 < float(state.window["loss"].weight) / np.sum(random_batch()["input_ids"] > 4) < 0.3


def test_words_need_a_tokenizer(manifest, tmp_path):
    with pytest.raises(InputError, match=r"tokenizer.json: there is no such file; train a tokenizer first"):
        pretrain(tiny_config("masking.kind=word", "data.lanes=4"), Workdir(str(tmp_path)), manifest)


@pytest.mark.slow
def test_a_run_and_the_command_evaluate_read_and_mask_alike(manifest, tokenizer_folder, tmp_path):
    """Whole words, a rate that changes, documents isolated: the scores of the loop and of `evaluate` are the same."""
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(tokenizer_folder, str(workdir.tokenizer))
    settings = ["data.lanes=4", "train.steps=3", "model.init_stddev=0.3", "masking.end_rate=0.5"]
    config = tiny_config(*settings, "masking.kind=word", "data.isolate_documents=true")
    scores = pretrain(config, workdir, manifest)
    again = evaluate.run(config, workdir, manifest, model="", split="validation")
    assert again["predictions"] == scores["predictions"]
    assert again["loss"] == pytest.approx(scores["loss"], rel=1e-5)
    for key, value in (("masking.kind", "token"), ("data.isolate_documents", "false")):
        other = tiny_config(*settings, "masking.kind=word", "data.isolate_documents=true", f"{key}={value}")
        found = evaluate.run(other, workdir, manifest, model="", split="validation")
        assert found["loss"] != pytest.approx(scores["loss"], rel=1e-3), key
    entries = manifest.splits["validation"].records * 32
    assert 0.1 < again["predictions"] / entries < 0.22, (
        "the evaluation masks at masking.rate = 0.2, whatever end_rate is"
    )


# The schedule of lengths ---------------------------------------------------------------------------------------------


def test_long_rows_are_split():
    batch = random_batch(16, seed=2)
    rows = jax.tree.map(np.asarray, split_rows(jax.tree.map(jax.numpy.asarray, batch), 8))
    assert rows["input_ids"].shape == rows["attention_mask"].shape == (64, 8)
    assert np.array_equal(rows["input_ids"].reshape(16, 32), batch["input_ids"])
    assert np.array_equal(rows["attention_mask"].reshape(16, 32), batch["attention_mask"])
    assert rows["record_id"].tolist() == [4 * int(record) + part for record in batch["record_id"] for part in range(4)]
    assert rows["record_id"].dtype == rows["epoch"].dtype == np.uint32
    assert len(set(rows["record_id"].tolist())) == 64
    assert split_rows(batch, 32) is split_rows(batch, None) is batch


@pytest.mark.slow
def test_a_short_step_is_the_step_on_rows_of_that_length():
    settings = ("train.steps=10", "train.accumulate=2", "model.positions=32", "model.hidden_dropout=0.1")
    run = tiny_run("data.short_length=8", "data.short_share=0.7", *settings)
    assert [run.stages.stage_at(step).length for step in (1, 7, 8, 10)] == [8, 8, 32, 32]
    batch = random_batch(16)
    state, metrics = run.train_step(run.init(), sharding.put_batch(batch, run.mesh, 16), 8)

    short_info = dataclasses.replace(INFO, length=8)
    short = tiny_run("shards.length=8", "data.global_batch=64", *settings, info=short_info)
    rows = {
        "input_ids": batch["input_ids"].reshape(64, 8),
        "attention_mask": batch["attention_mask"].reshape(64, 8),
        "record_id": np.repeat(4 * batch["record_id"], 4) + np.tile(np.arange(4, dtype=np.uint32), 16),
        "epoch": np.repeat(batch["epoch"], 4),
    }
    state2, metrics2 = short.train_step(short.init(), sharding.put_batch(rows, short.mesh, 64))
    assert float(metrics["loss"]) == pytest.approx(float(metrics2["loss"]), rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(metrics2["grad_norm"]), rel=1e-5)
    assert float(state.window["loss"].weight) == float(state2.window["loss"].weight)


def test_a_kernel_that_cannot_do_the_short_rows_is_refused():
    with pytest.raises(
        InputError, match=r"config.model.attention = fused: the kernel does not support rows of 64 tokens"
    ):
        tiny_run(
            "data.short_length=64",
            "shards.length=128",
            "model.positions=128",
            "model.attention=fused",
            "model.hidden_size=128",
            info=dataclasses.replace(INFO, length=128),
        )


@pytest.mark.parametrize(("layers", "every", "windows"), [(2, 3, [0, 8]), (2, 1, [0]), (1, 3, [0])])
def test_kernels_are_made_of_the_windows_that_layers_have(layers, every, windows):
    sizes = (f"model.layers={layers}", f"model.global_every={every}", "model.local_attention=16")
    made = []
    families.make_module(tiny_config("model.family=modernbert", *sizes).model, INFO).with_attention(made.append)
    assert sorted(made) == windows


def test_flops_follow_the_length():
    run = tiny_run("data.short_length=16", "data.short_share=0.5")
    alone = tiny_run("shards.length=16", info=dataclasses.replace(INFO, length=16))
    assert run.flops_per_token(16) == alone.flops_per_token(16) < run.flops_per_token(32)
