"""Two processes, and one with the devices of both: the same batches, record ids and masks, to the bit, and scores."""

import pathlib

import numpy as np
import pytest

from tests.programs import order_dump
from tests.support.processes import run_together

pytestmark = pytest.mark.slow

ORDER_DUMP = "-m tests.programs.order_dump"
INTERLEAVED = "-m tests.programs.interleaved"


def assembled(folder: pathlib.Path, processes: int) -> dict[str, np.ndarray]:
    """{"MESH STEP NAME": the whole batch}, from what every process holds of it."""
    pieces: dict[str, dict[int, np.ndarray]] = {}
    for index in range(processes):
        with np.load(folder / f"{index}.npz") as file:
            for key, value in file.items():
                name, _, row = key.rpartition(" ")
                pieces.setdefault(name, {})[int(row)] = value
    return {
        name: np.concatenate([rows[row] for row in sorted(rows)]) for name, rows in pieces.items()
    }


def test_same_batches_and_masks(manifest, tmp_path):
    """Where hosts interleave, too; and from the eighth step on, so that seeking equals walking."""
    (tmp_path / "whole").mkdir()
    order_dump.dump(manifest.folder, str(tmp_path / "whole"), 0)
    arguments = [f"--folder={manifest.folder}", f"--out={tmp_path}"]
    run_together(arguments, processes=2, devices=4, program=ORDER_DUMP)
    whole = assembled(tmp_path / "whole", 1)
    two = assembled(tmp_path, 2)
    assert whole.keys() == two.keys()
    assert {name.split()[1] for name in two if name.startswith("interleaved")} == set("789") | {
        "10",
        "11",
    }
    for name, batch in two.items():
        expected = whole[name.replace("interleaved", "plain")]
        if name.startswith("interleaved") and name.endswith("array"):  # the rows lie elsewhere
            expected = expected.reshape(2, 4, 2).swapaxes(0, 1).ravel()
        assert batch.shape[0] == 16 and np.array_equal(batch, expected), name
