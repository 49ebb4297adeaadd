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
from flax.traverse_util import unflatten_dict

from mlm import logs
from mlm.model import flops
from mlm.monitor.loss_spikes import MetricsHook
from mlm.training import train
from mlm.training.metrics import Log, param_norms
from mlm.training.xla_metrics import Compilations
from tests.support.states import back_to, state_of
from tests.support.streams import Terminal
from tests.support.tiny import flat
from tests.training.toy import logged_task, run, toy

SETTINGS = ("train.steps=4", "checkpoint.every=2", "checkpoint.keep=9")


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
    values = {"loss": loss, "skipped": 0, "consecutive_nonfinite": 0, **others}
    return {name: np.float32(value) for name, value in values.items()}


@contextlib.contextmanager
def open_log(folder: pathlib.Path, *settings: str, start: int = 0, **options) -> Iterator[Log]:
    task = logged_task("train.steps=10", *settings, **options)
    with Compilations() as compilations, Log(folder, task, compilations, start=start) as log:
        yield log


def test_lines_and_throughput(tmp_path, clock, capsys, monkeypatch):
    """Of the steps between two lines, without pauses and compilation; a mean of nothing is null."""
    monkeypatch.setattr(flops, "PEAK_TFLOPS", {"cpu": 1e-9})  # 8 devices of 1,000 FLOP/s
    hook = Hook()
    with open_log(tmp_path, hooks=[hook], epoch=0.25) as log:
        clock.now += 50
        log.restart_clock(1)
        clock.now += 4
        with log.paused("eval", 3):
            clock.now += 7
        log.train(5, metrics(1.25, own=0.5, empty=math.nan))
        scores = {"loss": 1.5, "accuracy": 0.25, "perplexity": math.inf, "own": 2.0}
        log.evaluation(5, scores | {"table": {"1": {}}})
        clock.now += 2
        log.train(5, metrics(3.0))
        log.train(7, metrics(math.nan))
    found = logs.read(tmp_path / "metrics.jsonl")
    first = {"step": 5, "kind": "train", "loss": 1.25, "skipped": 0, "own": 0.5, "empty": None}
    assert found[0] == first | {"epoch": 1.25}
    assert (found[1]["kind"], found[1]["perplexity"], found[1]["table"]) == (
        "eval",
        None,
        {"1": {}},
    )
    assert found[3]["loss"] is None
    timing = logs.read(tmp_path / "timing.jsonl")
    kinds = [(line["kind"], line["step"]) for line in timing]
    assert kinds == [("start", 0), ("eval", 3), ("train", 5), ("train", 7)]
    assert timing[0]["devices"] == 8 and timing[1]["seconds"] == 7
    rates = {"tokens_per_second": 1000, "rows_per_second": 16.0, "mfu": 0.25}
    assert (rates | {"seconds": 4.0, "elapsed": 61.0}).items() <= timing[2].items()
    calls = [call if isinstance(call, str) else call[:2] for call in hook.seen]
    assert [call for call in calls if not call[0].startswith("timing")] == [
        ("train", 5), ("eval", 5), "flush", ("train", 5), ("train", 7), "flush", "close",
    ]  # fmt: skip
    shown = capsys.readouterr().err.replace("1.00k", "1k")
    rates = "1k tokens/s, 16 rows/s"
    assert (
        f"step 5/10: epoch 1.25, loss 1.250, {rates}, empty nan, own 0.5, MFU 25.0%, 00:05 left"
        in shown
    )
    assert "step 5: evaluation loss 1.5000, accuracy 25.0%, own 2" in shown


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


@pytest.fixture
def trackers(monkeypatch) -> types.SimpleNamespace:
    """Stand-ins for TensorBoard, and for wandb with some of its parameters, which refuses what wandb refuses."""
    seen = types.SimpleNamespace(starts=[], scalars=[], lines=[], ends=[])

    class Writer:
        def __init__(self, folder, purge_step):
            seen.starts.append((pathlib.Path(folder).name, purge_step))

        def add_text(self, tag, text, step):
            assert "log.wandb = 'my-project'" in text

        def add_scalar(self, *scalar):
            seen.scalars.append(scalar)

        def flush(self):
            pass

        def close(self):
            seen.ends.append("tensorboard")

    def init(*, project, name, id, config, resume, allow_val_change):
        assert resume == "allow" and allow_val_change
        assert id.strip() == id != "" and not set(id) & set("/\\#?%:")
        seen.starts.append((project, name, id, config["train.steps"]))
        return types.SimpleNamespace(
            log=lambda data, step: seen.lines.append((step, data)),
            finish=lambda: seen.ends.append("wandb"),
        )

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return seen


TRACKERS = ("log.tensorboard=true", "log.wandb=my-project")


def test_trackers_go_on_with_the_same_run(tmp_path, trackers):
    """From step 2, whose later lines come again, with another key that may change; another workdir is another run."""
    first = run(tmp_path / "run", *SETTINGS, *TRACKERS)
    number = (first.root / "wandb_id").read_text().strip()
    assert len(number) == 32
    assert trackers.starts == [("tensorboard", 1), ("my-project", "run", number, 4)]
    assert sorted(trackers.ends) == ["tensorboard", "wandb"]
    run(back_to(first.root, tmp_path / "again", 2), *SETTINGS, *TRACKERS, "log.every=1")
    assert trackers.starts[2:] == [("tensorboard", 3), ("my-project", "again", number, 4)]
    run(tmp_path / "other", *SETTINGS, *TRACKERS)
    assert trackers.starts[-1][2] != number


def test_trackers_and_the_hooks_of_a_task_get_the_same_lines(tmp_path, trackers, clock):
    """Of all logs, whatever the order in which they were made."""
    hook = Hook()
    with open_log(tmp_path, *TRACKERS, hooks=[hook]) as log:
        clock.now += 1
        log.train(5, metrics(1.25))
        log.norms(5, ["a"], dict.fromkeys(logs.NORMS, np.ones(1, np.float32)))
    calls = [call for call in hook.seen if isinstance(call, tuple)]
    kinds = [kind for kind, *_ in calls]
    assert kinds == ["timing/start", "train", "timing/train", *logs.NORMS]
    scalars = [
        (f"{kind}/{name}", value, step)
        for kind, step, values in calls
        for name, value in values.items()
    ]
    assert trackers.scalars == scalars
    assert [(name, data[name], step) for step, data in trackers.lines for name in data] == scalars


# Norms by parameter ---------------------------------------------------------------------------------------------------


NORMS = (
    "train.steps=6",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "optimizer.clip_norm=0.5",
    "log.norms_every=3",
)


def params_at(workdir, step: int) -> dict[str, np.ndarray]:
    """Of a checkpoint, by name."""
    return {
        name.removeprefix("['params']['").removesuffix("']").replace("']['", "/"): x
        for name, x in state_of(workdir.root, step).items()
        if name.startswith("['params']")
    }


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


def test_norms_are_those_of_the_saved_parameters(tmp_path):
    """By numpy, of the whole arrays that eight devices hold parts of; the gradient before it is clipped."""
    eight = run(tmp_path, task=toy(*NORMS, "train.accumulate=2", mesh=(2, 2, 2)))
    task = toy(*NORMS)
    gradient = jax.jit(train.make_gradient(task))
    lines = logs.read(eight.norms, "norms")
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        step = line["step"]
        rows = line["parameters"]
        before = params_at(eight, step - 1)
        after = params_at(eight, step)
        assert rows.keys() == before.keys() and "position_embeddings/embedding" in rows
        grads, _ = gradient(
            unflatten_dict(before, sep="/"), next(task.batches(step - 1)), np.int32(step - 1)
        )
        for name, (of_gradient, parameter, update) in rows.items():
            assert parameter == pytest.approx(norm(before[name]), rel=1e-5)
            assert update == pytest.approx(
                norm(after[name] - before[name]) / norm(before[name]), rel=1e-5
            )
            assert of_gradient == pytest.approx(norm(flat(grads)[name]), rel=1e-4)
    last = logs.read(eight.metrics, "train")[-1]  # of step 6, as are the rows
    assert last["grad_norm"] == pytest.approx(
        math.hypot(*(row[0] for row in rows.values())), rel=1e-5
    )


def test_norms_of_a_parameter_that_is_0_or_does_not_move_or_is_not_finite(tmp_path):
    """Nine digits are the float32; what is no number is null."""
    before = {
        "a": np.zeros(3, np.float32),
        "b": np.full(2, 0.1, np.float32),
        "c": np.full(2, 3e38, np.float32),
    }
    gradient_norms = np.array([0.1, 0.2, np.nan], np.float32)
    found = param_norms(before, before | {"a": np.ones(3, np.float32)}, gradient_norms)
    with open_log(tmp_path) as log:
        log.norms(4, list(before), found)
    (line,) = logs.read(tmp_path / "norms.jsonl")
    rows = line["parameters"]
    assert rows["a"][1:] == [0.0, None] and rows["b"][2] == 0 and rows["c"] == [None, None, 0.0]
    assert np.float32(rows["b"][1]) == np.asarray(found["parameter_norms"])[1]
