"""Which step of a run is chosen: the newest or the best of those that are whole; a damaged file is named."""

import json

import pytest

from mlm.errors import DamageError
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files


def save(folder: UPath, step: int, score: float | None = None) -> None:
    (folder / str(step) / "metrics").mkdir(parents=True)
    (folder / str(step) / "state").write_text("x")
    if score is not None:
        (folder / str(step) / "metrics" / "metrics").write_text(json.dumps({"loss": score}))
    checkpoint_files.write_hashes(folder, step)


@pytest.fixture
def saved(tmp_path) -> UPath:
    save(UPath(tmp_path), 10)
    return UPath(tmp_path)


def test_the_best_is_not_the_newest(tmp_path):
    folder = UPath(tmp_path)
    for step, score in ((3, 0.2), (6, 0.1), (9, 0.1), (12, 0.4), (14, None)):
        save(folder, step, score)
    assert checkpoint_files.choose(folder, on_damage="stop", best=True) == 9
    assert checkpoint_files.choose(folder, on_damage="stop") == 14


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '{"meta/metadata": 1}', '{"meta/metadata": null}', "[" * 90_000]
)
def test_hashes_that_can_not_be_read_are_damage(saved, text):
    (saved / "10" / checkpoint_files.HASHES).write_text(text)
    with pytest.raises(DamageError, match=r"10: hashes.json can't be read"):
        checkpoint_files.choose(saved, on_damage="stop")


@pytest.mark.parametrize("loss", ["x", None, [], 10**400, float("nan")])
def test_a_score_that_is_no_number_does_not_end_the_choice(saved, loss):
    (saved / "10" / "metrics" / "metrics").write_text(json.dumps({"loss": loss}))
    assert checkpoint_files.choose(saved, on_damage="stop", best=True) == 10
