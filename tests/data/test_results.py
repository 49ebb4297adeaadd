"""Files of tasks: whole or not there, read in parts, and one sentence where that fails."""

import numpy as np
import pytest

from mlm.data import results
from mlm.errors import DamageError
from mlm.paths import UPath


@pytest.fixture(params=["disk", pytest.param("bucket", marks=pytest.mark.standard)])
def folder(request, tmp_path) -> UPath:
    return (
        UPath(tmp_path / "new" / "tasks")
        if request.param == "disk"
        else UPath(request.getfixturevalue("bucket"))
    )


def test_what_is_saved_is_loaded(folder):
    numbers = np.arange(10, dtype=np.uint32)
    pairs = np.array([(1, 2), (3, 4)], [("a", "<u8"), ("b", "<u4")])
    results.save(folder / "x.numbers", numbers, pairs)
    file = folder / "x.numbers"
    np.testing.assert_array_equal(results.load(file, np.uint32, 0, 10), numbers)
    np.testing.assert_array_equal(results.load(file, np.uint32, 3, 4), numbers[3:7])
    np.testing.assert_array_equal(results.load(file, pairs.dtype, 1, 1, after=40), pairs[1:])
    np.testing.assert_array_equal(results.load(file, pairs.dtype, after=40), pairs)
    assert results.load(file, np.uint32, 7, 0).size == 0
    results.save(folder / "x.none")
    assert results.load(folder / "x.none", np.uint64).size == 0
    results.save_json(folder / "x.json", {"a": [1, "é"]})
    assert results.load_json(folder / "x.json") == {"a": [1, "é"]}


def test_a_file_appears_whole_or_not_at_all(folder):
    file = folder / "x.numbers"
    results.save(file, np.arange(3))
    with pytest.raises(ZeroDivisionError), results.written(file) as local:
        local.write_text("half")
        raise ZeroDivisionError
    np.testing.assert_array_equal(results.load(file, np.int64), np.arange(3))
    assert [path.name for path in folder.iterdir()] == ["x.numbers"], "nothing is left"


@pytest.mark.parametrize("damage", ["gone", "cut", "cut in the middle of an item"])
def test_a_damaged_file_is_named(tmp_path, damage):
    folder = UPath(tmp_path)
    file = folder / "x.numbers"
    if damage != "gone":
        results.save(file, np.arange(10))
        file.write_bytes(file.read_bytes()[: 72 if damage == "cut" else -1])
    with pytest.raises(DamageError, match=r"x\.numbers: .*/x\.\*"):
        results.load(file, np.int64, 0, 10)
    results.save(folder / "x.json", np.frombuffer(b'{"a": ', np.uint8))
    with pytest.raises(DamageError, match=r"x\.json"):
        results.load_json(folder / "x.json")
