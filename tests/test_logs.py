"""The logs: whole lines, no line twice, and nothing lost to a line that a kill has torn."""

import json
import re

import numpy as np
import pytest

from mlm import logs
from mlm.errors import DamageError
from mlm.paths import UPath
from mlm.training import metrics
from mlm.training.metrics import Log
from mlm.training.xla_metrics import Compilations
from tests.training.toy import logged_task

LINES = [
    {"step": step, "kind": kind, "loss": 1 / step}
    for step in (10, 20, 30)
    for kind in ("train", "eval")
]


def as_text(lines: list[dict]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def path(tmp_path) -> UPath:
    """A log of LINES."""
    path = UPath(tmp_path) / "log"
    path.write_text(as_text(LINES))
    return path


def test_read_gives_the_lines_of_a_kind(path):
    assert logs.read(path, "train") == LINES[::2] and logs.read(path) == LINES
    assert logs.read(path.with_name("none"), "train") == []
    before = path.stat().st_ino
    logs.cut(path, 30)
    assert path.stat().st_ino == before, "a good log is left alone"


@pytest.mark.parametrize(
    "torn", ["", '{"step": 20, "kind": "tra', '{"step": 20, "kind": "train", "loss": 1}']
)
def test_cut_keeps_whole_lines_up_to_a_step(path, torn):
    path.write_text(as_text(LINES) + torn)
    logs.cut(path, 20)
    assert path.read_text() == as_text(LINES[:4])
    logs.cut(path.with_name("none"), 20)  # nothing there, nothing to do


def test_damage_inside_is_named_and_nothing_is_lost(path):
    text = as_text(LINES[:2]) + "\x00\x00\x00\n" + as_text(LINES[2:])
    path.write_text(text)
    for function, argument in ((logs.read, "train"), (logs.cut, 10)):
        with pytest.raises(DamageError, match=r"log, line 3: is not a line of a log"):
            function(path, argument)
    assert path.read_text() == text


def test_lines_and_objects_of_editors_on_windows(tmp_path):
    """A byte-order mark, and U+2028 as it is, which ends no line of JSON."""
    content = {"step": 1, "kind": "train", "note": "a\u2028b\x85c"}
    text = json.dumps(content, ensure_ascii=False) + "\n"
    path = UPath(tmp_path / "a")
    path.write_text(text, encoding="utf-8")
    assert logs.read(path) == [content]
    path.write_text("\ufeff" + text, encoding="utf-8")
    assert logs.read_object(path) == content


def test_throughput_and_the_time_left_follow_the_size_of_the_batches(tmp_path, monkeypatch, capsys):
    """Steps of 10 tokens up to the tenth, then of 40; a second each."""
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    task = logged_task(
        "train.steps=20", tokens_read=lambda step: 10 * step + 30 * max(step - 10, 0)
    )
    with Compilations() as programs, Log(UPath(tmp_path), task, programs, start=0) as log:
        for step in (5, 15):
            clock[0] = step
            log.train(step, {"loss": np.float32(1), "consecutive_nonfinite": np.int32(0)})
    lines = logs.read(UPath(tmp_path / "timing.jsonl"), "train")
    assert [line["tokens_per_second"] for line in lines] == [10, 25]
    assert re.findall(r"(\S+) left", capsys.readouterr().err) == ["00:45", "00:08"]
