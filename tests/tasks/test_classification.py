"""Classification in the loop: it learns, resumes to the bit, compiles once a length, and scores whatever the batch."""

import dataclasses
import itertools
import pathlib

import jax
import numpy as np
import pytest

from mlm import __main__, logs
from mlm.data import examples as data
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.export import export
from mlm.model.families import ROBERTA
from mlm.pretrained import checkpoint_files
from mlm.tasks import classification
from mlm.training import sharding
from mlm.training.train import train as run_loop
from mlm.workdir import Workdir
from tests.support import labelled_texts
from tests.support.refusals import refuse
from tests.support.states import assert_same, back_to, state_of
from tests.support.tiny import command, flags, meshes_of, tiny_config

STEPS = 16  # three epochs of 83 rows in batches of 16
FAST = ("optimizer.learning_rate=0.01", "model.init_stddev=0.1")


def build(folder: pathlib.Path, tokenizer_folder: str, *overrides: str, pad_id: int = 1):
    config = tiny_config(*labelled_texts.settings(folder, tokenizer_folder, *overrides))
    settings = config.classify
    sources = {"train": settings.train, "validation": settings.validation}
    columns = data.Columns(settings.text, settings.label, settings.kind)
    tables, names = data.read_tables(sources, columns)
    examples = data.tokenize(
        tables, names, tokenizer_folder=tokenizer_folder, length=settings.length
    )
    special_ids = tokenizer.manifest_fields(tokenizer_folder)["special_ids"] | {"pad": pad_id}
    body = ROBERTA.make_config(config.model, examples.vocab_size, special_ids)
    return config, examples, classification.Classification(config, examples, body, None)


def evaluate(task, params) -> tuple[dict[str, float], np.ndarray]:
    """Scores and predictions of the validation rows."""
    return classification.evaluate(
        task.config, task.examples, task.mesh, task.eval_step, params, "validation"
    )


def train(task, config):
    """Returns the state after all updates, without the loop, and the metrics of the last."""
    state = task.initial_state()
    for columns in itertools.islice(task.batches(0), task.stages.steps):
        batch = sharding.put_batch(columns, task.mesh, config.data.global_batch)
        state, metrics = task.train_step(state, batch)
    return state, metrics


@pytest.mark.standard
def test_the_loop_learns_and_compiles_once_a_length(tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setattr(data, "MULTIPLE", 8)
    overrides = ("train.epochs=4", "data.global_batch=4", "log.every=1")
    metric = "classify.metric=('accuracy',)"
    with meshes_of(2):
        config, examples, task = build(tmp_path, tokenizer_folder, *FAST, *overrides, metric)
    workdir = Workdir(str(tmp_path / "run"))
    run_loop(config, workdir, task)
    scores = logs.read(workdir.metrics, "eval")[-1]
    losses = [line["loss"] for line in logs.read(workdir.metrics, "train")]
    assert task.stages.steps == len(losses) == 83
    assert losses[0] == pytest.approx(np.log(3), abs=0.3) and np.mean(losses[-20:]) < 0.7
    assert scores["accuracy"] > 0.6 and scores["rows"] == 29
    assert task.minimized_metric(scores) == 1 - scores["accuracy"]
    widths = {
        batch["input_ids"].shape[1]
        for batch in itertools.islice(task.batches(0), task.stages.steps)
    }
    assert task.train_step._cache_size() == len(widths) > 1
    assert widths <= set(examples.lengths()) and len(examples.lengths()) == 3


def test_a_classifier_is_evaluated_without_dropout(tmp_path, tokenizer_folder):
    rates = ("model.hidden_dropout=0.5", "model.attention_dropout=0.5")
    scores = []
    params = None
    for overrides in ((), rates):
        with meshes_of(1):
            *_, task = build(tmp_path, tokenizer_folder, "model.init_stddev=0.3", *overrides)
        params = params or task.initial_state().params
        scores.append(evaluate(task, params))
    assert scores[0][0] == scores[1][0] and np.array_equal(scores[0][1], scores[1][1])


def losses_of(task, params, batch: dict) -> np.ndarray:
    """Of what has a label, by the module."""
    logits = task.module.logits(params, batch["input_ids"], batch["attention_mask"])
    labels = batch["label"]
    return -np.asarray(jax.nn.log_softmax(logits))[labels >= 0, labels[labels >= 0]]


def test_rows_without_a_label_are_in_no_score(tmp_path, tokenizer_folder):
    with meshes_of(1):
        config, examples, task = build(tmp_path, tokenizer_folder, "model.init_stddev=0.3")
    params = task.initial_state().params
    split = examples.splits["validation"]
    labels = np.where(np.arange(len(split)) % 2, split.labels_N, -1)
    partly = dataclasses.replace(split, labels_N=labels)
    task.examples = dataclasses.replace(examples, splits=examples.splits | {"validation": partly})
    scores, predicted = evaluate(task, params)
    batch = partly.batch(np.arange(len(split)), config.classify.length, examples.pad_id)
    losses = losses_of(task, params, batch)
    assert scores["rows"] == len(losses) == len(split) // 2 and len(predicted) == len(split)
    assert scores["loss"] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.standard
def test_it_predicts_numbers(tmp_path, tokenizer_folder):
    overrides = ("classify.kind=regression", "classify.label=score", "train.epochs=20")
    with meshes_of(2):
        config, _, task = build(tmp_path, tokenizer_folder, *FAST, *overrides)
    state, metrics = train(task, config)
    scores = task.evaluate(state.params)
    assert scores.keys() == {"loss", "mse", "pearson", "spearman", "rows"}
    assert scores["pearson"] > 0.6 and scores["mse"] == pytest.approx(scores["loss"], rel=1e-5)
    assert task.minimized_metric(scores) == scores["loss"]
    assert "accuracy" not in metrics, "of a number there is none"


@pytest.mark.standard
def test_it_labels_words_and_those_that_are_cut_off_are_wrong(tmp_path, tokenizer_folder):
    """Of rows that are too short for some words, which have no part in the loss."""
    overrides = ("train.epochs=8", "classify.metric=('f1',)")
    words = (*labelled_texts.word_settings(tmp_path), "classify.length=12")
    with meshes_of(2):
        config, examples, task = build(tmp_path, tokenizer_folder, *words, *FAST, *overrides)
    params = train(task, config)[0].params
    split = examples.splits["validation"]
    found, predicted = evaluate(task, params)
    cut = split.words.token_W < 0
    assert found["words"] == len(split.words.texts) and found["rows"] == 29
    assert found["words_cut"] == cut.sum() > 0 and (predicted[cut] == -1).all()
    assert found["accuracy"] == np.mean(predicted == split.labels_N)
    assert np.mean((predicted == split.labels_N)[~cut]) > 0.7 and found["loss"] < 0.8
    assert task.minimized_metric(found) == 1 - found["f1"]
    batch = split.batch(np.arange(len(split)), 12, examples.pad_id)
    losses = losses_of(task, params, batch)
    assert len(losses) == (~cut).sum()
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    hidden = config.model.hidden_size
    layer = 4 * hidden + 2 * config.model.intermediate_size + 2 * task._mean_length
    expected = 6 * hidden * (layer + len(examples.labels))
    assert task.flops_per_token(1) == pytest.approx(expected), "its head has no dense layer"


def test_what_can_not_be_right_is_refused(tmp_path, tokenizer_folder):
    few = labelled_texts.write_csv(tmp_path / "few.csv", labelled_texts.rows(9))
    for overrides, words in (
        (["classify.length=65"], r"classify\.length = 65: the model reads 64 tokens"),
        (["data.lanes=16", f"classify.train={few}"], r"lanes = 16: .* only 9 training rows"),
        (["data.global_batch=12"], "12 rows can't be split over 8 devices"),
        (["train.epochs=1", "schedule.warmup=999"], r"warmup = 999: the run has \d+ steps"),
    ):
        with pytest.raises(InputError, match=words):
            build(tmp_path, tokenizer_folder, *overrides)
    with pytest.raises(InputError, match="pad id 0, its tokenizer 600 and 1"):
        build(tmp_path, tokenizer_folder, pad_id=0)


# The command ----------------------------------------------------------------------------------------------------------


def arguments(workdir: pathlib.Path, data_folder: pathlib.Path, tokenizer_folder: str) -> list[str]:
    settings = labelled_texts.settings(data_folder, tokenizer_folder)
    dropout = ("model.hidden_dropout=0.1", "optimizer.ema_decay=0.9")
    return command("classify", workdir, *settings, *dropout, "log.every=4", "checkpoint.every=4")


@pytest.fixture(scope="module")
def here(tokenizer_folder, tmp_path_factory) -> pathlib.Path:
    """The run of the command, in this process."""
    workdir = tmp_path_factory.mktemp("here")
    rows = tmp_path_factory.mktemp("rows")
    with meshes_of(2):
        assert __main__.main(arguments(workdir, rows, tokenizer_folder)) == 0
    return workdir


@pytest.mark.standard
def test_each_epoch_is_saved_and_a_resumed_run_is_the_same(
    here, tokenizer_folder, tmp_path, capsys, monkeypatch
):
    """From the end of the second epoch, on the same rows in another folder; others are refused, but of a test."""
    lines = {kind: logs.read(here / "metrics.jsonl", kind) for kind in ("eval", "train")}
    assert [line["step"] for line in lines["eval"]] == [6, 11, 16]
    assert [line["step"] for line in lines["train"]] == [4, 8, 12, 16]
    assert checkpoint_files.complete_steps(here / "checkpoints")[-3:] == [11, 12, 16]
    assert (here / "report.html").is_file() and (here / "export" / "proof.json").is_file()

    again = back_to(here, tmp_path / "again", 11)
    # the proof is that of the first run
    monkeypatch.setattr(export, "check_files", lambda *_: [])
    line = arguments(again, tmp_path, tokenizer_folder)
    with meshes_of(2):
        assert __main__.main(line) == 0
        assert (again / "metrics.jsonl").read_text() == (here / "metrics.jsonl").read_text()
        assert_same(state_of(here, STEPS), state_of(again, STEPS))
        test = labelled_texts.write_csv(tmp_path / "test.csv", labelled_texts.rows(17, seed=2))
        assert __main__.main([*line, *flags(f"classify.test={test}")]) == 0, "it chooses nothing"
        changed = labelled_texts.rows(83)
        changed[40]["label"] = "money" if changed[40]["label"] != "money" else "animal"
        other = labelled_texts.write_csv(tmp_path / "other.csv", changed)
        line += flags(f"classify.train={other}")
        refuse(line, 2, "other shards or rows", capsys=capsys)
