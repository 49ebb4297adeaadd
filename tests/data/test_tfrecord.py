import numpy as np
import pytest

from mlm.data import tfrecord
from mlm.errors import DamageError
from tests.data.rows import write_records


def rows(count: int, length: int, top: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, top, (count, length)).astype(np.uint32)


@pytest.mark.parametrize(("length", "top"), [(1, 2), (32, 128), (512, 50_265), (40, 2**32)])
def test_records_are_those_of_tensorflow(tmp_path, length, top):
    """Byte for byte what protobuf makes when it sorts its maps."""
    ids_NxL = rows(50, length, top)
    ids_NxL[0] = 0
    ids_NxL[1] = top - 1
    write_records(tmp_path / "theirs", ids_NxL, np.ones_like(ids_NxL))
    assert b"".join(tfrecord.encode(ids_NxL)) == (tmp_path / "theirs").read_bytes()


def test_what_is_no_record_is_named():
    (record,) = tfrecord.encode(rows(1, 100, 50_000))
    for data in (b"", b"nothing", record[:120], record.replace(b"input_ids", b"output_id")):
        with pytest.raises(DamageError, match=r"some/file"):
            tfrecord.first_length(data, "some/file")
