"""train.hours becomes train.steps once: timed by the run's own step, saved, and from there on a run of steps."""

import json

import pytest

from mlm.data.stages import UNTIMED_STEPS
from mlm.errors import InputError
from mlm.training import hours
from mlm.workdir import Workdir
from tests.support.states import assert_same, back_to, state_of
from tests.support.tiny import tiny_config
from tests.training.toy import RECORDS, Toy, losses, run

HOURS = ("train.steps=0", "train.hours=0.5", "data.lanes=1", "schedule.warmup=0.1")


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ((), 900),
        (("data.batch_stages=((8, 100),)",), 950),  # 100 steps of a second, and 850 of two
        # 1,045 of 1.5 seconds, and 116 of two
        (("data.short_length=8",), 1161),
    ],
)
def test_the_steps_that_the_hours_are(settings, steps):
    """Half an hour, in steps of each size; one more would take longer."""
    seconds = {(16, 32): 2.0, (8, 32): 1.0, (16, 8): 1.5}
    assert hours.steps_of(tiny_config(*HOURS, *settings), RECORDS, seconds) == steps


@pytest.fixture
def counted(monkeypatch):
    """A step takes 150 seconds by the clock of the timing."""
    tasks = []

    def seconds_per_step(task, rows, length):
        tasks.append(task)
        return 150.0

    monkeypatch.setattr(hours, "seconds_per_step", seconds_per_step)
    return tasks


def start(folder, *overrides: str):
    """As the command: counts the steps, and trains."""
    config = tiny_config(*HOURS, *overrides)
    config = hours.with_steps(config, Workdir(str(folder)), RECORDS, lambda: Toy(config))
    return run(folder, task=Toy(config))


def test_it_is_a_run_of_steps_that_goes_on_with_them(tmp_path, counted, capsys):
    """Same parameters as a run of those steps; started again it takes the saved ones, on a machine of any speed."""
    workdir = start(tmp_path / "hours", "checkpoint.every=5")
    assert "0.5 hours are 12 steps here" in capsys.readouterr().err and len(counted) == 1
    train = json.loads(workdir.config.read_text())["train"]
    assert (train["hours"], train["steps"]) == (0.5, 12)
    steps = run(tmp_path / "steps", *HOURS[2:], "train.steps=12")
    assert losses(workdir) == losses(steps)
    assert_same(state_of(workdir.root, 12), state_of(steps.root, 12))
    again = start(back_to(workdir.root, tmp_path / "again", 5), "checkpoint.every=5")
    assert len(counted) == 1 and losses(again) == losses(workdir)
    with pytest.raises(InputError, match=r"train\.hours: 0\.5 -> 1"):
        start(tmp_path / "again", "train.hours=1")


def test_hours_that_are_no_step_and_steps_beside_hours_are_refused(tmp_path, counted):
    with pytest.raises(InputError, match=r"train\.hours = 0\.01"):
        start(tmp_path, "train.hours=0.01")
    with pytest.raises(InputError, match=r"train\.steps = 12: .*train\.hours"):
        tiny_config("train.hours=1")


def test_the_timing_leaves_out_compilation_and_reads_the_first_batches(monkeypatch):
    """A step of 0.25 seconds of which the first takes 99; of each size, at its own batches."""
    clock = [0.0]
    task = Toy(tiny_config(*HOURS, "data.batch_stages=((8, 4),)"))
    reads = []
    batches = task.batches
    train_step = task.train_step

    def slow_step(state, batch, length):
        clock[0] += 0.25 if clock[0] else 99
        return train_step(state, batch, length)

    task.batches = lambda start: reads.append(start) or batches(start)
    task.train_step = slow_step
    monkeypatch.setattr(hours.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(hours, "SECONDS", 4.0)
    assert task.stages.sizes == [(8, 32), (16, 32)] and task.stages.steps == UNTIMED_STEPS
    assert hours.seconds_per_step(task, 8, 32) == pytest.approx(0.25)
    assert hours.seconds_per_step(task, 16, 32) == pytest.approx(0.25)
    assert reads[0] == 0 and reads[-1] == 4 and set(reads[:-1]) == {0}, (
        "from the start again, where a stage is short"
    )
