"""From the config to the steps: which masks, which rate, which length a step has."""

import dataclasses
import shutil

import numpy as np
import pytest

from mlm.errors import InputError
from mlm.inference import evaluate
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.workdir import Workdir
from tests.support.tiny import INFO, meshes_of, pretrain, random_batch, tiny_config, tiny_run

WORDS = np.arange(INFO.vocab_size) % 3 > 0


@pytest.mark.standard
@meshes_of(1)
def test_the_step_predicts_at_the_rate_of_its_position():
    """Here, spans of whole words."""
    settings = ("masking.kind=span", "masking.rate=0.5", "masking.end_rate=0.1", "train.steps=3", "log.every=4")
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1)
    run = Pretraining(tiny_config(*settings), INFO, mesh=mesh, word_starts_V=WORDS)
    assert run.eval_masking == dataclasses.replace(run.masking, end_rate=0.0)
    state, batch, before = run.init(), sharding.put_batch(random_batch(), run.mesh, 16), 0
    for rate in (0.5, 0.3, 0.1):
        state, _ = run.train_step(state, batch)
        expected, weight = rate * np.sum(random_batch()["input_ids"] > 4), float(state.window["loss"].weight)
        assert abs(weight - before - expected) < 8, "16 rows, each rounded up or down at random"
        before = weight
    assert run.train_step._cache_size() == 1, "one trace for all rates"


@pytest.mark.standard
def test_words_need_a_tokenizer(manifest, tmp_path):
    with pytest.raises(InputError, match=r"tokenizer.json: there is no such file; train a tokenizer first"):
        pretrain(tiny_config("masking.kind=word", "data.lanes=4"), Workdir(str(tmp_path)), manifest)


@pytest.mark.slow
@meshes_of(1)
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
    entries = manifest.splits["validation"].records * 32
    assert 0.1 < again["predictions"] / entries < 0.22, (
        "the evaluation masks at masking.rate = 0.2, whatever end_rate is"
    )


# The schedule of lengths ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_short_step_is_the_step_on_rows_of_that_length():
    settings = ("train.steps=10", "train.accumulate=2", "model.positions=32", "model.hidden_dropout=0.1")
    run = tiny_run("data.short_length=8", "data.short_share=0.7", *settings)
    assert [run.stages.stage_at(step).length for step in (1, 7, 8, 10)] == [8, 8, 32, 32]
    batch = random_batch(16)
    state, metrics = run.train_step(run.init(), sharding.put_batch(batch, run.mesh, 16), 8)

    short_info = dataclasses.replace(INFO, length=8)
    short = tiny_run("shards.length=8", "data.global_batch=64", *settings, info=short_info)
    rows = {name: batch[name].reshape(64, 8) for name in ("input_ids", "attention_mask")}
    rows["record_id"] = np.repeat(4 * batch["record_id"], 4) + np.tile(np.arange(4, dtype=np.uint32), 16)
    rows["epoch"] = np.repeat(batch["epoch"], 4)
    state2, metrics2 = short.train_step(short.init(), sharding.put_batch(rows, short.mesh, 64))
    assert float(metrics["loss"]) == pytest.approx(float(metrics2["loss"]), rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(metrics2["grad_norm"]), rel=1e-5)
    assert float(state.window["loss"].weight) == float(state2.window["loss"].weight)
