"""Files of tasks: whole or not there, and read in parts."""

import errno
import os

import numpy as np
import pytest

from mlm.data import results
from mlm.errors import InputError
from mlm.paths import UPath


@pytest.fixture(params=["disk", pytest.param("bucket", marks=pytest.mark.standard)])
def folder(request, tmp_path) -> UPath:
    if request.param == "disk":
        return UPath(tmp_path / "new" / "tasks")
    return UPath(request.getfixturevalue("bucket"))


def test_what_is_saved_is_loaded(folder):
    file = folder / "x.numbers"
    numbers = np.arange(10, dtype=np.uint32)
    results.save(file, numbers)
    np.testing.assert_array_equal(results.load(file, np.uint32, 3, 4), numbers[3:7])
    np.testing.assert_array_equal(results.load(file, np.uint32, after=8), numbers[2:])
    assert results.load(file, np.uint32, 7, 0).size == 0
    results.save(folder / "x.none")
    assert results.load(folder / "x.none", np.uint64).size == 0
    results.save_cut(file, numbers, numbers // 4, 5)
    for first, stop in ((0, 5), (1, 2), (1, 3), (3, 5)):
        expected = numbers[4 * first : 4 * stop]
        cut = {"pieces": 5, "first": first, "stop": stop}
        (found,) = results.load_cuts([f"{folder}/x"], "numbers", np.dtype(np.uint32), **cut)
        np.testing.assert_array_equal(found, expected)
    results.save_json(folder / "x.json", {"a": [1, "é"]})
    assert results.load_json(folder / "x.json") == {"a": [1, "é"]}


def test_a_file_appears_whole_or_not_at_all(folder):
    file = folder / "x.numbers"
    results.save(file, np.arange(3))
    with pytest.raises(ZeroDivisionError), results.written(file) as local:
        local.write_text("half")
        raise ZeroDivisionError
    np.testing.assert_array_equal(results.load(file, np.int64), np.arange(3))
    with (
        pytest.raises(InputError, match=r"x\.numbers: can't be written \(No space left"),
        results.written(file),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [path.name for path in folder.iterdir()] == ["x.numbers"], "nothing is left"
