"""Several processes: the same batches, record ids and masks, to the bit, on 1 x 8, 2 x 4 and 4 x 2 devices."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from tests.programs import order_dump
from tests.support.processes import run, run_together, train_arguments

PROGRAM, INTERLEAVED = "-m tests.programs.order_dump", "-m tests.programs.interleaved"


def dump(folder: pathlib.Path, manifest, processes: int, devices: int, start: int, stop: int, **options) -> dict:
    """Returns {"step name": the whole batch}, from what every process holds of it; "array's": as the array lies."""
    folder.mkdir()
    options = {"fsdp": 1, "interleaved": False} | options
    options |= {"folder": manifest.folder, "out": folder, "start": start, "stop": stop}
    if processes == 1:
        order_dump.dump({key: str(value) for key, value in options.items()}, 0)
    else:
        arguments = [f"--{key}={value}" for key, value in options.items()]
        run_together(arguments, processes=processes, devices=devices, program=PROGRAM)
    pieces: dict[str, dict[int, np.ndarray]] = {}
    for index in range(processes):
        with np.load(folder / f"{index}.npz") as file:
            for key, value in file.items():
                name, _, row = key.rpartition(" ")
                pieces.setdefault(name, {})[int(row)] = value
    return {name: np.concatenate([rows[row] for row in sorted(rows)]) for name, rows in pieces.items()}


@pytest.fixture(scope="module")
def whole(manifest, tmp_path_factory) -> dict:
    return dump(tmp_path_factory.mktemp("pod") / "1x8", manifest, 1, 8, 0, 12)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "fsdp"), [(2, 4, 1), (4, 2, 2)])
def test_same_batches_and_masks(whole, manifest, tmp_path, processes, devices, fsdp):
    other = dump(tmp_path / "out", manifest, processes, devices, 0, 12, fsdp=fsdp)
    assert_equal(whole, other)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "fsdp"), [(2, 4, 1), (4, 2, 2)])
def test_same_batches_and_masks_where_hosts_interleave(whole, manifest, tmp_path, processes, devices, fsdp):
    """From the seventh step on, so that seeking equals walking, too."""
    other = dump(tmp_path / "out", manifest, processes, devices, 7, 12, fsdp=fsdp, interleaved=True)
    blocks = whole["7 record_id"].reshape(processes, devices, 2)
    assert np.array_equal(other["7 array's"], blocks.swapaxes(0, 1).ravel()), "the rows have not moved"
    one, two = ({key: each for key, each in found.items() if "array's" not in key} for found in (whole, other))
    assert_equal({key: value for key, value in one.items() if int(key.split()[0]) >= 7}, two)


@pytest.mark.slow
def test_a_run_whose_hosts_interleave(manifest, tokenizer_folder, tmp_path):
    """The dropout of each row, accumulated, and the scores are those of one process; pseudo-perplexity too."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = [
        "model.hidden_dropout=0.1",
        "train.accumulate=2",
        "data.global_batch=32",
        "train.steps=4",
        "log.every=1",
    ]
    settings += ["evaluate.every=2", "evaluate.batch=32", "data.short_length=16", "data.short_share=0.5"]
    for workdir in (one, two):
        shutil.copytree(tokenizer_folder, workdir / "tokenizer")
    run(train_arguments(one, manifest.folder, *settings), devices=8)
    run_together(train_arguments(two, manifest.folder, *settings), processes=2, devices=4, program=INTERLEAVED)
    lines = [[json.loads(line) for line in (d / "metrics.jsonl").read_text().splitlines()] for d in (one, two)]
    assert len(lines[0]) == 6
    for a, b in zip(*lines, strict=True):
        assert (a["step"], a["kind"]) == (b["step"], b["kind"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5), f"step {a['step']}"
    shutil.rmtree(two)
    shutil.copytree(one, two)
    score = ["evaluate", "--pseudo=3", f"--config.shards.dir={manifest.folder}"]
    run([*score, f"--workdir={one}"], devices=8)
    run_together([*score, f"--workdir={two}"], processes=2, devices=4, program=INTERLEAVED)
    scores = [(workdir / "evaluation.json").read_text() for workdir in (one, two)]
    assert "pseudo" in scores[0] and scores[0] == scores[1].replace(str(two), str(one))


@pytest.mark.slow
def test_seeking_equals_walking(whole, manifest, tmp_path):
    later = dump(tmp_path / "out", manifest, 2, 4, 7, 12)
    assert_equal({name: value for name, value in whole.items() if int(name.split()[0]) >= 7}, later)


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.shape[0] == 16, name
        assert np.array_equal(value, other[name]), name
