"""Runs of train.hours: the schedules follow the clock, a replay equals the run to the bit, a resumed run goes on."""

import contextlib
import itertools
import json
import pathlib
import time
from types import SimpleNamespace

import jax
import pytest

from mlm import config as configs
from mlm import logs
from mlm.cluster import distributed
from mlm.errors import InputError, PreemptedError
from mlm.pretrained import checkpoint_files
from mlm.training.budget import UNITS, Budget, read_replay
from mlm.training.train import Loop
from mlm.workdir import Workdir
from tests.support.processes import run_together, train_arguments
from tests.support.states import assert_same, back_to, lines_after, state_of
from tests.training.toy import Toy, run

HOURS = ("train.steps=0", "train.hours=1", "schedule.warmup=0.2")
SETTINGS = (
    *HOURS,
    "data.batch_stages=((4, 3), (8, 4))",
    "data.short_length=16",
    "data.short_share=0.5",
    "model.hidden_dropout=0.1",
    "checkpoint.every=5",
    "checkpoint.keep=99",
    "evaluate.every=4",
    "log.every=3",
)


class Clock:
    """Seconds that pass where they are said to: in each step, evaluation and checkpoint."""

    def __init__(self, patch: pytest.MonkeyPatch, *, step: float, evaluation: float = 1000.0):
        self.now, batches, evaluate, useful_flops = 50.0, Toy.batches, Toy.evaluate, Toy.useful_flops

        def timed_batches(task, start):
            for batch in batches(task, start):
                yield batch
                self.now += step

        def timed_evaluate(task, params):
            self.now += evaluation
            return evaluate(task, params)

        def timed_flops(task, *shares):  # of a checkpoint's metadata
            self.now += evaluation
            return useful_flops(task, *shares)

        patch.setattr(time, "monotonic", lambda: self.now)
        patch.setattr(Toy, "batches", timed_batches)
        patch.setattr(Toy, "evaluate", timed_evaluate)
        patch.setattr(Toy, "useful_flops", timed_flops)


@pytest.fixture(scope="module")
def timed(tmp_path_factory) -> Workdir:
    """A run of an hour in steps of 6 minutes; evaluations take a quarter of an hour more each."""
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch, step=360)
        return run(tmp_path_factory.mktemp("timed"), *SETTINGS)


def shares_of(workdir: Workdir, start: int = 0) -> dict[int, float]:
    found = read_replay(str(workdir.root / "timing.jsonl"), start)
    return {step: units / UNITS for step, units in found.items()}


def last_step(workdir: Workdir) -> int:
    return checkpoint_files.complete_steps(workdir.checkpoints)[-1]


def test_schedules_follow_the_share_of_the_time(timed):
    """The steps that open the data or compile take none of it, nor do pauses."""
    shares = shares_of(timed)
    assert list(shares) == list(range(1, last_step(timed) + 1))
    assert all(a <= b for a, b in itertools.pairwise(shares.values()))
    compiled = [line["step"] for line in logs.read(timed.root / "timing.jsonl", "first_step")]
    longer = next(step for step, share in shares.items() if share > 0.5)
    assert compiled == sorted({1, 4, 8, longer}), "rows by step, lengths by time"
    timed_steps = [step for step in shares if step not in compiled]
    expected = list(itertools.accumulate(0 if step - 1 in (0, *compiled) else 0.1 for step in shares))
    assert list(shares.values()) == pytest.approx(expected, abs=1e-6) and len(timed_steps) >= 9
    for line in logs.read(timed.metrics, "train"):
        share = shares[line["step"]]
        assert line["share"] == pytest.approx(share, abs=1e-6)
        rate = 0.003 * min(share / 0.2, (1 - share) / 0.8)
        assert line["learning_rate"] == pytest.approx(rate, rel=1e-4, abs=1e-8), line["step"]
    saved = {step: checkpoint_files.read_meta(timed.checkpoints, step) for step in (5, last_step(timed))}
    assert [meta["share"] for meta in saved.values()] == [shares[5], 1]
    assert saved[5]["useful_flops"] == 5000 + shares[5]
    recorded = [line["step"] for line in logs.read(timed.root / "timing.jsonl", "share")]
    assert 5 in recorded, "a run that is killed after a save has the shares of all steps up to it"


def test_a_replay_is_the_run_to_the_bit(timed, tmp_path):
    """Also when it resumes; it waits for no clock."""
    replayed = (*SETTINGS, f"train.replay={timed.root / 'timing.jsonl'}")
    whole = run(tmp_path / "whole", *replayed)
    again = run(back_to(whole.root, tmp_path / "again", 5), *replayed)
    for other in (whole, again):
        assert other.metrics.read_text() == timed.metrics.read_text()
        assert_same(state_of(timed.root, last_step(timed)), state_of(other.root, last_step(timed)))


def test_a_resumed_run_goes_on_with_what_is_left(timed, tmp_path):
    before = shares_of(timed)
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch, step=720)
        again = run(back_to(timed.root, tmp_path / "run", 5), *SETTINGS)
        after = shares_of(again)
    assert [after[step] for step in range(1, 6)] == [before[step] for step in range(1, 6)]
    assert after[6] == before[5] and after[7] == after[6] and after[last_step(again)] == 1
    assert list(after) == list(range(1, last_step(again) + 1)), "the steps of the first time are replaced"
    assert after[last_step(again)] - after[last_step(again) - 1] == pytest.approx(0.2, abs=0.2)


def test_a_branch_goes_on_with_what_is_left(timed, tmp_path):
    """In units of its own budget."""
    branch = f"train.branch_from={timed.root}@10"
    share = shares_of(timed)[10]
    assert 0.5 < share < 0.7
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch, step=360)
        longer = run(tmp_path / "longer", *SETTINGS, branch, "train.hours=2")
    assert shares_of(longer, 10)[11] == pytest.approx(share / 2, abs=1e-6)
    saved = checkpoint_files.read_meta(longer.checkpoints, last_step(longer))
    assert saved["share"] == 1
    steps = last_step(longer) - 10
    own_flops = saved["useful_flops"] - saved["branch"]["useful_flops"]
    assert own_flops == pytest.approx(1000 * steps + 1 - share / 2), "the share since the start"
    with pytest.raises(InputError, match=r"train.hours = 0.1: .*@10 has used .* of them;"):
        run(tmp_path / "late", *SETTINGS, branch, "train.hours=0.1")


def test_a_stop_names_the_share(tmp_path, monkeypatch):
    Clock(monkeypatch, step=360)
    monkeypatch.setattr(distributed.StopSignal, "requested", lambda signal, step: step == 4)
    with pytest.raises(PreemptedError, match=r"after step 4 \(20\.0% of train.hours\), and saved"):
        run(tmp_path, *HOURS)


def test_a_run_ends_when_all_of_its_time_is_used_not_before(tmp_path):
    """A share of 1 - 2^-22 rounds to the last step of the schedules; a restart would have trained once more."""
    file, units = tmp_path / "timing.jsonl", [0, UNITS - 4, 4]
    file.write_text(json.dumps({"step": 3, "kind": "share", "units": units}) + "\n")
    workdir = run(tmp_path / "run", *HOURS, f"train.replay={file}")
    assert last_step(workdir) == 3
    assert checkpoint_files.read_meta(workdir.checkpoints, 3)["share"] == 1
    run(workdir.root, *HOURS, f"train.replay={file}")
    assert last_step(workdir) == 3 and lines_after(workdir.root, 3) == []


def test_a_step_waits_for_the_one_before_the_last(monkeypatch):
    """Steps dispatched far ahead would all be given the same share."""
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    budget = Budget(1.0, None, share=0.0, log=SimpleNamespace(paused_seconds=0.0, timing=lambda *line: None))
    for step, metrics in enumerate((None, "step 1", "step 2"), 1):
        budget.start_step(step, metrics)
    assert waited == [None, None, "step 1"]


def test_the_clock_stops_for_an_evaluation_when_its_step_is_done(monkeypatch):
    events = []
    monkeypatch.setattr(jax, "block_until_ready", lambda array: events.append(f"waited for {array}"))
    task = SimpleNamespace(evaluate=lambda params: events.append("evaluated") or {})
    paused = contextlib.contextmanager(lambda kind, step: (yield events.append(f"paused: {kind}")))
    log = SimpleNamespace(paused=paused, evaluation=lambda step, scores: None)
    loop = Loop(task, start=None, checkpoints=None, log=log, budget=None, profile=None)
    loop.evaluate(1, SimpleNamespace(step="step 1", best_params=None))
    assert events == ["waited for step 1", "paused: eval", "evaluated"]


def test_what_can_not_be_replayed_is_refused(tmp_path):
    units = [[UNITS // 4 * n, 9, 9, 9, UNITS // 4 - 27] for n in range(4)]
    lines = [{"step": 5 * (n + 1), "kind": "share", "units": each} for n, each in enumerate(units)]
    shares = [json.dumps(line) + "\n" for line in lines]
    file = tmp_path / "timing.jsonl"
    file.write_text("".join(shares))
    found = read_replay(str(file), 0)
    assert list(found) == list(range(1, 21)) and found[7] == UNITS // 4 + 9
    file.write_text("".join([*shares[:2], shares[1], *shares[2:]]))
    assert read_replay(str(file), 0) == found, "made again after a restart"
    file.write_text("".join(shares[1:]))
    assert list(read_replay(str(file), 5)) == list(range(6, 21)), "what comes before the start is not needed"
    for start, kept, words in (
        (0, "", "no finished run with train.hours"),
        (0, "".join(shares[:-1]), "no finished run"),
        (21, "".join(shares), "no finished run"),
        (0, "".join(shares[:2] + shares[3:]), "the share of step 11;"),
        (0, "".join(shares[1:]), "the share of step 1;"),
    ):
        file.write_text(kept)
        with pytest.raises(InputError, match=rf"train.replay = .*timing.jsonl: .*{words}"):
            read_replay(str(file), start)
    with pytest.raises(InputError, match="replay = "):
        run(tmp_path / "run", *SETTINGS, f"train.replay={file}")
    assert not (tmp_path / "run" / "config.json").exists(), "it is read before anything is written"
    with pytest.raises(InputError, match=r"train.replay = nowhere: is not a file"):
        read_replay("nowhere", 0)
    with pytest.raises(InputError, match=r"config\.train\.hours = 1\.0: is for pretraining alone"):
        configs.load("configs/base.py", ["train.steps=0", "train.hours=1"], task=configs.CLASSIFICATION)


@pytest.mark.slow
def test_processes_agree_on_the_share(manifest, tmp_path: pathlib.Path):
    keys = ("train.steps=0", "train.hours=0.001", "checkpoint.every=20", "evaluate.every=20", "log.every=5")
    run_together(train_arguments(tmp_path / "a", manifest.folder, *keys), processes=2, devices=1)
    assert logs.read(Workdir(str(tmp_path / "a")).root / "timing.jsonl", "share")[-1]["share"] == 1
    replayed = (*keys, f"train.replay={tmp_path / 'a' / 'timing.jsonl'}")
    run_together(train_arguments(tmp_path / "b", manifest.folder, *replayed), processes=2, devices=1)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == (tmp_path / "b" / "metrics.jsonl").read_text()
