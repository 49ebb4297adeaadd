"""Resume: straight, and killed and started again, are the same to the bit; on other devices, the same batches."""

import json
import pathlib
import signal
import subprocess
import time

import numpy as np
import pytest

from mlm.pretrained import checkpoint_files
from mlm.workdir import Workdir
from tests.support.processes import DELAYED, copy, kill_when, logged_step, run, run_together, start, train_arguments
from tests.support.states import state_of
from tests.support.tiny import pretrain, tiny_config

SETTINGS = (
    "train.steps=30",
    "checkpoint.every=7",
    "evaluate.every=10",
    "log.every=4",
    "model.hidden_dropout=0.1",
    "optimizer.ema_decay=0.9",
    "data.global_batch=16",
)


@pytest.fixture(scope="module")
def straight(manifest, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("straight")
    run(train_arguments(workdir, manifest.folder, *SETTINGS))
    return workdir


def assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
    """Every line of the log and every bit of the last state."""
    assert (one / "metrics.jsonl").read_text() == (other / "metrics.jsonl").read_text()
    a, b = state_of(one, 30), state_of(other, 30)
    assert a.keys() == b.keys()
    assert len(a) > 60
    for name in a:
        assert np.array_equal(a[name], b[name]), f"{name} differs"


def stop(process: subprocess.Popen, number: signal.Signals, workdir: pathlib.Path, moment: int) -> None:
    """Sends the signal after that step: the run saves, at a step that no checkpoint was due at."""
    while logged_step(workdir) < moment:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "and saved; run the same command to continue" in err
    steps = checkpoint_files.complete_steps(workdir / "checkpoints")
    assert steps[-1] >= moment and steps[-1] % 7


@pytest.mark.slow
def test_log_is_gapless(straight):
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [10, 20, 30]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.slow
def test_killed_at_several_moments(straight, manifest, tmp_path):
    arguments = train_arguments(tmp_path, manifest.folder, *SETTINGS)
    folder = tmp_path / "checkpoints"

    def saving() -> bool:
        return any("tmp" in path.name for path in folder.glob("*")) and logged_step(tmp_path) >= 12

    kill_when(start(arguments, program=DELAYED), lambda: logged_step(tmp_path) >= 4)  # before there is a checkpoint
    assert checkpoint_files.complete_steps(folder) == []
    kill_when(start(arguments, program=DELAYED), lambda: logged_step(tmp_path) >= 8)  # after the first
    kill_when(start(arguments, program=DELAYED), saving)  # while one is written
    kill_when(start(arguments, program=DELAYED), lambda: logged_step(tmp_path) >= 20)
    run(arguments)
    assert_same_run(straight, tmp_path)


@pytest.mark.slow
def test_stopped_by_signals(straight, manifest, tmp_path):
    arguments = train_arguments(tmp_path, manifest.folder, *SETTINGS)
    for number, moment in ((signal.SIGTERM, 4), (signal.SIGINT, 16)):
        stop(start(arguments, program=DELAYED), number, tmp_path, moment)
    run(arguments)
    assert_same_run(straight, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "processes"), [(4, 1), (2, 2)])
def test_other_devices_give_the_same_losses(straight, manifest, tmp_path, devices, processes):
    """From the same checkpoint at step 14, on more devices and on more processes."""
    workdir = copy(straight, tmp_path / "moved")
    for step in (21, 28, 30):
        folder = workdir / "checkpoints" / str(step)
        if folder.exists():
            checkpoint_files.set_aside(workdir / "checkpoints", step, "later")
    arguments = train_arguments(workdir, manifest.folder, *SETTINGS, "checkpoint.keep=9")
    if processes == 1:
        run(arguments, devices=devices)
    else:
        run_together(arguments, processes=processes, devices=devices)
    old, new = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (straight, workdir)
    )
    assert [(line["step"], line["kind"]) for line in old] == [(line["step"], line["kind"]) for line in new]
    for a, b in zip(old, new, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.fixture(scope="module")
def scheduled(one_device, manifest, tmp_path_factory) -> pathlib.Path:
    """A run whose rows are short in its first half, and fewer until step 9; its masking rate falls."""
    workdir = tmp_path_factory.mktemp("scheduled")
    pretrain(tiny_config(*SCHEDULED), Workdir(str(workdir)), manifest)
    return workdir


SCHEDULED = (
    "train.steps=12",
    "data.lanes=4",
    "data.batch_stages=((8, 3), (4, 6))",
    "data.short_length=16",
    "data.short_share=0.5",
    "data.isolate_documents=true",
    "masking.end_rate=0.1",
    "model.hidden_dropout=0.1",
    "checkpoint.every=3",
    "checkpoint.keep=9",
    "log.every=4",
)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6, 9])
def test_resumed_before_at_and_after_the_switch_of_length(scheduled, manifest, tmp_path, step):
    workdir = copy(scheduled, tmp_path / "resumed")
    for later in checkpoint_files.complete_steps(workdir / "checkpoints"):
        if later > step:
            checkpoint_files.set_aside(workdir / "checkpoints", later, "later")
    pretrain(tiny_config(*SCHEDULED), Workdir(str(workdir)), manifest)
    assert (workdir / "metrics.jsonl").read_text() == (scheduled / "metrics.jsonl").read_text()
    a, b = state_of(scheduled, 12), state_of(workdir, 12)
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_finished_run_does_nothing(straight, manifest, tmp_path):
    workdir = copy(straight, tmp_path / "again")
    before = (workdir / "metrics.jsonl").read_text()
    run(train_arguments(workdir, manifest.folder, *SETTINGS))
    assert (workdir / "metrics.jsonl").read_text() == before
    assert checkpoint_files.complete_steps(workdir / "checkpoints") == checkpoint_files.complete_steps(
        straight / "checkpoints"
    )


@pytest.mark.slow
def test_keeps_the_newest_and_the_best(straight):
    steps = checkpoint_files.complete_steps(straight / "checkpoints")
    assert steps == [21, 28, 30]
