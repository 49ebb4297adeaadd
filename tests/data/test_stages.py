"""What each step of a run reads, against a plain list of batches: sizes, short rows, skipped batches, branches."""

import itertools

import pytest

from mlm.data.stages import (
    Stages,
    batch_sizes,
    check_branch,
    check_skipped,
    make_stages,
    total_steps,
)
from mlm.errors import InputError
from tests.support.tiny import tiny_config

SIZES = ("data.lanes=4", "data.batch_stages=((4, 3), (8, 3))")  # of batches of 16 rows
RANGES = [[], [(1, 1)], [(3, 5)], [(3, 5), (6, 6), (9, 12)], [(2, 2), (4, 4), (20, 90)]]


def stages_of(*overrides: str) -> Stages:
    return make_stages(tiny_config(*overrides), records=200)


def batches_kept(ranges: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Number, rows and rows before of the first batches of SIZES without those of the ranges."""
    rows = [4] * 3 + [8] * 3 + [16] * 200
    batches = zip(range(1, 200), rows, itertools.accumulate(rows, initial=0), strict=False)
    skipped = {number for first, last in ranges for number in range(first, last + 1)}
    return [batch for batch in batches if batch[0] not in skipped]


@pytest.mark.parametrize("short", [(), ("data.short_length=8",)])
@pytest.mark.parametrize("ranges", RANGES)
def test_a_step_reads_what_the_list_of_batches_says(ranges, short):
    """Without the skipped ones, whatever stages the short rows of the first 7 of 8 steps split."""
    texts = tuple(f"{first}:{last}" for first, last in ranges)
    stages = stages_of(*SIZES, f"data.skip_batches={texts!r}", "train.steps=8", *short)
    kept = batches_kept(ranges)
    for step, batch in enumerate(kept[:60], 1):
        stage = stages.stage_at(step)
        assert (stage.batch_of(step), stage.rows) == batch[:2]
        assert stage.length == (8 if short and step <= 7 else 32)
    for first, last in itertools.combinations(range(1, 16), 2):
        read = [
            (part.batch + index, part.rows, part.rows_before + index * part.rows)
            for part in stages.between(first, last)
            for index in range(part.count)
        ]
        assert read == kept[first - 1 : last]
        spans = stages.batches_between(first, last)
        flat = [(number, rows) for a, b, rows in spans for number in range(a, b + 1)]
        assert flat == [batch[:2] for batch in read]
        for (_, b, rows), (a, _, next_rows) in itertools.pairwise(spans):
            assert b + 1 < a or rows != next_rows, "as few ranges as possible"
    for step in range(40):
        assert stages.rows_read(step) == sum(rows for _, rows, _ in kept[:step])


def test_the_steps_of_a_run():
    assert total_steps(tiny_config("train.steps=7"), records=10_000) == 7
    epochs = ("train.steps=0", "train.epochs=1.5")
    assert total_steps(tiny_config(*epochs), records=100) == 10, "the last batch is whole, too"
    whole = tiny_config("train.steps=0", "train.epochs=1.1", "data.global_batch=8")
    assert total_steps(whole, records=1600) == 220, "1.1 * 1600 is more than 1,760 in floats"
    staged = tiny_config(*SIZES, *epochs)
    for records, steps in ((160, 6 + 13), (163, 6 + 14), (24, 6), (25, 7), (8, 3), (1, 1)):
        assert total_steps(staged, records) == steps


def test_neighbouring_stages_of_equal_rows_are_one():
    def sizes(value: str) -> list:
        return batch_sizes(tiny_config("data.lanes=4", f"data.batch_stages={value}"))

    assert sizes("((8, 2), (8, 2))") == sizes("((8, 4),)")
    assert sizes("((8, 2), (16, 9))") == sizes("((8, 2),)") and sizes("((16, 2),)") == sizes("()")


def test_a_branch_counts_its_own_rows():
    config = tiny_config("train.branch_from=runs/a@4")
    stages = make_stages(config, records=200)
    assert [stages.own_rows_read(step) for step in (0, 4, 5, 7)] == [0, 0, 16, 48]
    check_branch(config, 5)
    with pytest.raises(InputError, match=r"runs/a@4: .*end after step 4, .* starts after step 4"):
        check_branch(config, 4)


def test_the_checkpoints_that_a_new_range_leaves():
    check = {"step": 12, "steps": [4, 8, 12], "where": "w"}
    check_skipped(["3:4"], ["3:4", "15:20"], **check)  # step 12 has read batch 14
    for saved, new, good in (
        (["3:4"], ["3:4", "14:20"], 8),
        (["3:4", "6:6"], ["6:6"], 0),
        ([], ["5:6"], 4),
    ):
        flags = " ".join(f"--skip-batches {each}" for each in saved) or "none"
        with pytest.raises(InputError, match=rf"w/12 was made with {flags};.* step {good}\."):
            check_skipped(saved, new, **check)
