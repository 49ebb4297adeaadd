"""Stages of the batch size: one stream of rows whatever the batches are, from any step, on any host; in a real run."""

import itertools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from mlm.data.mixture import lanes
from mlm.data.order import batch_rows
from mlm.data.stages import make_stages
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files
from mlm.tasks import pretraining
from mlm.tasks.pretraining import Pretraining
from mlm.training import branch, sharding, train
from mlm.workdir import Workdir
from tests.support.corpora import in_epochs
from tests.support.states import meta_of, state_of
from tests.support.tiny import pretrain, tiny_config

pytestmark = pytest.mark.usefixtures("one_device")
LANES = 3
READ = (f"data.lanes={LANES}", "data.global_batch=24", "data.batch_stages=((6, 30), (12, 30))", "train.steps=120")


def batches_of(manifest, start: int, *overrides: str):
    mesh, config = sharding.make_mesh(data=1, fsdp=1, tensor=1), tiny_config(*READ, *overrides)
    stages = make_stages(config, manifest.splits["train"].records)
    return pretraining.train_batches(config, manifest, mesh, stages, start=start)


@pytest.fixture(scope="module")
def straight(one_device, manifest) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(batches_of(manifest, 0), 120))


def joined(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}


def test_a_lane_reads_every_record_once_an_epoch_over_all_borders(straight, manifest):
    assert [len(batch["record_id"]) for batch in straight] == [6] * 30 + [12] * 30 + [24] * 60
    for number, lane in enumerate(lanes(manifest, "train", seed=0, lanes=LANES)):
        own = [
            pair
            for batch in straight
            for pair in zip(
                *(batch[key].reshape(LANES, -1)[number].tolist() for key in ("record_id", "epoch")), strict=True
            )
        ]
        assert own == list(itertools.islice(lane.read(0), len(own)))
        first = [record for record, epoch in own if epoch == 0]
        assert len(set(first)) == len(first) == lane.size < len(own)


@pytest.mark.parametrize("start", [1, 29, 30, 31, 59, 60, 100])
def test_seeking_gives_the_batches_of_a_straight_run(straight, manifest, start):
    found, expected = in_epochs(batches_of(manifest, start), 8), joined(straight[start : start + 8])
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)


@pytest.mark.standard
def test_each_host_reads_its_part(straight, manifest, monkeypatch):
    parts = []
    for host in range(LANES):
        span = lambda mesh, rows, host=host: (host * rows // LANES, (host + 1) * rows // LANES)  # noqa: E731
        monkeypatch.setattr(sharding, "local_rows", span)
        parts.append(list(itertools.islice(batches_of(manifest, 28), 35)))
    for batch, own in zip(straight[28:63], zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(joined(own)["input_ids"], batch["input_ids"])


@pytest.mark.standard
def test_skipped_batches_leave_the_others_as_they_are(straight, manifest):
    skipped = {2, 3, *range(29, 33), 60}
    kept = [batch for number, batch in enumerate(straight, 1) if number not in skipped]
    ranges = "data.skip_batches=('2:3', '29:32', '60:60')"
    for start in (0, 26, 50):
        expected = joined(kept[start : start + 10])
        found = in_epochs(batches_of(manifest, start, ranges), 10)
        np.testing.assert_array_equal(found["record_id"], expected["record_id"])


def test_the_records_of_batches_without_reading_them(straight, manifest):
    order = lanes(manifest, "train", seed=0, lanes=LANES)
    parts = list(make_stages(tiny_config(*READ), 1000).between(28, 62))
    assert [(part.first, part.last) for part in parts] == [(28, 30), (31, 60), (61, 62)]
    for part in parts:
        ids, epochs = batch_rows(order, rows_before=part.rows_before, rows=part.rows, count=part.count)
        for batch, ids_B, epochs_B in zip(straight[part.first - 1 : part.last], ids, epochs, strict=True):
            np.testing.assert_array_equal(ids_B, batch["record_id"])
            np.testing.assert_array_equal(epochs_B, batch["epoch"])


# A run ----------------------------------------------------------------------------------------------------------------

SETTINGS = (
    "data.lanes=4",
    "data.batch_stages=((4, 2), (8, 2))",
    "data.short_length=16",
    "data.short_share=0.375",
    "train.steps=8",
    "train.accumulate=2",
    "model.hidden_dropout=0.1",
    "log.every=1",
    "checkpoint.every=3",
    "checkpoint.keep=9",
    "evaluate.every=0",
)
SIZES = [(16, 4), (16, 4), (16, 8), (32, 8), *[(32, 16)] * 4]  # of the rows, and how many, in each step


@pytest.fixture(scope="module")
def trained(one_device, manifest, tmp_path_factory) -> tuple[pathlib.Path, Pretraining]:
    workdir, config = tmp_path_factory.mktemp("trained"), tiny_config(*SETTINGS)
    task = Pretraining.open(config, Workdir(str(workdir)), manifest)
    train.train(config, Workdir(str(workdir)), task)
    return workdir, task


@pytest.mark.standard
def test_each_size_is_compiled_once(trained):
    workdir, task = trained
    stages = [task.stages.stage_at(step) for step in range(1, 9)]
    assert [(stage.length, stage.rows) for stage in stages] == SIZES
    assert task.train_step._cache_size() == len(set(SIZES)) == 4
    timing = [json.loads(line) for line in (workdir / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in timing if line["kind"] == "first_step"] == [1, 3, 4, 5]


def test_tokens_are_those_of_the_batches(trained):
    _, task = trained
    assert [task.tokens_read(step) for step in range(9)] == [32 * n for n in (0, 4, 8, 16, 24, 40, 56, 72, 88)]
    useful = [rows * 32 * task.flops_per_token(length) for length, rows in SIZES]
    assert task.useful_flops(8, 0.0) == pytest.approx(sum(useful))


def resume(trained, manifest, tmp_path, *overrides: str) -> list[pathlib.Path]:
    """Returns the folders of the run, and of a copy resumed at step 3."""
    workdir, _ = trained
    assert checkpoint_files.complete_steps(workdir / "checkpoints") == [3, 6, 8]
    shutil.copytree(workdir, tmp_path / "run")
    for later in (6, 8):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(later))
    pretrain(tiny_config(*SETTINGS, *overrides), Workdir(str(tmp_path / "run")), manifest)
    return [workdir, tmp_path / "run"]


@pytest.mark.standard
def test_resumed_within_a_stage_and_at_its_end(trained, manifest, tmp_path):
    folders = resume(trained, manifest, tmp_path)
    assert len({(folder / "metrics.jsonl").read_text() for folder in folders}) == 1
    one, other = (state_of(folder, 8) for folder in folders)
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_resumed_with_other_microbatches_the_losses_are_the_same(trained, manifest, tmp_path):
    folders = resume(trained, manifest, tmp_path, "train.accumulate=4")
    lines = ((folder / "metrics.jsonl").read_text().splitlines() for folder in folders)
    old, new = ([json.loads(line)["loss"] for line in each] for each in lines)
    assert new == pytest.approx(old, rel=1e-6) and len(new) == 9


def open_branch(trained, tmp_path, step: int, *overrides: str) -> branch.Source:
    workdir, task = trained
    config = tiny_config(*SETTINGS, f"train.branch_from={workdir}@{step}", *overrides)
    meta = meta_of(task) | {"config": config}
    return branch.open_source(meta, Workdir(str(tmp_path)), make_stages(config, task.info.records))


def test_a_branch_goes_on_where_the_batches_were(trained, tmp_path):
    """A longer run has the same stages; what comes after the branch may differ."""
    assert open_branch(trained, tmp_path, 6, "train.steps=16").step == 6
    assert open_branch(trained, tmp_path, 3, "data.batch_stages=((4, 2), (8, 4))").step == 3
    read = "batches 1 to 2 of 4 rows, batches 3 to 4 of 8 rows, batches 5 to 6 of 16 rows"
    for stages in ("((4, 2), (8, 4))", "()"):
        with pytest.raises(InputError, match=f"@6: it read {read}; set data.batch_stages and data.skip_b"):
            open_branch(trained, tmp_path, 6, f"data.batch_stages={stages}")


def test_devices_that_a_stage_does_not_fill_are_refused(manifest):
    assert jax.device_count() == 8
    mesh = jax.make_mesh((8, 1, 1), sharding.AXES)
    with pytest.raises(
        InputError, match=r"data.batch_stages / train.accumulate: 12 rows can't be split over 8 devices"
    ):
        Pretraining.without_data(tiny_config("data.lanes=4", "data.batch_stages=((12, 6),)"), mesh)
    config = tiny_config("data.lanes=4", "data.batch_stages=((12, 6),)")
    found = sharding.host_input(np.arange(8).reshape(8, 1), config)
    assert "data.batch_stages / train.accumulate: 12 rows" in found["error"] and not found["fed"]
