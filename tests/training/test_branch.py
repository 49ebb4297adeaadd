"""Branches: one that changes nothing is the run it left, to the bit; what may change does, the rest is refused."""

import json
import pathlib
import shutil
from collections.abc import Iterable

import jax
import numpy as np
import pytest

from mlm import __main__
from mlm import config as configs
from mlm.commands.tokenizer import make_tokenizer
from mlm.data import tokenizer
from mlm.errors import DamageError, InputError
from mlm.pretrained import checkpoint_files, locate
from mlm.tasks.pretraining import Pretraining
from mlm.training import average, branch, sharding
from mlm.workdir import Workdir
from tests.support.corpora import train_tokenizer, write_shards
from tests.support.processes import copy, run, train_arguments
from tests.support.refusals import refuse
from tests.support.states import assert_same, lines_after, meta_of, state_of
from tests.support.tiny import pretrain, tiny_config

pytestmark = pytest.mark.usefixtures("one_device")
SETTINGS = (
    "data.lanes=4",
    "checkpoint.every=6",
    "checkpoint.keep=9",
    "evaluate.every=4",
    "log.every=4",
    "model.hidden_dropout=0.1",
    "masking.end_rate=0.1",
    "optimizer.ema_decay=0.9",
    "schedule.name=wsd",
    "schedule.decay_fraction=0.25",
)
POSITIONS = "position_embeddings"


@pytest.fixture(scope="module")
def trunk(one_device, manifest, tmp_path_factory) -> pathlib.Path:
    """A run of 12 steps, with checkpoints of the steps 6 and 12."""
    workdir = tmp_path_factory.mktemp("trunk")
    pretrain(tiny_config(*SETTINGS), Workdir(str(workdir)), manifest)
    return workdir


def start(trunk: pathlib.Path, path: pathlib.Path, manifest, *overrides: str, step: int = 6) -> pathlib.Path:
    """Trains a branch of the trunk; returns its folder."""
    pretrain(tiny_config(*SETTINGS, f"train.branch_from={trunk}@{step}", *overrides), Workdir(str(path)), manifest)
    return path


def leaves_of(state: Iterable) -> list[bytes]:
    return sorted(np.asarray(leaf).tobytes() for leaf in state)


@pytest.mark.standard
def test_a_branch_that_changes_nothing_is_the_run_it_left(trunk, manifest, tmp_path):
    start(trunk, tmp_path, manifest)
    assert_same(state_of(trunk, 12), state_of(tmp_path, 12))
    assert lines_after(tmp_path, 0) == lines_after(trunk, 6), "the window of the log goes on within it"
    assert [line["step"] for line in lines_after(tmp_path, 0)] == [8, 8, 12, 12]
    whole, half, saved = (
        checkpoint_files.read_meta(Workdir(str(folder)).checkpoints, step)
        for folder, step in ((trunk, 12), (trunk, 6), (tmp_path, 12))
    )
    lineage = {"from": str(trunk), "step": 6, "config_changes": [], "same_data": True, "same_rows": True}
    assert saved["branch"] == lineage | {"useful_flops": half["useful_flops"]}
    assert half["useful_flops"] < saved["useful_flops"] == pytest.approx(whole["useful_flops"]), "with the trunk's"
    assert checkpoint_files.complete_steps(Workdir(str(trunk)).checkpoints) == [6, 12]


@pytest.mark.slow
def test_later_starts_resume_the_branch(trunk, manifest, tmp_path):
    overrides = ("train.steps=10", "checkpoint.every=2", "data.seed=7")
    start(trunk, tmp_path / "a", manifest, *overrides)
    start(trunk, tmp_path / "b", manifest, *overrides)
    folder = Workdir(str(tmp_path / "b")).checkpoints
    checkpoint_files.set_aside(folder, 10, "later")
    start(trunk, tmp_path / "b", manifest, *overrides)
    assert_same(state_of(tmp_path / "a", 10), state_of(tmp_path / "b", 10))
    assert lines_after(tmp_path / "a", 0) == lines_after(tmp_path / "b", 0)
    timing = map(json.loads, (tmp_path / "b" / "timing.jsonl").read_text().splitlines())
    assert [line["step"] for line in timing if line["kind"] == "start"] == [6, 8]
    branch = checkpoint_files.read_meta(folder, 10)["branch"]
    assert branch["config_changes"] == ["checkpoint.every: 6 -> 2", "data.seed: 0 -> 7", "train.steps: 12 -> 10"]
    expected = f"step 6 of {trunk}, with checkpoint.every: 6 -> 2, data.seed: 0 -> 7, train.steps: 12 -> 10"
    assert locate.describe_branch({"branch": branch}) == expected


@pytest.mark.standard
def test_what_may_change_changes(trunk, manifest, tmp_path):
    """A longer table of positions, another schedule, batch and rate: all but the new rows comes from the trunk."""
    config = tiny_config(*SETTINGS, f"train.branch_from={trunk}@6", "model.positions=80", "train.steps=20",
                         "schedule.name=constant", "data.global_batch=8", "optimizer.learning_rate=0.001",
                         "optimizer.weight_decay=0.2", "optimizer.ema_decay=0.5", "masking.rate=0.3")  # fmt: skip
    workdir = Workdir(str(tmp_path))
    task = Pretraining.open(config, workdir, manifest)
    source = branch.open_source(meta_of(task), workdir, task.stages)
    found = branch.restore(source, task.abstract_state, task.initial_state)
    assert sharding.shardings_of(found) == sharding.shardings_of(task.abstract_state)
    old, fresh = state_of(trunk, 6), task.initial_state()
    leaves, _ = jax.tree_util.tree_flatten_with_path(found)
    by_size = {path: np.asarray(leaf) for path, leaf in leaves if POSITIONS in jax.tree_util.keystr(path)}
    assert len(by_size) == 4 and {leaf.shape for leaf in by_size.values()} == {(82, 32)}, "parameter, ema, two moments"
    for path, leaf in by_size.items():
        name = jax.tree_util.keystr(path)
        kept = next(value for key, value in old.items() if POSITIONS in key and np.array_equal(value, leaf[:66]))
        assert kept.any(), name
        new = np.asarray(fresh.params["roberta"]["embeddings"]["position_embeddings"]["embedding"])[66:]
        assert np.allclose(leaf[66:], 0 if "opt_state" in name else new, rtol=1e-5, atol=0), name
    assert int(found.step) == 6
    pretrain(config, workdir, manifest)
    rates = [line["learning_rate"] for line in lines_after(tmp_path, 0) if line["kind"] == "train"]
    assert rates == pytest.approx([0.001] * len(rates)) and len(rates) == 4
    changes = checkpoint_files.read_meta(workdir.checkpoints, 20)["branch"]["config_changes"]
    assert "model.positions: 64 -> 80" in changes and len(changes) == 8
    later = configs.replace(config, {"checkpoint.milestones": ("words:1k",)})
    with pytest.raises(InputError, match=r"@6 read different rows, so words can't be counted across both "):
        pretrain(later, workdir, manifest)


@pytest.mark.slow
def test_a_branch_reads_longer_rows(texts, tokenizer_folder, manifest, tmp_path):
    """As modernbert_base_long.py: other rows, of twice the length, in other batches, and another rotary base."""
    modern = ("model.family=modernbert", "model.layers=2", "model.local_attention=16", "data.lanes=2")
    pretrain(tiny_config(*SETTINGS, *modern, "data.batch_stages=((8, 4),)"), Workdir(str(tmp_path / "trunk")), manifest)
    shutil.copytree(tokenizer_folder, tmp_path / "trunk" / "tokenizer")
    workdir, rows = Workdir(str(tmp_path / "long")), ("data.batch_stages=()", "data.global_batch=4", "shards.length=64")
    branched = (*modern, f"train.branch_from={tmp_path}/trunk@6", "model.global_rope_theta=160000")
    config = tiny_config(*SETTINGS, *branched, *rows, "checkpoint.every=1", "optimizer.learning_rate=0.001")
    make_tokenizer(config, workdir)
    longer = write_shards(texts[:400], tmp_path / "shards", str(workdir.tokenizer), length=64)
    task = Pretraining.open(config, workdir, longer)
    source = branch.open_source(meta_of(task), workdir, task.stages)
    found, old = branch.restore(source, task.abstract_state, task.initial_state), state_of(tmp_path / "trunk", 6)
    assert leaves_of(jax.tree.leaves(found)) == leaves_of(old.values())
    pretrain(config, workdir, longer)
    assert next(task.batches(6))["input_ids"].shape == (4, 64) and task.tokens_read(7) == 7 * 4 * 64
    assert json.loads((tmp_path / "long" / "metrics.jsonl").read_text().splitlines()[-1])["loss"] < np.log(600)
    own = state_of(tmp_path / "long", 7)
    assert all(value.shape == own[name].shape for name, value in old.items())
    with pytest.raises(InputError, match=r"@6: it read batches 1 to 4 of 8 rows, batches 5 to 6 of 16 rows; set"):
        pretrain(tiny_config(*SETTINGS, *branched, *rows[:2]), Workdir(str(tmp_path / "short")), manifest)


def test_run_copies_the_tokenizer_of_the_source(trunk, tokenizer_folder, tmp_path, capsys):
    copied = copy(trunk, tmp_path / "trunk")
    shutil.copytree(tokenizer_folder, copied / "tokenizer")
    workdir, config = Workdir(str(tmp_path / "new")), tiny_config(f"train.branch_from={copied}@6")
    make_tokenizer(config, workdir)
    assert tokenizer.fingerprint(str(workdir.tokenizer)) == tokenizer.fingerprint(tokenizer_folder)
    shutil.rmtree(copied)
    make_tokenizer(config, workdir)
    arguments = ["tokenizer", "--config=configs/base.py", f"--workdir={tmp_path / 'other'}"]
    arguments.append(f"--config.train.branch_from={copied}@6")
    refuse(arguments, 2, f"train.branch_from = {copied}@6", "no checkpoints", "WORKDIR@STEP", capsys=capsys)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("overrides", "step", "sentence"),
    [
        ((), 7, r"train.branch_from = .*@7: there is no complete checkpoint of step 7; those that are there: 6, 12\.$"),
        (("train.branch_from=nowhere@6",), 6, r"nowhere@6: no checkpoints are there; name a workdir and one of its"),
        (("model.hidden_size=16",), 6, r"can't change these keys; set them back:\n  model.hidden_size: 32 -> 16$"),
        (("optimizer.name=lion", "model.layers=2"), 6, r"\n  model.layers: 1 -> 2\n  opt.*name: 'adamw' -> 'lion'"),
        (("optimizer.ema_decay=0",), 6, r"\n  optimizer.ema_decay: 0.9 -> 0.0$"),
        (("optimizer.clip_norm=1",), 6, r"\n  optimizer.clip_norm: 0.0 -> 1.0$"),
        (("data.batch_stages=((8, 4),)", "data.skip_batches=('2:3',)"), 6,
         r"@6: it read batches 1 to 6 of 16 rows; set data.batch_stages and data.skip_batches so that this run"),
        (("data.global_batch=8", "checkpoint.milestones=('words:1k',)"), 6,
         r"^config.checkpoint.milestones: .*@6 read different rows, so words can't be counted across"),
        (("train.steps=6",), 6, r"would end after step 6, but the branch starts after step 6; train longer\.$"),
    ],
)  # fmt: skip
def test_what_may_not_is_refused(trunk, manifest, tmp_path, overrides, step, sentence):
    with pytest.raises(InputError, match=sentence):
        start(trunk, tmp_path, manifest, *overrides, step=step)
    assert not (tmp_path / "config.json").exists()


def test_words_are_not_counted_over_the_rows_of_an_earlier_run(trunk, manifest, tmp_path):
    """The trunk, as if it had branched off from a run that read other rows."""
    other = copy(trunk, tmp_path / "other")
    folder = Workdir(str(other)).checkpoints
    file = folder / "6" / "meta" / "metadata"
    lineage = {"from": "first", "step": 2, "config_changes": [], "same_data": False, "same_rows": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"branch": lineage}))
    checkpoint_files.write_hashes(folder, 6)
    with pytest.raises(InputError, match=r"@6 read different rows, so words can't be counted across both runs"):
        start(other, tmp_path / "new", manifest, "checkpoint.milestones=('words:1k',)")


def test_other_sources_are_refused(trunk, manifest, tmp_path, tokenizer_folder):
    mean = Workdir(str(tmp_path / "mean"))
    average.write_mean(mean, *average.choose([f"{trunk}@6,12"], mean))
    with pytest.raises(InputError, match="@12: holds an average, not the state of pretraining; name a pretraining run"):
        start(mean.root, tmp_path / "new", manifest, step=12)
    other = copy(trunk, tmp_path / "other")
    folder = Workdir(str(other)).checkpoints
    file = folder / "6" / "meta" / "metadata"
    meta = json.loads(file.read_text())
    for dataset, sentence in (
        ({"labels": ["a", "b"]}, "holds a classifier, not"),
        ({"special_ids": meta["dataset"]["special_ids"] | {"mask": 7}}, "was trained with another tokenizer; use its "),
    ):
        file.write_text(json.dumps(meta | {"dataset": meta["dataset"] | dataset}))
        with pytest.raises(DamageError, match=r"checkpoints/6: the file meta/metadata "):
            start(other, tmp_path / "new", manifest)
        checkpoint_files.write_hashes(folder, 6)
        with pytest.raises(InputError, match=sentence):
            start(other, tmp_path / "new", manifest)
    shutil.copytree(tokenizer_folder, trunk / "tokenizer")
    shutil.copytree(tokenizer_folder, tmp_path / "new" / "tokenizer")
    tokens = tmp_path / "new" / "tokenizer" / "tokenizer.json"
    tokens.write_text(tokens.read_text().replace('"the"', '"thf"').replace("\u2581the", "\u2581thf"))
    with pytest.raises(
        InputError, match="was trained with another tokenizer; use its tokenizer, and shards made with it"
    ):
        start(trunk, tmp_path / "new", manifest)
    with pytest.raises(InputError, match=r"train.branch_from: is for pretraining alone; start with train.init_from"):
        configs.load("configs/base.py", ["train.branch_from=runs/a@1"], task=configs.CLASSIFICATION)


def test_train_copies_the_tokenizer_that_its_config_names(trunk, manifest, tmp_path, tokenizer_folder, monkeypatch):
    """By tokenizer.path, or of the run that it branches off from; that of a model only if it made the shards."""
    monkeypatch.setattr("mlm.commands.train.pretrain", lambda *_: None)
    bare, whole = (copy(trunk, tmp_path / name) for name in ("bare", "whole"))
    shutil.rmtree(bare / "tokenizer", ignore_errors=True)
    shutil.copytree(tokenizer_folder, whole / "tokenizer", dirs_exist_ok=True)
    other = copy(whole, tmp_path / "other")
    train_tokenizer([f"the {number} words" for number in range(300)], tmp_path / "small", kind="bpe", vocab_size=280)
    shutil.rmtree(other / "tokenizer"), shutil.copytree(tmp_path / "small", other / "tokenizer")
    cases = [
        (f"tokenizer.path={tokenizer_folder}", True),
        (f"train.branch_from={whole}@6", True),
        (f"train.branch_from={bare}@6", False),
        (f"train.init_from={whole}", True),
        (f"train.init_from={other}", False),
    ]
    for number, (setting, copied) in enumerate(cases):
        workdir = tmp_path / str(number)
        assert __main__.main(train_arguments(workdir, manifest.folder, *SETTINGS, setting)) == 0
        assert (workdir / "tokenizer" / "tokenizer.json").is_file() == copied, setting
        if copied:
            assert tokenizer.fingerprint(f"{workdir}/tokenizer") == manifest.tokenizer_fingerprint, setting


@pytest.mark.slow
def test_the_command_takes_the_tokenizer_and_names_the_trunk(trunk, manifest, tmp_path, tokenizer_folder):
    shutil.copytree(tokenizer_folder, trunk / "tokenizer", dirs_exist_ok=True)
    run(train_arguments(tmp_path, manifest.folder, *SETTINGS, f"train.branch_from={trunk}@6", "train.seed=3"))
    for command in ("report", "export"):
        run([command, f"--workdir={tmp_path}"])
    page = (tmp_path / "report.html").read_text()
    assert f"<td>{trunk.name}</td>" in page and "train.seed: 0 -&gt; 3" in page
    card = (tmp_path / "export" / "README.md").read_text()
    assert f"| started from | step 6 of {trunk}, with train.seed&#58; 0 " in card
