"""Loss spikes on made-up curves: each once, over restarts, with its batches and records."""

import json
import pathlib

import numpy as np
import pytest

from mlm import logs
from mlm.data.order import Lane, batch_rows
from mlm.data.stages import make_stages
from mlm.monitor import loss_spikes
from mlm.monitor.loss_spikes import Detector, LossSpikes
from mlm.workdir import Workdir
from tests.support.corpora import manifest_of
from tests.support.tiny import tiny_config

SHARDS = 4
RECORDS = 600
LANES = 4
BATCH = 16
SETTINGS = (f"data.lanes={LANES}", "log.every=5", "train.steps=90")


def detect(losses, *, every: int = 10):
    detector = Detector()
    spikes = (detector.add(every * n, loss) for n, loss in enumerate(losses, 1))
    return [spike for spike in spikes if spike]


def falling() -> np.ndarray:
    """A loss that falls from 10 to 3 nats, with the noise of a line."""
    noise = np.random.default_rng(0).normal(0, 0.02, 300)
    return 3 + 7 * np.exp(-np.arange(1, 301) / 60) + noise


# larger where it falls steeply
@pytest.mark.parametrize(("place", "jump"), [(8, 3), (299, 0.3)])
def test_one_line_that_jumps(place, jump):
    losses = falling()
    assert detect(losses) == []
    losses[place] += jump
    (spike,) = detect(losses)
    assert (spike.first, spike.last) == (10 * place + 1, 10 * place + 10)
    assert spike.loss == losses[place] and spike.begins
    assert spike.median == np.median(losses[max(0, place - 20) : place])


def test_a_spike_does_not_hide_the_next_one_and_what_stays_is_a_new_level():
    losses = falling()
    losses[[150, 151, 160]] += 2
    losses[200:] += 2
    spikes = [(spike.last, spike.begins) for spike in detect(losses)]
    assert spikes[:3] == [(1510, True), (1520, False), (1610, True)]
    assert [last for last, _ in spikes[3:]] == [2010, 2020, 2030]


def test_too_early_too_small_and_not_finite():
    for place, loss in (
        (loss_spikes.LEAST - 1, 9.0),
        (20, 5 + loss_spikes.FLOOR * 0.9),
        (20, None),
    ):
        losses = [5.0] * 40
        losses[place] = loss
        assert detect(losses) == []


def test_the_steps_of_a_line_go_back_to_the_line_before():
    """log.every may change on resume."""
    detector = Detector()
    for step in range(10, 120, 10):
        detector.add(step, 5.0)
    assert detector.add(117, 9.0)[:2] == (111, 117)


# The hook -------------------------------------------------------------------------------------------------------------


def hook(folder: pathlib.Path, *overrides: str, said: list[str]) -> LossSpikes:
    """That of a start in the folder, on a manifest without shards to read."""
    config = tiny_config(*SETTINGS, *overrides)
    manifest = manifest_of(32, train={"records": (RECORDS,) * SHARDS}, validation={})
    stages = make_stages(config, RECORDS * SHARDS)
    return LossSpikes(config, Workdir(str(folder)), manifest, said.append, stages=stages)


def log(hook: LossSpikes, folder: pathlib.Path, *, last: int, spike: int) -> None:
    """Logs a loss that jumps at the step `spike`."""
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(5, last + 1, 5):
            line = {"step": step, "kind": "train", "loss": 7.0 if step == spike else 3.0}
            file.write(json.dumps(line) + "\n")
            hook.on_metrics("train", step, line)
            hook.on_metrics("eval", step, {"loss": 99.0})
    hook.flush()


@pytest.mark.parametrize(
    ("skipped", "spike", "batches", "numbers"),
    [
        ((), 80, ["76:80"], [76, 77, 78, 79, 80]),
        (("21:25", "78:78"), 75, ["76:77", "79:81"], [76, 77, 79, 80, 81]),
    ],
)
def test_a_spike_is_noted_with_its_batches_and_records(tmp_path, skipped, spike, batches, numbers):
    """Those that its steps read; with batches left out before it and within it, in two pieces."""
    said: list[str] = []
    log(hook(tmp_path, f"data.skip_batches={skipped}", said=said), tmp_path, last=90, spike=spike)
    (noted,) = logs.read(tmp_path / "spikes.jsonl")
    assert (noted["first_update"], noted["last_update"]) == (spike - 4, spike)
    assert noted["batches"] == batches and (noted["loss"], noted["median"]) == (7, 3)
    assert [row["batch"] for row in noted["rows"]] == numbers
    lanes = [Lane(0, (RECORDS,) * SHARDS, lane, LANES) for lane in range(LANES)]
    for row in noted["rows"]:
        before = (row["batch"] - 1) * BATCH
        ids, epochs = batch_rows(lanes, rows_before=before, rows=BATCH, count=1)
        assert (row["record_id"], row["epoch"]) == (ids[0].tolist(), epochs[0].tolist())
    (message,) = said
    flags = " ".join(f"--skip-batches {numbers}" for numbers in batches)
    assert f"after step {spike - 5}," in message and message.endswith(f"{flags}.")


def test_nothing_is_said_twice_and_a_kill_loses_nothing(tmp_path):
    """Over restarts; what a kill tore is said at the next start."""
    said: list[str] = []
    log(hook(tmp_path, said=said), tmp_path, last=90, spike=80)
    file = tmp_path / "spikes.jsonl"
    content = file.read_bytes()
    hook(tmp_path, "log.every=4", said=said).flush()
    assert len(said) == 1, "whatever log.every was then"
    file.write_bytes(content[:-9])
    hook(tmp_path, said=said).flush()
    assert len(said) == 2 and said[0] == said[1] and file.read_bytes() == content
