"""Goodput: every second of the wall-clock is counted once, and only kept steps count as training."""

from mlm.report import goodput
from tests.support.reports import TIMING


def test_goodput_by_hand():
    use = goodput.use_of_time(goodput.split_sessions(TIMING))
    assert use == goodput.TimeUse(training=109, evaluation=9, checkpoints=6, start=50, redone=20, down=137)
    assert use.total == 431 - 100, "every second is counted once"
    assert use.goodput == 109 / 331


def test_a_stretch_that_was_kept_in_part_counts_in_part():
    first = [TIMING[0] | {"time": 0.0}, TIMING[1] | {"time": 10.0}]
    stretch = [{"kind": "train", "step": 41, "time": 50.0, "seconds": 40.0, "tokens_per_second": 1}]
    again = [{"kind": "start", "step": 11, "time": 50.0}, {"kind": "first_step", "step": 12, "time": 53.0}]
    use = goodput.use_of_time(goodput.split_sessions(first + stretch + again))
    assert use == goodput.TimeUse(training=10, start=13, redone=30)


def test_what_every_later_start_went_back_behind_is_redone():
    """The second start goes back to 10, the third to 5: of the first session only 5 updates were kept."""
    lines = []
    for begin, end, clock in ((0, 20, 0.0), (10, 30, 100.0), (5, 30, 200.0)):
        lines += [
            {"kind": "start", "step": begin, "time": clock},
            {"kind": "first_step", "step": begin, "time": clock + 1},
            {"kind": "train", "step": end, "time": clock + 1 + end - begin},
            {"kind": "eval", "step": end, "time": clock + 3 + end - begin, "seconds": 2.0},
        ]
    use = goodput.use_of_time(goodput.split_sessions(lines))
    assert use.training == 5 + 0 + 25
    assert use.redone == (15 + 2) + (20 + 2)
    assert use.evaluation == 2
    assert use.total == 228
