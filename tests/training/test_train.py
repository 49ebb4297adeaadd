"""The loop: what is logged, evaluated and saved at which step; straight and resumed runs are the same to the bit."""

import json
import pathlib

import jax
import numpy as np
import pytest

from mlm import cluster, logs
from mlm.cluster import distributed
from mlm.errors import NumericsError, PreemptedError
from mlm.monitor.loss_spikes import MetricsHook
from mlm.pretrained import checkpoint_files
from mlm.training import xla_metrics
from mlm.workdir import Workdir
from tests.support import processes
from tests.support.states import assert_same, back_to, lines_after, state_of
from tests.support.tiny import meshes_of, pretrain, tiny_config
from tests.training.toy import Toy, run

SETTINGS = (
    "train.steps=12",
    "checkpoint.every=3",
    "checkpoint.keep=9",
    "evaluate.every=5",
    "log.every=4",
    "model.hidden_dropout=0.1",
    "optimizer.ema_decay=0.9",
    "data.batch_stages=((8, 3), (4, 4))",
    "data.short_length=16",
    "log.norms_every=5",
)


def steps_of(workdir, kind: str) -> list[int]:
    name = "metrics.jsonl" if kind in ("train", "eval") else "timing.jsonl"
    return [line["step"] for line in logs.read(workdir.root / name, kind)]


def saved(workdir) -> list[int]:
    return checkpoint_files.complete_steps(workdir.checkpoints)


def assert_same_run(one, other) -> None:
    """Every line of the log and every bit of the last state."""
    assert one.metrics.read_text() == other.metrics.read_text()
    assert one.norms.read_text() == other.norms.read_text() and len(logs.read(one.norms)) == 2
    assert_same(state_of(one.root, 12), state_of(other.root, 12))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight"), *SETTINGS)


def test_what_comes_at_which_step(straight):
    assert steps_of(straight, "train") == [4, 8, 12]
    assert steps_of(straight, "eval") == [5, 10, 12]
    assert saved(straight) == steps_of(straight, "checkpoint") == [3, 6, 9, 12]
    assert steps_of(straight, "first_step") == [1, 4, 8, 12], "of rows and lengths"
    assert json.loads(straight.config.read_text())["train"]["steps"] == 12


@pytest.mark.parametrize("step", [3, 6, 9])
def test_resumed_within_stages_and_at_their_ends(straight, tmp_path, step):
    """The file of the config and the lines after the checkpoint are written again."""
    folder = back_to(straight.root, tmp_path / "run", step)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "ki')  # torn
    (folder / "config.json").unlink()
    again = run(folder, *SETTINGS)
    assert_same_run(straight, again)
    assert saved(again) == saved(straight)
    assert steps_of(again, "start") == [0, step]
    assert again.config.read_text() == straight.config.read_text()


def test_stopped_at_any_step_it_saves_and_goes_on(straight, tmp_path, monkeypatch):
    for stop in (1, 5, 8):
        with monkeypatch.context() as patch:
            patch.setattr(
                distributed.StopSignal, "requested", lambda signal, step, stop=stop: step == stop
            )
            with pytest.raises(PreemptedError, match=f"step {stop} of 12"):
                run(tmp_path, *SETTINGS)
        assert stop in checkpoint_files.complete_steps(tmp_path / "checkpoints")
    assert_same_run(straight, run(tmp_path, *SETTINGS))


def test_a_finished_run_does_nothing(straight, tmp_path):
    folder = back_to(straight.root, tmp_path / "run", 12)
    assert steps_of(run(folder, *SETTINGS), "start") == [0, 12]
    assert (folder / "metrics.jsonl").read_text() == straight.metrics.read_text()
    assert checkpoint_files.complete_steps(folder / "checkpoints") == saved(straight)


def test_epochs_and_milestones_are_evaluated_and_saved(tmp_path, monkeypatch):
    """Without intervals; the checkpoint names the milestones so far, and the FLOPs of all steps."""
    monkeypatch.setattr(Toy, "is_epoch_end", lambda task, step: step == 3)
    settings = (
        "checkpoint.every=0",
        "evaluate.every=0",
        "checkpoint.keep=9",
        "checkpoint.milestones=('0', '5', '7')",
    )
    workdir = run(tmp_path / "run", *settings)
    assert saved(workdir) == steps_of(workdir, "eval") == [0, 3, 5, 7, 12]
    found = [checkpoint_files.read_meta(workdir.checkpoints, step) for step in (3, 5, 12)]
    assert [meta["milestones"] for meta in found] == [[0], [0, 5], [0, 5, 7]]
    assert [meta["useful_flops"] for meta in found] == [3000, 5000, 12000]
    again = run(back_to(workdir.root, tmp_path / "again", 0), *settings)
    assert again.metrics.read_text() == workdir.metrics.read_text()
    assert saved(again) == saved(workdir)


def test_the_best_checkpoint_is_that_of_the_score_that_is_minimized(tmp_path, monkeypatch):
    monkeypatch.setattr(Toy, "evaluate", lambda task, params: {"loss": 2.0})
    scores = iter([3.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(Toy, "minimized_metric", lambda task, found: found["loss"] * next(scores))
    workdir = run(
        tmp_path, "checkpoint.every=2", "evaluate.every=4", "train.steps=16", "checkpoint.keep=1"
    )
    assert saved(workdir) == [8, 16]
    assert checkpoint_files.choose(workdir.checkpoints, on_damage="stop", best=True) == 8


def test_evaluation_is_of_the_averaged_parameters(straight):
    """As saved in the state: the score is the mean size of one of its tables."""
    state = {name: value for name, value in state_of(straight.root, 12).items() if "table" in name}
    (table,) = (value for name, value in state.items() if name.startswith("['ema']"))
    assert logs.read(straight.metrics, "eval")[-1]["loss"] == pytest.approx(
        np.abs(table).mean(), rel=1e-6
    )


def test_a_run_reports_what_it_is_doing(tmp_path, monkeypatch):
    """For the watch, which knows how long each may take; compiled together where the shapes are new."""
    seen = []
    monkeypatch.setattr(cluster, "progress", lambda *what: seen.append(what))
    monkeypatch.setattr(
        distributed, "compile_together", lambda *call: seen.append(("together", call[3]))
    )
    run(tmp_path, "train.steps=3", "data.batch_stages=((8, 1),)", "checkpoint.every=2")
    known = ("start", "input", "compile", "step", "together", "evaluate", "save")
    assert [what for what in seen if what[0] in known] == [
        ("start", 1), ("compile", 1), ("together", 32),
        ("start", 2), ("compile", 2), ("together", 32), ("save", 2),
        ("input", 3), ("step", 3), ("together", 32), ("evaluate", 3), ("save", 3),
    ]  # fmt: skip


def test_a_line_is_read_when_the_next_step_was_dispatched(tmp_path, monkeypatch):
    """Not before, so that the device need not wait; at once where an evaluation, a checkpoint or a stage follows."""
    events = []
    batches = Toy.batches

    def logged(task, start):
        for number, batch in enumerate(batches(task, start), start + 1):
            events.append(f"batch {number}")
            yield batch

    class Hook(MetricsHook):
        def on_metrics(self, kind, step, values):
            if kind in ("train", "eval"):
                events.append(f"{kind} {step}")

        def close(self):
            events.append("closed")

    monkeypatch.setattr(Toy, "batches", logged)
    monkeypatch.setattr(Toy, "make_hooks", lambda task, notify: [Hook()])
    intervals = ("log.every=1", "checkpoint.every=5", "evaluate.every=4")
    run(tmp_path, "data.batch_stages=((8, 2),)", "train.steps=7", *intervals)
    assert events == [
        "batch 1", "batch 2", "train 1", "train 2", "batch 3", "batch 4", "train 3", "train 4", "eval 4",
        "batch 5", "train 5", "batch 6", "batch 7", "train 6", "train 7", "eval 7", "closed",
    ]  # fmt: skip


def test_the_loop_moves_no_data_but_its_batches(tmp_path, monkeypatch):
    guards = []
    guard = jax.transfer_guard
    monkeypatch.setattr(jax, "transfer_guard", lambda level: guards.append(level) or guard(level))
    run(tmp_path, "train.steps=2")
    assert guards == ["disallow"] * 2


@pytest.mark.parametrize(("log_every", "found_at"), [(2, 8), (100, 9)])
def test_the_nonfinite_guard_stops_the_run(tmp_path, monkeypatch, log_every, found_at):
    """At the next line of the log or checkpoint; what is saved before is good, and nothing is saved after."""
    monkeypatch.setattr("mlm.training.train.GUARD_LIMIT", 3)
    settings = (f"log.every={log_every}", "checkpoint.every=3")
    task = Toy(tiny_config("data.lanes=1", *settings, "evaluate.every=0"))
    task.poisoned = {2, *range(found_at - 2, 13)}
    with pytest.raises(NumericsError, match=rf"step {found_at}: 3 steps .* was {found_at - 3};"):
        run(tmp_path, task=task)
    assert checkpoint_files.complete_steps(tmp_path / "checkpoints") == [3, 6]
    skipped = [line["skipped"] for line in lines_after(tmp_path, 0)]
    assert skipped == ([1, 1, 2, 4] if log_every == 2 else [4])


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (2, [1, "profile", 2, 3, "end", 4]),
        (4, [1, 2, 3, "profile", 4, "end"]),
        (0, [1, 2, 3, 4]),
    ],
)
def test_a_trace_of_some_steps(tmp_path, monkeypatch, first, expected):
    """Begins before the first of them, and ends behind the last, or with the run; another run has none."""
    seen = []
    step_trace = jax.profiler.StepTraceAnnotation

    def traced(name, step_num):
        seen.append(step_num)
        return step_trace(name)

    profiler = jax.profiler
    monkeypatch.setattr(profiler, "start_trace", lambda path: seen.append(pathlib.Path(path).name))
    monkeypatch.setattr(profiler, "stop_trace", lambda: seen.append("end"))
    monkeypatch.setattr(profiler, "StepTraceAnnotation", traced)
    monkeypatch.setattr(xla_metrics, "TRACED_STEPS", 2)
    run(tmp_path, f"log.profile_start={first}", "train.steps=4")
    assert seen == expected


@pytest.mark.standard
def test_killed_and_started_again_it_ends_with_the_same_bits(manifest, tmp_path):
    """Of a real model, by SIGKILL, within the steps after a checkpoint."""
    settings = (
        "train.steps=16",
        "checkpoint.every=7",
        "evaluate.every=10",
        "log.every=4",
        "model.hidden_dropout=0.1",
    )

    def train(folder: pathlib.Path) -> pathlib.Path:
        with meshes_of(1):  # as the process that is killed
            pretrain(tiny_config("data.lanes=4", *settings), Workdir(str(folder)), manifest)
        return folder

    straight = train(tmp_path / "straight")
    killed = tmp_path / "killed"
    arguments = processes.train_arguments(killed, manifest.folder, *settings)
    process = processes.start(arguments, devices=1, program=processes.DELAYED)
    processes.kill_when(
        process, lambda: checkpoint_files.complete_steps(killed / "checkpoints") == [7]
    )
    train(killed)
    assert (straight / "metrics.jsonl").read_text() == (killed / "metrics.jsonl").read_text()
    assert_same(state_of(straight, 16), state_of(killed, 16))
