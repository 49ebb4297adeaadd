"""Advice and spikes of a run, once over all restarts: on made-up lines, and on a poisoned stretch of a training."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from mlm import logs
from mlm.data import tfrecord
from mlm.data.manifest import Manifest, load_manifest
from mlm.data.order import Lane, batch_rows
from mlm.data.stages import make_stages
from mlm.monitor import adviser
from mlm.monitor.metrics_hooks import Monitor
from mlm.workdir import Workdir
from tests.support.corpora import manifest_of
from tests.support.reports import make_workdir, page_of
from tests.support.states import back_to
from tests.support.tiny import pretrain, tiny_config

SHARDS, RECORDS, LANES, BATCH = 4, 600, 4, 16
POISON = (76, 80)
SETTINGS = (f"data.lanes={LANES}", "log.every=5", "train.steps=90")
SHARE = 1 / np.arange(1, 101)  # Zipf's law
SHARE /= SHARE.sum()


def records_of(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    lanes = [Lane(0, (RECORDS,) * SHARDS, lane, LANES) for lane in range(LANES)]
    return batch_rows(lanes, rows_before=(first - 1) * BATCH, rows=BATCH, count=last - first + 1)


def monitor(folder: pathlib.Path, *overrides: str, said: list[str]) -> Monitor:
    """That of a start in the folder, on a manifest without shards to read."""
    config, train = tiny_config(*SETTINGS, *overrides), {"records": (RECORDS,) * SHARDS, "unigram_entropy": 5.0}
    stages = make_stages(config, RECORDS * SHARDS)
    manifest = manifest_of(32, train=train, validation={})
    return Monitor(config, Workdir(str(folder)), manifest, said.append, stages=stages, warmup=5)


def losses_until(step: int, *, spike: int = 0, level: float = 3.0) -> list[dict]:
    """The lines of a log; the loss jumps at `spike`."""
    return [
        {"step": number, "kind": "train", "loss": level + 4 * (number == spike), "learning_rate": 0.001}
        for number in range(5, step + 1, 5)
    ]


def log(hook: Monitor, folder: pathlib.Path, lines: list[dict]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
            hook.on_metrics(line["kind"], line["step"], line)
    hook.flush()


@pytest.mark.parametrize(
    ("overrides", "spike", "batches", "numbers"),
    [
        ((), 80, ["76:80"], [76, 77, 78, 79, 80]),
        (("data.skip_batches=('21:25', '78:78')",), 75, ["76:77", "79:81"], [76, 77, 79, 80, 81]),
    ],
)
def test_a_spike_is_noted_with_its_batches_and_records(tmp_path, overrides, spike, batches, numbers):
    """Those that its steps read; with batches left out before it and within it, in two pieces."""
    said: list[str] = []
    log(monitor(tmp_path, *overrides, said=said), tmp_path, losses_until(90, spike=spike))
    (noted,) = logs.read(tmp_path / "spikes.jsonl")
    assert (noted["first_update"], noted["last_update"], noted["batches"]) == (spike - 4, spike, batches)
    assert (noted["loss"], noted["median"], noted["deviation"]) == (7, 3, 0)
    assert [row["batch"] for row in noted["rows"]] == numbers
    for row in noted["rows"]:
        ids, epochs = records_of(row["batch"], row["batch"])
        assert (row["record_id"], row["epoch"]) == (ids[0].tolist(), epochs[0].tolist())
    (message,) = said
    flags = " ".join(f"--skip-batches {numbers}" for numbers in batches)
    assert f"after step {spike - 5}," in message and message.endswith(f"{flags}.")


def test_nothing_is_said_twice_and_a_kill_loses_nothing(tmp_path):
    """Over restarts; what a kill kept back, or tore, is said at the next start."""
    said: list[str] = []
    lines = losses_until(800, spike=80, level=5.0)
    log(monitor(tmp_path, "train.steps=800", said=said), tmp_path, lines)
    (advice,) = logs.read(tmp_path / "advice.jsonl")
    assert (advice["kind"], advice["what"]) == ("advice", "stuck")
    assert len(said) == 2 and f"step {advice['step']}: advice: {advice['text']}" in said
    monitor(tmp_path, "train.steps=800", "log.every=4", said=said).flush()
    assert len(said) == 2, "whatever log.every was then"
    files = {name: (tmp_path / name).read_bytes() for name in ("advice.jsonl", "spikes.jsonl")}
    (tmp_path / "advice.jsonl").unlink()
    (tmp_path / "spikes.jsonl").write_bytes(files["spikes.jsonl"][:-9])
    monitor(tmp_path, "train.steps=800", said=said).flush()
    assert len(said) == 4 and sorted(said[:2]) == sorted(said[2:])
    assert {name: (tmp_path / name).read_bytes() for name in files} == files


def test_a_run_of_hours_is_judged_by_its_own_steps(tmp_path):
    hours = ("train.steps=0", "train.hours=1", "schedule.warmup=0.1", "data.batch_stages=((8, 40),)")
    hook = monitor(tmp_path, *hours, said=[])
    hook.on_metrics("train", 50, {"loss": 3.0, "share": 0.25})
    assert (hook._adviser.steps, hook._adviser.warmup_steps, hook._adviser.global_batch) == (200, 20, 16)


def test_advice_and_spikes_have_a_row_each_in_the_report(tmp_path):
    advice = {"step": 1200, "kind": "advice", "what": "stuck", "text": "the loss is stuck: <6.02> nats."}
    spike = {
        "step": 1250, "kind": "spike", "first_update": 1201, "last_update": 1250, "loss": 7.25, "median": 4.125,
        "batches": ["1201:1210", "1213:1252"], "deviation": 0.01, "rows": [],
    }  # fmt: skip
    workdir = make_workdir(tmp_path / "run")
    assert "Advice" not in page_of(workdir).text
    workdir.advice.write_text(json.dumps(advice) + "\n")
    workdir.spikes.write_text(json.dumps(spike) + "\n")
    rows = page_of(workdir).rows
    assert ["1,200", adviser.LINES["stuck"], "the loss is stuck: <6.02> nats."] in rows
    (row,) = [row for row in rows if row[0] == "1,201 to 1,250"]
    assert all(text in row[2] for text in ("7.250", "4.125", "1201:1210, 1213:1252"))


# A training -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(tokenizer_folder, tmp_path_factory) -> Manifest:
    """Rows whose tokens know nothing of one another; the batches of POISON hold tokens that no other row has."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("poisoned")
    for split, count in (("train", SHARDS * RECORDS), ("validation", 40)):
        (folder / split).mkdir(parents=True)
        ids = 5 + rng.choice(100, (count, 32), p=SHARE)
        if split == "train":
            bad = records_of(*POISON)[0].ravel()
            ids[bad] = rng.integers(300, 600, (len(bad), 32))
        ids[:, 0], ids[:, -1] = 0, 2
        each = count // SHARDS
        for shard in range(SHARDS):
            records = tfrecord.encode(ids[shard * each : (shard + 1) * each])
            (folder / split / f"dataset-{shard}-{each}.tfrecord").write_bytes(b"".join(records))
    found = load_manifest(str(folder), tokenizer_folder=tokenizer_folder)
    splits = {name: dataclasses.replace(split, unigram_entropy=3.68) for name, split in found.splits.items()}
    return dataclasses.replace(found, splits=splits)


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
    losses = {line["step"]: line["loss"] for line in logs.read(again / "metrics.jsonl", "train")}
    assert losses[80] < losses[5]
