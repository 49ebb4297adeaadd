"""A test split, from the corpus to report and model card: written and scored, and nothing chooses by it."""

import contextlib
import io
import json
import pathlib

import jax
import numpy as np
import pytest

from mlm import __main__, logs
from mlm.data.manifest import load_manifest
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.workdir import Workdir
from tests.support.corpora import contents, shard_texts, write_jsonl
from tests.support.tiny import TINY

SETTINGS = (
    "data.lanes=2",
    "shards.count=4",
    "shards.validation_count=1",
    "evaluate.every=4",
    "checkpoint.every=4",
)


@pytest.fixture(scope="module", autouse=True)
def hub_cache(tmp_path_factory):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def write_set(folder: pathlib.Path, texts: list[str], test: list[str]) -> str:
    """A data set of which test and validation have texts of training, and test some of validation."""
    folder.mkdir()
    splits = {
        "train": texts[:300],
        "validation": texts[290:340],
        "test": [*texts[:5], *texts[330:335], *test],
    }
    for split, own in splits.items():
        write_jsonl(folder / f"{split}.jsonl", own)
    return f"hf:{folder}"


def command(
    name: str, workdir: pathlib.Path | str, source: str, tokenizer_folder: str, *overrides: str
) -> list[str]:
    own = (
        f"corpus.sources=('{source}',)",
        f"tokenizer.path={tokenizer_folder}",
        *SETTINGS,
        *overrides,
    )
    return [
        name,
        "--config=configs/base.py",
        f"--workdir={workdir}",
        *(f"--config.{text}" for text in (*TINY, *own)),
    ]


@pytest.fixture(scope="module")
def run(one_device, texts, tokenizer_folder, tmp_path_factory) -> pathlib.Path:
    """The command `run` on a data set with a test split."""
    folder = tmp_path_factory.mktemp("run")
    source = write_set(folder / "set", texts, texts[340:380])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert __main__.main(command("run", folder / "run", source, tokenizer_folder)) == 0
    assert f"evaluate --workdir={folder / 'run'} --split=test" in out.getvalue()
    return folder / "run"


@pytest.mark.standard
def test_its_texts_are_in_no_other_split(run, texts, tokenizer_folder):
    manifest = load_manifest(str(run / "shards"))
    counts = {name: split.documents for name, split in manifest.splits.items()}
    assert counts == {"train": 300 - 5 - 10, "validation": 50 - 5, "test": 50}, (
        "test keeps all of its own"
    )
    held = {
        split: {
            text
            for shard in shard_texts(manifest, split, texts[:380], tokenizer_folder)
            for text in shard
        }
        for split in manifest.splits
    }
    assert (
        held["test"] <= {*texts[:5], *texts[330:335], *texts[340:380]} and len(held["test"]) >= 49
    )
    assert not held["test"] & (held["train"] | held["validation"])
    records = manifest.splits["test"].records
    assert [path.name for path in (run / "shards" / "test").iterdir()] == [
        f"dataset-0-{records}.tfrecord"
    ]


@pytest.mark.standard
def test_nothing_chooses_by_it(run, texts, tokenizer_folder, tmp_path):
    """Another one leaves the same training and validation rows, logs, parameters and best step, to the bit."""
    source = write_set(tmp_path / "set", texts, texts[400:480])
    for name in ("shards", "train"):
        assert __main__.main(command(name, tmp_path / "run", source, tokenizer_folder)) == 0
    one, other = (Workdir(str(folder), create=False) for folder in (run, tmp_path / "run"))
    manifests = [load_manifest(str(workdir.shards)) for workdir in (one, other)]
    assert manifests[0].splits["test"] != manifests[1].splits["test"]
    assert manifests[0].fingerprint == manifests[1].fingerprint
    assert manifests[0].fingerprint_of("test") != manifests[1].fingerprint_of("test")
    for split in ("train", "validation"):
        assert contents(one.shards / split) == contents(other.shards / split)
    assert one.metrics.read_text() == other.metrics.read_text()
    models = [load.load(workdir, head=None) for workdir in (one, other)]
    assert jax.tree.all(jax.tree.map(np.array_equal, models[0].params, models[1].params))
    kept = [sorted(path.name for path in workdir.checkpoints.iterdir()) for workdir in (one, other)]
    assert kept[0] == kept[1]


@pytest.mark.standard
def test_it_is_scored_and_shown(run, capsys):
    assert (
        "Test" not in (run / "report.html").read_text() + (run / "export" / "README.md").read_text()
    )
    assert __main__.main(["evaluate", f"--workdir={run}", "--split=test"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert __main__.main(["evaluate", f"--workdir={run}"]) == 0
    validation = json.loads(capsys.readouterr().out.splitlines()[0])
    logged = logs.read(UPath(run / "metrics.jsonl"), "eval")[-1]["loss"]
    assert first["split"] == "test" and validation["loss"] == logged != first["loss"]
    for name in ("report", "export"):
        assert __main__.main([name, f"--workdir={run}"]) == 0
    page = (run / "report.html").read_text()
    card = (run / "export" / "README.md").read_text()
    assert "test, " in page
    assert f"{first['loss']:.4f}" in page and f"{validation['loss']:.4f}" in page
    before, _, after = card.partition("## Test scores")
    of_test = after.partition("\n## ")[0]
    assert f"{first['loss']:.4f}" in of_test and f"{validation['loss']:.4f}" not in of_test
    assert f"{validation['loss']:.4f}" in before and f"{first['loss']:.4f}" not in before
