"""What a run tells the outside: its logs, TensorBoard, Weights & Biases, and a trace where it is asked for."""

import contextlib
import math
import pathlib
import sys
import time
import types
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from mlm import logs
from mlm.monitor.loss_spikes import MetricsHook
from mlm.training import peaks
from mlm.training.metrics import Log
from mlm.training.xla_metrics import Programs
from mlm.workdir import Workdir
from tests.support.states import back_to
from tests.support.streams import Terminal
from tests.training.toy import logged_task, run

SETTINGS = ("log.wandb=my-project", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=9")


class Hook(MetricsHook):
    """Records what it is called with."""

    def __init__(self):
        self.seen: list = []

    def on_metrics(self, kind, step, values):
        self.seen.append((kind, step, values))

    def flush(self):
        self.seen.append("flush")

    def close(self):
        self.seen.append("close")


@pytest.fixture
def clock(monkeypatch) -> types.SimpleNamespace:
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def metrics(loss: float, **others: float) -> dict:
    values = {
        "loss": loss,
        "grad_norm": 2.0,
        "learning_rate": 0.001,
        "skipped": 0,
        "consecutive_nonfinite": 0,
        **others,
    }
    return {name: np.float32(value) for name, value in values.items()}


@contextlib.contextmanager
def open_log(folder: pathlib.Path, *, start: int = 0, **options) -> Iterator[Log]:
    with (
        Programs() as programs,
        Log(folder, logged_task("train.steps=10", **options), programs, start=start) as log,
    ):
        yield log


def test_lines_and_throughput(tmp_path, clock, capsys, monkeypatch):
    """Of the steps between two lines, without pauses and compilation; a mean of nothing is null."""
    monkeypatch.setattr(peaks, "PEAK_TFLOPS", {"cpu": 1e-9})  # 8 devices of 1,000 FLOP/s
    hook = Hook()
    with open_log(tmp_path, hooks=[hook], epoch=0.25) as log:
        clock.now += 50
        log.restart_clock(1)
        clock.now += 4
        with log.paused("eval", 3):
            clock.now += 7
        log.train(5, metrics(1.25, own=0.5, empty=math.nan))
        log.evaluation(
            5,
            {"loss": 1.5, "accuracy": 0.25, "perplexity": math.inf, "own": 2.0, "table": {"1": {}}},
        )
        clock.now += 2
        log.train(5, metrics(3.0))
        log.train(7, metrics(math.nan))
    found = logs.read(Workdir(str(tmp_path)).metrics)
    first = {
        "step": 5,
        "kind": "train",
        "loss": 1.25,
        "grad_norm": 2.0,
        "learning_rate": pytest.approx(0.001),
    }
    assert found[0] == first | {"skipped": 0, "own": 0.5, "empty": None, "epoch": 1.25}
    assert (
        found[1]["kind"] == "eval"
        and found[1]["perplexity"] is None
        and found[1]["table"] == {"1": {}}
    )
    assert found[3]["loss"] is None
    timing = logs.read(Workdir(str(tmp_path)).root / "timing.jsonl")
    assert [(line["kind"], line["step"]) for line in timing] == [
        ("start", 0),
        ("eval", 3),
        ("train", 5),
        ("train", 7),
    ]
    assert timing[0]["devices"] == 8 and timing[1]["seconds"] == 7
    rates = {"tokens_per_second": 1000, "rows_per_second": 16.0, "mfu": 0.25}
    assert (rates | {"seconds": 4.0, "elapsed": 61.0}).items() <= timing[2].items()
    calls = [call if isinstance(call, str) else call[:2] for call in hook.seen]
    assert calls == [
        ("train", 5),
        ("eval", 5),
        "flush",
        ("train", 5),
        ("train", 7),
        "flush",
        "close",
    ]
    assert hook.seen[1][2] == {"loss": 1.5, "accuracy": 0.25, "own": 2.0, "epoch": 1.25}
    shown = capsys.readouterr().err.replace("1.00k", "1k")
    rates = "1k tokens/s, 16 rows/s"
    assert (
        f"step 5/10: epoch 1.25, loss 1.250, {rates}, empty nan, own 0.5, MFU 25.0%, 00:05 left"
        in shown
    )
    assert "step 5: evaluation loss 1.5000, accuracy 25.0%, own 2" in shown


def test_a_log_goes_on_without_the_lines_that_come_again(tmp_path, clock, capsys):
    """And leaves a torn line out; a run that counts no epochs names none."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "kind": "train"}\n{"step": 4, "kind": "train"}\n{"step": 6, '
    )
    (tmp_path / "timing.jsonl").write_text('{"step": 4, "kind": "start"}\n{"st')
    with open_log(tmp_path, start=2) as log:
        clock.now += 1
        log.train(3, metrics(1.0))
    assert [line["step"] for line in logs.read(Workdir(str(tmp_path)).metrics)] == [2, 3]
    timing = logs.read(Workdir(str(tmp_path)).root / "timing.jsonl")
    assert [(line["kind"], line["step"]) for line in timing] == [
        ("start", 4),
        ("start", 2),
        ("train", 3),
    ]
    err = capsys.readouterr().err
    assert "step 3/10: loss 1.000" in err and "MFU" not in err and "epoch" not in err


def test_a_terminal_has_a_bar(tmp_path, clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("mlm.training.metrics.can_draw", lambda stream: stream is terminal)
    with open_log(tmp_path, start=3) as log:
        clock.now += 1
        log.train(5, metrics(1.25))
        assert (log._bar.n, log._bar.total) == (5, 10) and "loss 1.250" in log._bar.postfix
    assert "step 5/10" not in terminal.getvalue()


def test_other_hosts_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mlm.cluster.is_primary", lambda: False)
    with open_log(tmp_path) as log:
        log.train(5, metrics(1.0))
        log.evaluation(5, {"loss": 1.0})
    assert not list(tmp_path.iterdir()) and capsys.readouterr().err == ""


def test_tensorboard_gets_the_numbers_of_each_line(tmp_path, monkeypatch):
    """Lines after the checkpoint come again, so what was written of them is to be left out."""
    written = []
    starts = []
    texts = []

    class Writer:
        def __init__(self, folder, purge_step):
            starts.append((pathlib.Path(folder).name, purge_step))

        def add_scalar(self, *scalar):
            written.append(scalar)

        def add_text(self, tag, text, step):
            texts.append(text)

        def flush(self):
            written.append("flush")

        def close(self):
            written.append("close")

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    settings = ("log.tensorboard=true", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=9")
    workdir = run(tmp_path / "run", *settings)
    lines = logs.read(workdir.metrics)
    scalars = [scalar for scalar in written if isinstance(scalar, tuple)]
    expected = [(f"{line['kind']}/loss", line["loss"], line["step"]) for line in lines]
    assert [scalar for scalar in scalars if scalar[0].endswith("/loss")] == expected and len(
        lines
    ) == 3
    executions = [scalar[1:] for scalar in scalars if scalar[0] == "timing/xla/step/executions"]
    assert executions == [
        (line["programs"]["step"]["executions"], line["step"])
        for line in logs.read(workdir.timing, "xla")
    ]
    assert written[-2:] == ["flush", "close"]
    run(back_to(workdir.root, tmp_path / "again", 2), *settings)
    assert starts == [("tensorboard", 1), ("tensorboard", 3)]
    assert "train.steps = 4" in texts[0]


@pytest.fixture
def wandb(monkeypatch) -> types.SimpleNamespace:
    """A stand-in with some of wandb's parameters, which records every call, and refuses what wandb refuses."""
    seen = types.SimpleNamespace(settings=None, lines=[], finished=0)

    def init(*, project=None, name=None, id=None, config=None, resume=None, allow_val_change=None):
        assert resume in ("allow", "never", "must", "auto")
        assert id.strip() == id != "" and not set(id) & set("/\\#?%:"), (
            "wandb refuses these in an id"
        )
        seen.settings = {
            "project": project,
            "name": name,
            "id": id,
            "config": config,
            "resume": resume,
        }
        seen.settings["allow_val_change"] = allow_val_change
        return types.SimpleNamespace(log=log, finish=finish)

    def log(data, step=None, commit=None):
        seen.lines.append((step, data))

    def finish():
        seen.finished += 1

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return seen


def test_weights_and_biases_gets_what_the_log_gets(tmp_path, wandb):
    workdir = run(tmp_path / "run", *SETTINGS)
    assert (
        wandb.settings["project"] == "my-project" and wandb.settings["config"]["train.steps"] == 4
    )
    assert wandb.settings["name"] == "run" and wandb.finished == 1
    expected = [
        (line["step"], f"{line['kind']}/loss", line["loss"]) for line in logs.read(workdir.metrics)
    ]
    found = [
        (step, key, values[key])
        for step, values in wandb.lines
        for key in values
        if key.endswith("/loss")
    ]
    assert found == expected


def test_trackers_and_the_hooks_of_a_task_get_the_same_lines(tmp_path, wandb, clock):
    """Of all logs, whatever the order in which they were made."""
    hook = Hook()
    hook.on_timing = hook.on_metrics
    task = logged_task("log.wandb=my-project", hooks=[hook])
    with Programs() as programs, Log(tmp_path, task, programs, start=0) as log:
        clock.now += 1
        log.train(5, metrics(1.25))
        log.norms(5, ["a"], dict.fromkeys(logs.NORMS, np.ones(1, np.float32)))
        log.flush(5)
    calls = [call for call in hook.seen if isinstance(call, tuple)]
    sent = [
        (step, {f"{kind}/{name}": value for name, value in values.items()})
        for kind, step, values in calls
    ]
    assert wandb.lines == sent
    assert {"timing/start", "train", "timing/train", "gradient_norms", "timing/xla"} <= {
        call[0] for call in calls
    }


def test_weights_and_biases_goes_on_with_the_same_run(tmp_path, wandb):
    """Started again from step 2, with another key that may change; another workdir is another run."""
    first = run(tmp_path / "run", *SETTINGS)
    ids = [wandb.settings["id"]]
    run(back_to(first.root, tmp_path / "again", 2), *SETTINGS, "log.every=1")
    assert wandb.settings["resume"] == "allow" and wandb.settings["allow_val_change"]
    ids.append(wandb.settings["id"])
    run(tmp_path / "other", *SETTINGS)
    ids.append(wandb.settings["id"])
    assert ids[0] == ids[1] != ids[2] and len(ids[0]) == 32
    assert (first.root / "wandb_id").read_text().strip() == ids[0]


def test_peaks_are_per_device_of_jax():
    assert peaks.peak_flops("TPU v4") == 275e12
    assert 2 * peaks.peak_flops("TPU v3") == 123e12, "jax counts its two cores"
    assert 2 * peaks.peak_flops("TPU7x") == 2307e12
    assert peaks.peak_flops("TPU v5 lite") == peaks.peak_flops("TPU v5e") == 197e12
    assert peaks.peak_flops(jax.devices()[0].device_kind) is None
