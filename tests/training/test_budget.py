"""Runs of train.hours: the schedules follow the clock, a replay equals the run to the bit, a resumed run goes on."""

import contextlib
import itertools
import json
import pathlib
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mlm import config as configs
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.training.budget import UNITS, read_replay
from mlm.training.train import Loop
from mlm.workdir import Workdir
from tests.support.processes import copy, run_together, train_arguments
from tests.support.states import assert_same, lines_after, state_of
from tests.support.tiny import pretrain, tiny_config, tiny_run

pytestmark = pytest.mark.usefixtures("one_device")
SETTINGS = (
    "train.steps=0",
    "train.hours=0.001",
    "data.lanes=4",
    "data.batch_stages=((4, 10), (8, 15))",
    "data.short_length=16",
    "data.short_share=0.5",
    "data.isolate_documents=true",
    "schedule.warmup_fraction=0.2",
    "masking.end_rate=0.1",
    "model.hidden_dropout=0.1",
    "checkpoint.every=20",
    "checkpoint.keep=99",
    "evaluate.every=20",
    "log.every=5",
)


@pytest.fixture(scope="module")
def timed(one_device, manifest, tmp_path_factory) -> pathlib.Path:
    """A run of 3.6 seconds, and as long again in evaluations."""
    workdir, evaluate = tmp_path_factory.mktemp("timed"), Pretraining.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pretraining, "evaluate", lambda task, params: time.sleep(0.5) or evaluate(task, params))
        pretrain(tiny_config(*SETTINGS), Workdir(str(workdir)), manifest)
    return workdir


def timing(workdir: pathlib.Path, kind: str) -> list[dict]:
    lines = map(json.loads, (workdir / "timing.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def last_step(workdir: pathlib.Path) -> int:
    return checkpoint_files.complete_steps(workdir / "checkpoints")[-1]


@pytest.mark.slow
def test_schedules_follow_the_share_of_the_time(timed):
    shares, steps = read_replay(str(timed / "timing.jsonl"), 0), last_step(timed)
    assert list(shares) == list(range(1, steps + 1)) and steps > 40
    assert all(a <= b for a, b in itertools.pairwise(shares.values()))
    assert shares[steps] == UNITS > shares[steps - 1] and shares[1] < UNITS / 50
    for line in lines_after(timed, 0):
        if line["kind"] == "train":
            share = shares[line["step"]] / UNITS
            rate = 0.003 * min(share / 0.2, (1 - share) / 0.8)
            assert line["learning_rate"] == pytest.approx(rate, rel=1e-4, abs=1e-9), line["step"]
    lines = timing(timed, "share")
    assert lines[-1]["share"] == 1 and {line["step"] for line in timing(timed, "train")} >= {10, 15, 20}
    assert sum(line["seconds"] for line in timing(timed, "eval")) > 1
    begin, *others = timing(timed, "first_step")  # one of each size of the batch, and of each length of rows
    longer = next(step for step, share in shares.items() if share > UNITS / 2)
    assert [line["step"] for line in (begin, *others)] == sorted({1, 11, 26, longer}), "rows by step, lengths by time"
    pauses = [*others, *timing(timed, "eval"), *timing(timed, "checkpoint")]
    seconds = lines[-1]["time"] - begin["time"] - sum(line["seconds"] for line in pauses)
    assert seconds > 3.5, "pauses are not of the budget"
    assert checkpoint_files.read_meta(timed / "checkpoints", steps)["share"] == 1


@pytest.mark.parametrize(("share", "rate", "masked"), [(0.0, 0.0, 0.2), (0.1, 0.0015, 0.19), (1.0, 0.0, 0.1)])
def test_the_step_takes_the_share(share, rate, masked, batch):
    """What the optimizer does, not only what is logged: lion moves each parameter by the rate."""
    run = tiny_run("train.steps=0", "train.hours=1", "schedule.warmup_fraction=0.2", "masking.end_rate=0.1",
                   "optimizer.name=lion", "optimizer.weight_decay=0", mesh=(1, 1, 1))  # fmt: skip
    state = run.init()
    before = np.asarray(state.params["lm_head"]["dense"]["kernel"])
    columns = batch | {"share": np.full(16, share, np.float32)}
    state, metrics = run.train_step(state, sharding.put_batch(columns, run.mesh, 16))
    assert float(metrics["learning_rate"]) == pytest.approx(rate, rel=1e-5, abs=1e-8)  # within the rounding of float32
    moved = np.abs(np.asarray(state.params["lm_head"]["dense"]["kernel"]) - before)
    assert moved.max() == pytest.approx(rate, rel=1e-3, abs=1e-8) and int(state.step) == 1
    ordinary = batch["attention_mask"].sum() - 2 * 16  # without <s> and </s>
    assert float(state.window["loss"].weight) == pytest.approx(masked * ordinary, abs=8)


@pytest.mark.slow
def test_a_replay_is_the_run_to_the_bit(timed, manifest, tmp_path):
    replayed = (*SETTINGS, f"train.replay={timed / 'timing.jsonl'}")
    pretrain(tiny_config(*replayed), Workdir(str(tmp_path)), manifest)
    assert (tmp_path / "metrics.jsonl").read_text() == (timed / "metrics.jsonl").read_text()
    steps = last_step(timed)
    assert_same(state_of(timed, steps), state_of(tmp_path, steps))
    again = copy(tmp_path, tmp_path.parent / "again")
    for later in checkpoint_files.complete_steps(again / "checkpoints")[1:]:
        checkpoint_files.set_aside(again / "checkpoints", later, "later")
    pretrain(tiny_config(*replayed), Workdir(str(again)), manifest)
    assert (again / "metrics.jsonl").read_text() == (timed / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_resumed_run_and_a_branch_go_on_with_what_is_left(timed, manifest, tmp_path):
    workdir = copy(timed, tmp_path / "resumed")
    for later in checkpoint_files.complete_steps(workdir / "checkpoints")[1:]:
        checkpoint_files.set_aside(workdir / "checkpoints", later, "later")
    before = read_replay(str(timed / "timing.jsonl"), 0)
    saved = checkpoint_files.read_meta(workdir / "checkpoints", 20)["share"]
    assert 0 < saved < 1
    pretrain(tiny_config(*SETTINGS), Workdir(str(workdir)), manifest)
    after = read_replay(str(workdir / "timing.jsonl"), 0)
    assert [after[step] for step in range(1, 21)] == [before[step] for step in range(1, 21)]
    assert after[21] == pytest.approx(saved * UNITS, abs=0.02 * UNITS) and after[last_step(workdir)] == UNITS
    assert list(after) == list(range(1, last_step(workdir) + 1)), "the steps of the first time are replaced"
    branch = f"train.branch_from={timed}@20"
    pretrain(tiny_config(*SETTINGS, branch, "train.hours=0.0005"), Workdir(str(tmp_path / "branch")), manifest)
    assert timing(tmp_path / "branch", "share")[0]["units"][0] == pytest.approx(2 * saved * UNITS, abs=0.02 * UNITS)
    with pytest.raises(InputError, match=r"train.hours = 1e-09: .*@20 has used .* of them; set it higher\.$"):
        pretrain(tiny_config(*SETTINGS, branch, "train.hours=1e-9"), Workdir(str(tmp_path / "late")), manifest)


def test_a_run_ends_when_all_of_its_time_is_used_not_before(manifest, tmp_path):
    """A share of 1 - 2^-22 rounds to the last step of the schedules; a restart would have trained once more."""
    file, units = tmp_path / "timing.jsonl", [0, UNITS - 4, 4]
    file.write_text(json.dumps({"step": 3, "kind": "share", "units": units}) + "\n")
    settings = ("train.steps=0", "train.hours=1", "data.lanes=4", f"train.replay={file}")
    pretrain(tiny_config(*settings), Workdir(str(tmp_path / "run")), manifest)
    assert last_step(tmp_path / "run") == 3
    assert checkpoint_files.read_meta(tmp_path / "run" / "checkpoints", 3)["share"] == 1


def test_the_clock_stops_for_an_evaluation_when_its_step_is_done(monkeypatch):
    events = []
    monkeypatch.setattr(jax, "block_until_ready", lambda array: events.append(f"waited for {array}"))
    task = SimpleNamespace(evaluate=lambda params: events.append("evaluated") or {})
    paused = contextlib.contextmanager(lambda kind, step: (yield events.append(f"paused: {kind}")))
    log = SimpleNamespace(paused=paused, evaluation=lambda step, scores: None)
    loop = Loop(task, checkpoints=None, milestones=set(), log=log, budget=None, profile=None, meta={})
    loop.evaluate(1, SimpleNamespace(step="step 1", best_params=None))
    assert events == ["waited for step 1", "paused: eval", "evaluated"]


def test_what_can_not_be_replayed_is_refused(manifest, tmp_path):
    units = [[UNITS // 4 * n, 9, 9, 9, UNITS // 4 - 27] for n in range(4)]
    lines = [{"step": 5 * (n + 1), "kind": "share", "units": each} for n, each in enumerate(units)]
    shares = [json.dumps(line) + "\n" for line in lines]
    file = tmp_path / "timing.jsonl"
    file.write_text("".join(shares))
    assert list(read_replay(str(file), 0)) == list(range(1, 21))
    for kept, sentence in (
        ("", "holds no finished run with train.hours; name the timing.jsonl of a finished run"),
        ("".join(shares[:-1]), "holds no finished run"),
        ("".join(shares[:2] + shares[3:]), r"lacks the share of step \d+; name"),
    ):
        file.write_text(kept)
        with pytest.raises(InputError, match=rf"train.replay = .*timing.jsonl: {sentence}"):
            pretrain(tiny_config(*SETTINGS, f"train.replay={file}"), Workdir(str(tmp_path / "run")), manifest)
    assert not (tmp_path / "run" / "config.json").exists(), "it is read before anything is written"
    with pytest.raises(InputError, match=r"train.replay = nowhere: is not a file; name the timing.jsonl of a finished"):
        read_replay("nowhere", 0)
    with pytest.raises(InputError, match=r"train.hours: is for pretraining alone; set train.epochs or train.steps\.$"):
        configs.load("configs/base.py", ["train.steps=0", "train.hours=1"], task=configs.CLASSIFICATION)


@pytest.mark.slow
def test_processes_agree_on_the_share(manifest, tmp_path):
    keys = [key for key in SETTINGS if not key.startswith("train.hours")] + ["train.hours=0.003"]
    arguments = train_arguments(tmp_path / "a", manifest.folder, *keys)
    run_together(arguments, processes=2, devices=1)
    assert timing(tmp_path / "a", "share")[-1]["share"] == 1
    replayed = (*keys, f"train.replay={tmp_path / 'a' / 'timing.jsonl'}")
    run_together(train_arguments(tmp_path / "b", manifest.folder, *replayed), processes=2, devices=1)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == (tmp_path / "b" / "metrics.jsonl").read_text()
