"""bench --parts quality: two recipes in turns, a clock each, the same evaluation masks, when which loss is reached."""

import argparse
import contextlib
import json
import pathlib
import shutil
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlm import __main__
from mlm import config as configs
from mlm.bench import quality
from mlm.commands.bench import open_recipes
from mlm.data import batches
from mlm.inference import evaluate
from mlm.model import families, weights
from mlm.text import show
from mlm.workdir import Workdir
from tests.support.corpora import shard_rows
from tests.support.pytorch import run_torch, torch_python
from tests.support.refusals import refuse
from tests.support.tiny import TINY, tiny_config

pytestmark = pytest.mark.usefixtures("one_device")
SETTINGS = (*TINY, "data.lanes=4", "evaluate.batch=64")


@pytest.fixture(autouse=True)
def few_evaluations(monkeypatch):
    monkeypatch.setattr(quality, "EVALUATIONS", 3)


@pytest.fixture(scope="module")
def workdir(manifest, tokenizer_folder, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("quality")
    shutil.copytree(tokenizer_folder, folder / "tokenizer")
    shutil.copytree(manifest.folder, folder / "shards")
    return str(folder)


class Clock:
    """In place of time.monotonic: each look at it takes 10 ms, however busy the machine is."""

    seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.01
        return self.seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(quality.time, "monotonic", clock)
    return clock


def write_config(file: pathlib.Path, *overrides: str) -> str:
    """A config file: the tiny config, changed."""
    flat = configs.flatten(configs.load("configs/base.py", [*SETTINGS, *overrides]))
    lines = [f"    config.{key} = {value!r}" for key, value in flat.items()]
    head = ["from configs.base import get_config as base", "", "", "def get_config():", "    config = base()"]
    file.write_text("\n".join([*head, *lines, "    return config", ""]))
    return str(file)


def arguments(workdir: str, *more: str) -> list[str]:
    settings = (f"--config.{text}" for text in SETTINGS)
    return ["bench", "--parts", "quality", "--config=configs/base.py", f"--workdir={workdir}", *settings, *more]


def open_trainer(workdir, manifest, *overrides: str, seconds: float = 60.0) -> quality.Ours:
    config = tiny_config(*SETTINGS, *overrides)
    task = quality.open_task(config, Workdir(workdir), manifest, seconds)
    return quality.Ours(task, config)


@pytest.mark.standard
def test_they_take_turns_within_their_budgets(workdir, tmp_path, monkeypatch, capsys, clock):
    """Neither compiling nor evaluating count."""
    turns, train, evaluate = [], quality.Ours.train, quality.Ours.evaluate

    def recorded(trainer, share):
        turns.append((trainer.task.config.model.hidden_size, share))
        train(trainer, share)

    def takes_long(trainer):
        evaluate(trainer)
        clock.seconds += 10

    monkeypatch.setattr(quality.Ours, "train", recorded)
    monkeypatch.setattr(quality.Ours, "evaluate", takes_long)
    other = write_config(tmp_path / "base.py", "schedule.final_fraction=0.5", "model.hidden_size=64")
    plot = tmp_path / "curves.svg"
    flags = ["--seconds=0.6", f"--against={other}", "--json", f"--plot={plot}", "--config.schedule.warmup_steps=3"]
    assert __main__.main(arguments(workdir, *flags)) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["quality"]
    assert turns == [(size, n / 3) for n in (1, 2, 3) for size in (32, 64)]
    assert found["turn_seconds"] == pytest.approx(0.2)
    rows = found["recipes"]
    assert {key: row["name"] for key, row in rows.items()} == {"mlm": "configs/base.py", "against": other}
    for row in rows.values():
        curve = row["curve"]
        assert len(curve) == 4 and curve[0]["seconds"] == curve[0]["steps"] == 0
        assert all(0.2 * n <= line["seconds"] < 0.2 * n + 0.1 for n, line in enumerate(curve)), "the budget is kept"
        assert row["steps"] == curve[-1]["steps"] > 20 and row["tokens"] == row["steps"] * 16 * 32
        assert row["loss"] == curve[-1]["loss"] < curve[0]["loss"] and row["compile_seconds"] > 0
        assert row["best_loss"] == min(line["loss"] for line in curve)
    assert rows["mlm"]["learning_rate"] == pytest.approx(0, abs=1e-9), "the schedule ends with the budget"
    assert rows["against"]["learning_rate"] == pytest.approx(0.0015, rel=1e-4)
    winner, loser = sorted(rows.values(), key=lambda row: row["loss"])
    assert loser["reached_seconds"] is None and loser["ratio"] is None
    assert winner["reached_seconds"] == quality.seconds_to_reach(winner["curve"], loser["loss"]) > 0
    assert winner["ratio"] == pytest.approx(0.6 / winner["reached_seconds"])
    drawn = plot.read_text()
    assert drawn.count("<svg") == 1 and "<!-- base.py -->" in drawn and "<!-- base.py (against) -->" in drawn
    assert "quality: 0.6 of 0.6 s: mlm " in err


@pytest.mark.standard
def test_a_budget_replaces_the_steps_and_a_pause_is_not_of_it(workdir, manifest, clock):
    """Warmup and batch stages keep their share of the steps."""
    stages = "data.batch_stages=((8, 2),)"
    trainer = open_trainer(workdir, manifest, "schedule.warmup_steps=3", stages, seconds=1.8)
    config, rows, put = trainer.task.config, [], trainer._put
    trainer._put = lambda columns, share: rows.append(len(columns["epoch"])) or put(columns, share)
    assert (config.train.hours, config.train.steps) == (0.0005, 0)
    assert (config.schedule.warmup_fraction, config.schedule.warmup_steps) == (0.25, 0)
    trainer.train(0.1)
    assert 0.1 <= trainer._budget.share < 0.15 and 0 < trainer.learning_rate < 0.003 * 0.5, "in its warmup"
    clock.seconds += 100
    trainer.train(0.3)
    assert 0.3 <= trainer._budget.share < 0.35 and trainer.seconds == pytest.approx(0.3 * 1.8, abs=0.1)
    assert rows[0] == 8 and rows[-1] == 16 and rows == sorted(rows)


@pytest.mark.standard
def test_its_loss_is_that_of_evaluate(workdir, manifest, tmp_path):
    """On 15% token masks, whatever the recipe trains with; of the averaged parameters, if there are any."""
    trainer = open_trainer(workdir, manifest, "masking.kind=word", "masking.rate=0.3", "optimizer.ema_decay=0.9")
    trainer.train(0.005)
    trainer.evaluate()
    config = trainer.task.module.config.to_dict() | {"vocab_size": manifest.vocab_size}
    params = jax.device_get(trainer._state.ema)
    family = families.family_of(trainer.task.module.config)
    params = family.resize_vocabulary(params, manifest.vocab_size)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights.to_torch(params), tmp_path / "model.safetensors")
    scored = tiny_config(*SETTINGS, "masking.rate=0.15")
    found = evaluate.run(scored, Workdir(workdir), manifest, model=str(tmp_path), split="validation")
    assert trainer.curve[-1]["loss"] == found["loss"]


@pytest.mark.parametrize(
    ("losses", "target", "expected"),
    [
        ([8, 6, 4], 4, 20.0),
        ([8, 6, 4], 3.9, None),
        ([8, 6, 4], 9, 0.0),
        ([8, 4, 6, 3], 5, 7.5),  # the first time
        ([8, None, 4], 6, 10.0),
        ([None, None], 5, None),
    ],
)
def test_when_a_loss_is_reached(losses, target, expected):
    curve = [{"seconds": 10.0 * n, "steps": n, "loss": loss} for n, loss in enumerate(losses)]
    assert quality.seconds_to_reach(curve, target) == expected


def test_table(capsys):
    row = {"name": "a.py", "loss": 4.5, "best_loss": 4.25, "steps": 1200, "tokens": 98765, "compile_seconds": 7.25}
    one = row | {"reached_seconds": 150.0, "ratio": 2.0}
    versions = {"torch": "2.13", "transformers": "4.57", "device": "cpu", "dtype": "float32"}
    other = row | {"name": "b.py", "loss": None, "compile_seconds": None, "reached_seconds": None, "ratio": None}
    show(*quality.render({"seconds": 300, "turn_seconds": 7.5, "recipes": {"mlm": one, "torch": other | versions}}))
    _, first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first.split()[:6] == ["a.py", "4.5000", "4.2500", "1,200", "98,765", "7.2"] and "150.0 s, 2 times" in first
    assert " ".join(second.split()) == "b.py not finite 4.2500 1,200 98,765 - never"
    assert last == "PyTorch 2.13, transformers 4.57, cpu, float32."


def test_the_recipe_of_run_mlm_has_the_sizes_and_the_data_of_the_config():
    mine = configs.load("configs/quickstart.py", ["data.short_length=32", "data.batch_stages=((8, 5),)"])
    recipe = configs.flatten(quality.baseline(mine))
    changed = {key for key, value in configs.flatten(mine).items() if recipe[key] != value}
    kept = ("tokenizer.", "shards.", "corpus.", "train.", "mesh.", "model.layers", "model.h", "data.global_batch")
    assert {key for key in changed if key.startswith(kept)} == {"model.hidden_dropout"}
    assert {"optimizer.name", "masking.rate", "model.init", "data.short_length", "data.batch_stages"} <= changed


@pytest.mark.slow
def test_pytorch_s_loss_is_its_own(workdir, manifest):
    """On the rows of the shards, and on the same masked rows of the validation split by both."""
    config = quality.baseline(tiny_config(*SETTINGS))
    task, used = quality.open_task(config, Workdir(workdir), manifest, 2.0), 0.0
    with contextlib.ExitStack() as stack:
        torch = quality.Torch(task, config, torch_python(4), stack)
        rows = np.concatenate(shard_rows(manifest, "train"))
        np.testing.assert_array_equal(np.load(f"{torch._folder}/rows.npy"), rows)
        torch.evaluate()
        for share in (0.5, 1.0):
            begin, before = time.monotonic(), torch.seconds
            torch.train(share)
            used += time.monotonic() - begin
            assert 2 * share <= torch.seconds < used, "its pauses are not of the budget"
            if before < 2 * share:  # else the last step took longer than its turn, and there is none in this one
                assert max(0.0, 1e-3 * (1 - torch.seconds / 2)) <= torch.learning_rate <= 1e-3 * (1 - share)
            torch.evaluate()
        records = manifest.splits["validation"].records
        (batch,) = batches.eval_batches(manifest, split="validation", batch=records, rows=(0, records))
        columns = [batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch")]
        masked = jax.device_get(task.eval_masking(jax.random.key(task.config.evaluate.seed), *columns))
        arrays = {"ids": masked.ids_BxL.astype(np.int64), "attention": batch["attention_mask"].astype(np.int64)}
        np.savez(f"{torch._folder}/rows.npz", **arrays)
        run_torch(4, "tests/pytorch/logits.py", torch._folder, 32)
        row_N, prediction_N = np.nonzero(masked.weights_BxK > 0)
        log_probs = np.asarray(jax.nn.log_softmax(np.load(f"{torch._folder}/logits.npy")))
        chosen = row_N, masked.positions_BxK[row_N, prediction_N], masked.labels_BxK[row_N, prediction_N]
        theirs = -log_probs[chosen].mean(dtype=np.float64)
    losses = [line["loss"] for line in torch.curve]
    assert losses[0] > losses[-1] and torch.steps > 1
    assert losses[-1] == pytest.approx(theirs, rel=1e-5)


BAD = [
    ([], ["--seconds"]),
    (["--seconds=5", "--against=none.py"], ["--against=none.py"]),
    (["--seconds=5", "--against=OTHER"], ["--against=OTHER", "shards.length = 16", "32"]),
    (["--seconds=5", "--against=OTHER", "--torch=python"], ["--torch and --against"]),
    (["--seconds=5", "--plot=a.pdf"], ["--plot=a.pdf", ".png"]),
    (["--seconds=5", "--workdir=NONE"], ["NONE"]),
    (["--seconds=5", "--config.train.branch_from=a@3"], ["config.train.branch_from = a@3"]),
    (["--parts", "step", "--against=OTHER"], ["--against", "--parts quality"]),
]


@pytest.mark.parametrize(("flags", "words"), BAD)
def test_what_does_not_fit_is_refused(workdir, tmp_path, capsys, flags, words):
    other = write_config(tmp_path / "other.py", "shards.length=16")

    def with_paths(texts: list[str]) -> list[str]:
        return [text.replace("OTHER", other).replace("NONE", f"{tmp_path}/none") for text in texts]

    refuse(arguments(workdir, *with_paths(flags)), 2, *with_paths(words), capsys=capsys)


def test_both_are_on_the_data_of_the_config(tmp_path):
    config = tiny_config(*SETTINGS, "data.seed=7", "shards.dir=mine", "evaluate.seed=3")
    other = write_config(tmp_path / "other.py", "masking.rate=0.4", f"train.init_from={tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "roberta", "hidden_act": "relu"}')
    args = argparse.Namespace(against=other, config=other, torch="", workdir="")
    (name, _), (_, against) = open_recipes(args, config).values()
    assert name == f"{other}, overridden"
    assert (against.data.seed, against.shards.dir, against.evaluate.seed) == (7, "mine", 3)
    assert (against.masking.rate, against.model.activation) == (0.4, "relu"), "by its file, and from its model"
