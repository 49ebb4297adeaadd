"""Several processes: the same batches, record ids and masks, to the bit, on 1 x 8, 2 x 4 and 4 x 2 devices."""

import pathlib

import numpy as np
import pytest

from tests.processes import run_together

PROGRAM = "-m tests.order_dump"


def dump(folder: pathlib.Path, manifest, processes: int, devices: int, start: int, stop: int, fsdp: int = 1) -> dict:
    """Returns {"step name": the whole global array}, from what every process holds of it."""
    folder.mkdir()
    arguments = [f"--folder={manifest.folder}", f"--out={folder}", f"--start={start}", f"--stop={stop}"]
    run_together([*arguments, f"--fsdp={fsdp}"], processes=processes, devices=devices, program=PROGRAM)
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


@pytest.mark.parametrize(("processes", "devices", "fsdp"), [(2, 4, 1), (4, 2, 2)])
def test_same_batches_and_masks(whole, manifest, tmp_path, processes, devices, fsdp):
    other = dump(tmp_path / "out", manifest, processes, devices, 0, 12, fsdp)
    assert_equal(whole, other)


def test_seeking_equals_walking(whole, manifest, tmp_path):
    later = dump(tmp_path / "out", manifest, 2, 4, 7, 12)
    assert_equal({name: value for name, value in whole.items() if int(name.split()[0]) >= 7}, later)


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.shape[0] == 16, name
        assert np.array_equal(value, other[name]), name
