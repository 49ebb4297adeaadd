"""The quickstart's validation split shares no text with training, by a count that shares no code with mlm."""

import json
import pathlib

import numpy as np
import pytest

from mlm import __main__
from mlm.data import tfrecord
from tests.support import overlap

LENGTH = 40


def test_rows_are_counted_by_their_tokens_in_stretches_that_training_has(tmp_path: pathlib.Path):
    rng = np.random.default_rng(0)
    train, validation = (rng.integers(3, 10_000, (count, LENGTH)) for count in (300, 7))
    validation[1] = train[290]
    validation[2, 5:25] = train[7, 20:]  # half of it
    validation[3, 5:24] = train[8, 20:39]  # a token less
    validation[4, :13] = train[9, 27:]
    validation[5, :12] = train[9, :12]  # too short
    validation[6] = train[11] = np.tile([0, *range(50, 60), 2, 7, 8], 3)[:LENGTH]  # special tokens in each stretch
    for split, ids in (("train", train), ("validation", validation)):
        (tmp_path / split).mkdir()
        for shard, part in enumerate(np.array_split(ids, 2)):
            (tmp_path / split / f"dataset-{shard}-{len(part)}.tfrecord").write_bytes(b"".join(tfrecord.encode(part)))
    tokens = [{"id": 0, "special": True}, {"id": 5, "special": False}, {"id": 2, "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    np.testing.assert_array_equal(list(overlap.read_rows(str(tmp_path), "train")), train)
    assert overlap.count_run(str(tmp_path), str(tmp_path)) == (7, 2, 3)


@pytest.mark.slow
def test_at_most_5_percent_of_the_quickstart_s_validation_rows_are_half_in_training(tmp_path: pathlib.Path):
    """Where the packages of its validation groups were also trained on, it would be most of them."""
    for command in ("tokenizer", "shards"):
        assert __main__.main([command, "--config=configs/quickstart.py", f"--workdir={tmp_path}"]) == 0
    counts = overlap.count_run(str(tmp_path / "shards"), str(tmp_path / "tokenizer"))
    assert counts.rows > 2000, counts
    assert counts.half <= 0.05 * counts.rows and counts.none > 0.8 * counts.rows, counts
