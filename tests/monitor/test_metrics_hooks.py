"""Advice and spikes in real trainings: on text without sense, and on a poisoned stretch; over restarts, once."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

from mlm.data import tfrecord
from mlm.data.manifest import Manifest, load_manifest
from mlm.data.order import Lane, batch_rows
from mlm.data.stages import make_stages
from mlm.monitor.metrics_hooks import Monitor
from mlm.pretrained import checkpoint_files
from mlm.tasks.pretraining import Pretraining
from mlm.workdir import Workdir
from tests.support.tiny import pretrain, tiny_config

pytestmark = pytest.mark.usefixtures("one_device")

SHARDS, RECORDS, LANES, BATCH = 4, 600, 4, 16
SHARE = 1 / np.arange(1, 101)  # Zipf's law
SHARE /= SHARE.sum()


def senseless(folder: pathlib.Path, tokenizer_folder: str, poisoned: tuple[int, int] | None = None) -> Manifest:
    """Rows whose tokens know nothing of one another; poisoned batches hold tokens that no other row has."""
    rng = np.random.default_rng(0)
    for split, count in (("train", SHARDS * RECORDS), ("validation", 40)):
        (folder / split).mkdir(parents=True)
        ids = 5 + rng.choice(100, (count, 32), p=SHARE)
        if poisoned and split == "train":
            bad = records_of(*poisoned)[0].ravel()
            ids[bad] = rng.integers(300, 600, (len(bad), 32))
        ids[:, 0], ids[:, -1] = 0, 2
        each = count // SHARDS
        for shard in range(SHARDS):
            records = tfrecord.encode(ids[shard * each : (shard + 1) * each])
            (folder / split / f"dataset-{shard}-{each}.tfrecord").write_bytes(b"".join(records))
    found = load_manifest(str(folder), tokenizer_folder=tokenizer_folder)
    entropy = float(-(SHARE * np.log(SHARE)).sum())
    splits = {name: dataclasses.replace(split, unigram_entropy=entropy) for name, split in found.splits.items()}
    return dataclasses.replace(found, splits=splits)


def records_of(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    lanes = [Lane(0, (RECORDS,) * SHARDS, lane, LANES) for lane in range(LANES)]
    return batch_rows(lanes, rows_before=(first - 1) * BATCH, rows=BATCH, count=last - first + 1)


def train(workdir: pathlib.Path, manifest: Manifest, *overrides: str) -> None:
    settings = (f"data.lanes={LANES}", "evaluate.every=0", "checkpoint.keep=9", *overrides)
    pretrain(tiny_config(*settings), Workdir(str(workdir)), manifest)


def said(file: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def back_to(workdir: pathlib.Path, step: int) -> None:
    """The workdir as a kill after `step` had been saved leaves it: with lines that come again."""
    for later in checkpoint_files.complete_steps(workdir / "checkpoints"):
        if later > step:
            shutil.rmtree(workdir / "checkpoints" / str(later))


# Advice ---------------------------------------------------------------------------------------------------------------

STUCK = (
    "train.steps=520",
    "log.every=20",
    "checkpoint.every=500",
    "masking.mask_share=1.0",
    "masking.random_share=0.0",
)


def test_a_run_of_hours_is_judged_by_its_own_steps(manifest, tmp_path):
    config = tiny_config("train.steps=0", "train.hours=1", "schedule.warmup_fraction=0.1")
    stages = make_stages(config, records=200)
    monitor = Monitor(config, Workdir(str(tmp_path)), manifest, print, stages=stages, warmup=100_000)
    monitor.on_metrics("train", 50, {"loss": 3.0, "share": 0.25})
    assert (monitor._adviser.steps, monitor._adviser.warmup_steps) == (200, 20)


@pytest.fixture(scope="module")
def stuck(one_device, tokenizer_folder, tmp_path_factory) -> tuple[pathlib.Path, Manifest]:
    folder = tmp_path_factory.mktemp("stuck")
    manifest = senseless(folder / "shards", tokenizer_folder)
    train(folder / "run", manifest, *STUCK)
    return folder / "run", manifest


@pytest.mark.slow
def test_a_training_on_random_text_is_reported_as_stuck(stuck):
    """It goes through the loop: nothing but the frequencies of tokens can be learned from it."""
    workdir, _ = stuck
    (advice,) = said(workdir / "advice.jsonl")
    assert (advice["kind"], advice["what"], advice["step"]) == ("advice", "stuck", 500)
    assert "at what the frequencies of tokens alone give (3.68 nats behind a mask" in advice["text"]
    assert said(workdir / "spikes.jsonl") == []


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True])
def test_nothing_is_said_twice_and_a_kill_loses_nothing(stuck, tmp_path, capsys, fresh):
    """Killed after the checkpoint of step 500, with the advice of that step said, or not yet."""
    workdir, manifest = stuck
    again = pathlib.Path(shutil.copytree(workdir, tmp_path / "again"))
    back_to(again, 500)
    if fresh:
        (again / "advice.jsonl").unlink()
    train(again, manifest, *STUCK)
    assert (again / "advice.jsonl").read_text() == (workdir / "advice.jsonl").read_text()
    assert (again / "metrics.jsonl").read_text() == (workdir / "metrics.jsonl").read_text()
    assert capsys.readouterr().err.count("the loss is stuck") == fresh


# Spikes ---------------------------------------------------------------------------------------------------------------

POISON = (76, 80)
SPIKY = ("train.steps=90", "log.every=5", "checkpoint.every=40")


@pytest.fixture(scope="module")
def spiky(one_device, tokenizer_folder, tmp_path_factory) -> tuple[pathlib.Path, Manifest]:
    folder = tmp_path_factory.mktemp("spiky")
    manifest = senseless(folder / "shards", tokenizer_folder, POISON)
    train(folder / "run", manifest, *SPIKY)
    return folder / "run", manifest


@pytest.mark.standard
def test_a_spike_is_written_down_with_its_batches_and_records(spiky):
    (spike,) = said(spiky[0] / "spikes.jsonl")
    assert (spike["first_update"], spike["last_update"], spike["batches"]) == (76, 80, ["76:80"])
    assert spike["loss"] > spike["median"] + 1
    ids, epochs = records_of(*POISON)
    assert [row["batch"] for row in spike["rows"]] == [76, 77, 78, 79, 80]
    assert [row["record_id"] for row in spike["rows"]] == ids.tolist()
    assert [row["epoch"] for row in spike["rows"]] == epochs.tolist()


@pytest.mark.slow
def test_skipped_on_resume_it_does_not_come_again(spiky, tmp_path, capsys):
    """As the sentence says: back to the checkpoint before it, and the range given."""
    workdir, manifest = spiky
    again = pathlib.Path(shutil.copytree(workdir, tmp_path / "again"))
    back_to(again, 40)
    (again / "spikes.jsonl").unlink()
    train(again, manifest, *SPIKY)
    words = capsys.readouterr().err
    assert words.count("the loss of the steps 76 to 80 jumped to") == 1
    assert "remove the checkpoints after step 75, and start the same command with --skip-batches 76:80." in words
    assert (again / "spikes.jsonl").read_text() == (workdir / "spikes.jsonl").read_text()

    back_to(again, 40)
    train(again, manifest, *SPIKY, "data.skip_batches=76:80")
    assert "jumped" not in capsys.readouterr().err
    assert len(said(again / "spikes.jsonl")) == 1, "what was said stays"
    skipped = {line["step"]: line["loss"] for line in said(again / "metrics.jsonl") if line["kind"] == "train"}
    assert skipped[80] < skipped[5]


@pytest.mark.slow
def test_a_spike_behind_a_skipped_range_has_its_own_batches(spiky, tmp_path):
    """With five batches left out before it and one within, the poison comes five steps earlier, in two pieces."""
    train(tmp_path, spiky[1], *SPIKY, "data.skip_batches=('21:25', '78:78')", "train.steps=80")
    (spike,) = said(tmp_path / "spikes.jsonl")
    assert (spike["first_update"], spike["last_update"], spike["batches"]) == (71, 75, ["76:77", "79:81"])
    assert [row["batch"] for row in spike["rows"]] == [76, 77, 79, 80, 81]
    for row in spike["rows"]:
        assert row["record_id"] == records_of(row["batch"], row["batch"])[0][0].tolist()


@pytest.mark.standard
def test_the_log_is_the_same_without_hooks(spiky, tmp_path, monkeypatch):
    workdir, manifest = spiky
    monkeypatch.setattr(Pretraining, "make_hooks", lambda *arguments: [])
    train(tmp_path / "plain", manifest, *SPIKY)
    assert (tmp_path / "plain" / "metrics.jsonl").read_bytes() == (workdir / "metrics.jsonl").read_bytes()
    assert not (tmp_path / "plain" / "spikes.jsonl").exists()
