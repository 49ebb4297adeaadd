"""Skipped batches in a run: those that are read, and what a resume may do (their arithmetic: test_stages)."""

import itertools
import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from mlm import __main__
from mlm.data.stages import make_stages
from mlm.pretrained import checkpoint_files
from mlm.tasks import pretraining
from mlm.training import sharding
from tests.data.rows import train
from tests.support.corpora import in_epochs
from tests.support.processes import train_arguments
from tests.support.tiny import tiny_config

# The batches of a run -------------------------------------------------------------------------------------------------


def batches_of(manifest, mesh, start: int, *ranges: str):
    config = tiny_config("data.lanes=3", "data.global_batch=24", f"data.skip_batches={ranges!r}")
    stages = make_stages(config, manifest.splits["train"].records)
    return pretraining.train_batches(config, manifest, mesh, stages, start=start)


@pytest.mark.slow
def test_a_run_reads_the_order_without_the_ranges(manifest):
    """From any step on, so over a resume; a range at the beginning, two that touch, and one over an epoch's end."""
    mesh = sharding.make_mesh(data=-1, fsdp=1, tensor=1)
    everything = list(itertools.islice(train(manifest, global_batch=24, rows=(0, 24)), 80))
    skipped = {1, 2, 6, 7, 8, 9, *range(30, 61)}
    kept = [batch for number, batch in enumerate(everything, 1) if number not in skipped]
    for start in (0, 3, 24):
        stream = batches_of(manifest, mesh, start, "1:2", "8:9", "6:7", "30:60")
        found = in_epochs(stream, 10)
        for key in found:
            expected = np.concatenate([batch[key] for batch in kept[start : start + 10]])
            np.testing.assert_array_equal(found[key], expected, err_msg=f"{key} from {start}")


# Resume ---------------------------------------------------------------------------------------------------------------

SETTINGS = ("train.steps=12", "checkpoint.every=4", "evaluate.every=0", "log.every=1", "checkpoint.keep=9")


def command(workdir: pathlib.Path, manifest, *ranges: str) -> list[str]:
    flags = [part for text in ranges for part in ("--skip-batches", text)]
    return train_arguments(workdir, manifest.folder, *SETTINGS) + flags


def losses(workdir: pathlib.Path) -> list[float]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def drop_after(workdir: pathlib.Path, step: int) -> None:
    for later in checkpoint_files.complete_steps(workdir / "checkpoints"):
        if later > step:
            shutil.rmtree(workdir / "checkpoints" / str(later))


@pytest.fixture(scope="module")
def plain(one_device, manifest, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("plain")
    assert __main__.main(command(workdir, manifest)) == 0
    return workdir


def refused(arguments: list[str], capsys) -> str:
    assert __main__.main(arguments) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_range_is_added_on_resume_and_stays(manifest, plain, tmp_path, capsys):
    workdir = pathlib.Path(shutil.copytree(plain, tmp_path / "run"))
    sentence = refused(command(workdir, manifest, "6:7"), capsys)
    assert "6:7: the checkpoint" in sentence and "checkpoints/12 has read the batches up to 12" in sentence
    assert re.search(
        r"remove the newer checkpoints by hand \(8, 12 in \S+\), then the run resumes from step 4\.", sentence
    )
    assert "starts from the beginning" in refused(command(workdir, manifest, "4:4"), capsys)
    assert losses(workdir) == losses(plain), "nothing was touched"

    drop_after(workdir, 4)
    assert __main__.main(command(workdir, manifest, "6:7")) == 0
    assert losses(workdir)[:5] == losses(plain)[:5]
    assert losses(workdir)[5:] != losses(plain)[5:]

    # Straight with the range from the beginning, and killed and resumed with it: the same to the bit.
    straight = tmp_path / "straight"
    assert __main__.main(command(straight, manifest, "6:7")) == 0
    assert (straight / "metrics.jsonl").read_text() == (workdir / "metrics.jsonl").read_text()
    drop_after(workdir, 8)
    assert __main__.main(command(workdir, manifest, "6:7")) == 0
    assert (straight / "metrics.jsonl").read_text() == (workdir / "metrics.jsonl").read_text()

    sentence = refused(command(workdir, manifest), capsys)
    assert "was made without the batches 6:7" in sentence and "give --skip-batches 6:7 as well" in sentence
    assert "up to 14" in refused(command(workdir, manifest, "6:7", "14:15"), capsys), "step 12 has read batch 14"


def test_flags_come_to_those_of_the_config(manifest, tmp_path, capsys):
    arguments = train_arguments(tmp_path, manifest.folder, "data.skip_batches=5:9")
    assert "must not overlap" in refused([*arguments, "--skip-batches", "9:9"], capsys)
    assert "A at most B" in refused([*arguments, "--skip-batches", "12:10"], capsys)
