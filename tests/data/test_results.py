"""Files of tasks: whole or not there, and read in parts."""

import numpy as np
import pytest

from mlm.data import results
from mlm.paths import UPath


@pytest.mark.parametrize("place", ["disk", pytest.param("bucket", marks=pytest.mark.standard)])
def test_a_file_is_whole_or_not_there_and_read_in_parts(request, tmp_path, place):
    folder = UPath(tmp_path / "new" if place == "disk" else request.getfixturevalue("bucket"))
    file = folder / "numbers"
    results.save(file, np.arange(10))
    with pytest.raises(ZeroDivisionError), results.written(file) as local:
        local.write_text("half")
        raise ZeroDivisionError
    assert [path.name for path in folder.iterdir()] == ["numbers"], "nothing is left"
    for first, count in ((0, 10), (3, 4), (7, 0)):
        found = results.load(file, np.int64, first, count)
        np.testing.assert_array_equal(found, np.arange(first, first + count))
