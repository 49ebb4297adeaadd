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


def test_the_best_is_not_the_newest(tmp_path):
    folder = UPath(tmp_path)
    for step, score in ((3, 0.2), (6, 0.1), (9, 0.1), (12, 0.4), (14, None)):
        save(folder, step, score)
    assert checkpoint_files.choose(folder, on_damage="stop", best=True) == 9
    assert checkpoint_files.choose(folder, on_damage="stop") == 14


@pytest.mark.parametrize("text", ["", "[]", '{"meta/metadata": 1}'])
def test_hashes_that_can_not_be_read_are_damage(tmp_path, text):
    save(UPath(tmp_path), 10)
    (tmp_path / "10" / checkpoint_files.HASHES).write_text(text)
    with pytest.raises(DamageError, match=r"10: hashes.json can't be read"):
        checkpoint_files.choose(UPath(tmp_path), on_damage="stop")
