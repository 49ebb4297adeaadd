"""Two processes, and one with the devices of both: the same batches, record ids and masks, to the bit, and scores."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from mlm import __main__
from tests.programs import order_dump
from tests.support.processes import run_together, train_arguments
from tests.support.tiny import meshes_of

pytestmark = pytest.mark.slow

ORDER_DUMP, INTERLEAVED = "-m tests.programs.order_dump", "-m tests.programs.interleaved"


def assembled(folder: pathlib.Path, processes: int) -> dict[str, np.ndarray]:
    """{"MESH STEP NAME": the whole batch}, from what every process holds of it."""
    pieces: dict[str, dict[int, np.ndarray]] = {}
    for index in range(processes):
        with np.load(folder / f"{index}.npz") as file:
            for key, value in file.items():
                name, _, row = key.rpartition(" ")
                pieces.setdefault(name, {})[int(row)] = value
    return {name: np.concatenate([rows[row] for row in sorted(rows)]) for name, rows in pieces.items()}


def test_same_batches_and_masks(manifest, tmp_path):
    """Where hosts interleave, too; and from the eighth step on, so that seeking equals walking."""
    (tmp_path / "whole").mkdir()
    order_dump.dump(manifest.folder, str(tmp_path / "whole"), 0)
    arguments = [f"--folder={manifest.folder}", f"--out={tmp_path}"]
    run_together(arguments, processes=2, devices=4, program=ORDER_DUMP)
    whole, two = assembled(tmp_path / "whole", 1), assembled(tmp_path, 2)
    assert whole.keys() == two.keys()
    assert {name.split()[1] for name in two if name.startswith("interleaved")} == set("789") | {"10", "11"}
    for name, batch in two.items():
        expected = whole[name.replace("interleaved", "plain")]
        if name.startswith("interleaved") and name.endswith("array"):  # the rows lie elsewhere
            expected = expected.reshape(2, 4, 2).swapaxes(0, 1).ravel()
        assert batch.shape[0] == 16 and np.array_equal(batch, expected), name


def test_a_run_whose_hosts_interleave(manifest, tokenizer_folder, tmp_path):
    """The dropout of each row, accumulated, and the scores are those of one process; pseudo-perplexity too."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = ["model.hidden_dropout=0.1", "train.accumulate=2", "data.global_batch=32"]
    settings += ["train.steps=4", "log.every=1", "evaluate.every=2", "evaluate.batch=32"]
    settings += ["data.short_length=16", "data.short_share=0.5"]
    for workdir in (one, two):
        shutil.copytree(tokenizer_folder, workdir / "tokenizer")
    with meshes_of(4):
        assert __main__.main(train_arguments(one, manifest.folder, *settings)) == 0
    run_together(train_arguments(two, manifest.folder, *settings), processes=2, devices=2, program=INTERLEAVED)
    logs = [(workdir / "metrics.jsonl").read_text().splitlines() for workdir in (one, two)]
    assert len(logs[0]) == 6
    for a, b in zip(*(map(json.loads, lines) for lines in logs), strict=True):
        assert (a["step"], a["kind"]) == (b["step"], b["kind"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5), f"step {a['step']}"
    shutil.rmtree(two)
    shutil.copytree(one, two)
    score = ["evaluate", "--pseudo=3", f"--config.shards.dir={manifest.folder}"]
    with meshes_of(4):
        assert __main__.main([*score, f"--workdir={one}"]) == 0
    run_together([*score, f"--workdir={two}"], processes=2, devices=2, program=INTERLEAVED)
    scores = [(workdir / "evaluation.json").read_text() for workdir in (one, two)]
    assert "pseudo" in scores[0] and scores[0] == scores[1].replace(str(two), str(one))
