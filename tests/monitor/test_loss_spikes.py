"""Loss spikes on made-up curves and on a poisoned stretch of a training: each once, with its batches and records."""

import json
import pathlib

import numpy as np
import pytest

from mlm import logs
from mlm.data import tfrecord
from mlm.data.manifest import Manifest, load_manifest
from mlm.data.order import Lane, batch_rows
from mlm.data.stages import make_stages
from mlm.monitor import loss_spikes
from mlm.monitor.loss_spikes import Detector, LossSpikes
from mlm.workdir import Workdir
from tests.support.corpora import manifest_of
from tests.support.states import back_to
from tests.support.tiny import pretrain, tiny_config

SHARDS = 4
RECORDS = 600
LANES = 4
BATCH = 16
POISON = (76, 80)
SETTINGS = (f"data.lanes={LANES}", "log.every=5", "train.steps=90")


def detect(losses, *, every: int = 10):
    detector = Detector()
    spikes = (detector.add(every * n, loss) for n, loss in enumerate(losses, 1))
    return [spike for spike in spikes if spike]


def falling(count: int = 300, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    """A loss that falls from 10 to 3 nats, with the noise of a line."""
    steps = np.arange(1, count + 1)
    return 3 + 7 * np.exp(-steps / 60) + np.random.default_rng(seed).normal(0, noise, count)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
def test_a_healthy_curve_has_none(noise):
    assert all(detect(falling(noise=noise, seed=seed)) == [] for seed in range(5))


# larger where it falls steeply
@pytest.mark.parametrize(("place", "jump"), [(8, 3), (100, 2), (299, 0.3)])
def test_one_line_that_jumps(place, jump):
    losses = falling()
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
    early = np.full(40, 5.0)
    small = np.full(40, 5.0)
    early[loss_spikes.LEAST - 1] = 9
    small[20] += loss_spikes.FLOOR * 0.9
    assert detect(early) == detect(small) == detect([5.0] * 20 + [None] + [5.0] * 20) == []


def test_the_steps_of_a_line_go_back_to_the_line_before():
    """log.every may change on resume."""
    detector = Detector()
    spikes = [
        detector.add(step, 9.0 if step == 117 else 5.0) for step in [*range(10, 120, 10), 117]
    ]
    assert (spikes[-1].first, spikes[-1].last, spikes[-1].median, spikes[-1].deviation) == (
        111,
        117,
        5.0,
        0.0,
    )


# The hook -------------------------------------------------------------------------------------------------------------


def records_of(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    lanes = [Lane(0, (RECORDS,) * SHARDS, lane, LANES) for lane in range(LANES)]
    return batch_rows(lanes, rows_before=(first - 1) * BATCH, rows=BATCH, count=last - first + 1)


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
    ("overrides", "spike", "batches", "numbers"),
    [
        ((), 80, ["76:80"], [76, 77, 78, 79, 80]),
        (("data.skip_batches=('21:25', '78:78')",), 75, ["76:77", "79:81"], [76, 77, 79, 80, 81]),
    ],
)
def test_a_spike_is_noted_with_its_batches_and_records(
    tmp_path, overrides, spike, batches, numbers
):
    """Those that its steps read; with batches left out before it and within it, in two pieces."""
    said: list[str] = []
    log(hook(tmp_path, *overrides, said=said), tmp_path, last=90, spike=spike)
    (noted,) = logs.read(tmp_path / "spikes.jsonl")
    assert (noted["first_update"], noted["last_update"], noted["batches"]) == (
        spike - 4,
        spike,
        batches,
    )
    assert (noted["loss"], noted["median"], noted["deviation"]) == (7, 3, 0)
    assert [row["batch"] for row in noted["rows"]] == numbers
    for row in noted["rows"]:
        ids, epochs = records_of(row["batch"], row["batch"])
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


@pytest.fixture(scope="module")
def poisoned(tokenizer_folder, tmp_path_factory) -> Manifest:
    """Rows whose tokens know nothing of one another; the batches of POISON hold tokens that no other row has."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("poisoned")
    probs = 1 / np.arange(1, 101)  # Zipf's law
    for split, count in (("train", SHARDS * RECORDS), ("validation", 40)):
        (folder / split).mkdir(parents=True)
        ids = 5 + rng.choice(100, (count, 32), p=probs / probs.sum())
        if split == "train":
            bad = records_of(*POISON)[0].ravel()
            ids[bad] = rng.integers(300, 600, (len(bad), 32))
        ids[:, 0] = 0
        ids[:, -1] = 2
        per_shard = count // SHARDS
        for shard in range(SHARDS):
            records = tfrecord.encode(ids[shard * per_shard : (shard + 1) * per_shard])
            (folder / split / f"dataset-{shard}-{per_shard}.tfrecord").write_bytes(
                b"".join(records)
            )
    return load_manifest(str(folder), tokenizer_folder=tokenizer_folder)


@pytest.mark.standard
@pytest.mark.usefixtures("one_device")
def test_a_poisoned_stretch_is_a_spike_and_skipped_on_resume_it_is_none(poisoned, tmp_path, capsys):
    """As the sentence says: back to the checkpoint before it, and the range given."""
    config = tiny_config(*SETTINGS, "evaluate.every=0", "checkpoint.every=40", "checkpoint.keep=9")
    pretrain(config, Workdir(str(tmp_path / "run")), poisoned)
    (spike,) = logs.read(tmp_path / "run" / "spikes.jsonl")
    assert (spike["first_update"], spike["last_update"], spike["batches"]) == (*POISON, ["76:80"])
    assert [row["record_id"] for row in spike["rows"]] == records_of(*POISON)[0].tolist()
    assert "--skip-batches 76:80." in capsys.readouterr().err
    again = back_to(tmp_path / "run", tmp_path / "again", 40)
    with config.unlocked():
        config.data.skip_batches = ("76:80",)
    pretrain(config, Workdir(str(again)), poisoned)
    assert "jumped" not in capsys.readouterr().err
    assert len(logs.read(again / "spikes.jsonl")) == 1, "what was said stays"
