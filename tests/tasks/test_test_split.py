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
from mlm.export import export
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.workdir import Workdir
from tests.support.corpora import contents, ids_of, shard_rows, write_jsonl
from tests.support.tiny import TINY, command

SETTINGS = (
    "data.lanes=2",
    "shards.count=4",
    "shards.workers=1",
    "shards.validation_count=1",
    "evaluate.every=4",
    "checkpoint.every=4",
)


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory):
    """A cache of the Hub of its own; exports are not read back, which their room's tests hold."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(export, "check_files", lambda *_: [])
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


def start(name: str, workdir: pathlib.Path, source: str, tokenizer_folder: str) -> None:
    data = (f"corpus.sources=('{source}',)", f"tokenizer.path={tokenizer_folder}")
    assert __main__.main(command(name, workdir, *TINY, *SETTINGS, *data)) == 0


@pytest.fixture(scope="module")
def run(one_device, texts, tokenizer_folder, tmp_path_factory) -> pathlib.Path:
    """The command `run` on a data set with a test split."""
    folder = tmp_path_factory.mktemp("run")
    source = write_set(folder / "set", texts, texts[340:380])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        start("run", folder / "run", source, tokenizer_folder)
    printed = out.getvalue()
    assert f"evaluate --workdir={folder / 'run'} --split=test" in printed
    assert "masked tokens: the standard error" in printed and "perplexity" in printed
    return folder / "run"


@pytest.mark.standard
def test_its_texts_are_in_no_other_split(run, texts, tokenizer_folder):
    manifest = load_manifest(str(run / "shards"))
    counts = {name: split.documents for name, split in manifest.splits.items()}
    assert counts == {"train": 300 - 5 - 10, "validation": 50 - 5, "test": 50}, (
        "test keeps all of its own"
    )
    ids = dict(zip(texts[:380], ids_of(texts[:380], tokenizer_folder), strict=True))

    def held(split: str) -> set[str]:
        rows = np.concatenate([*map(np.ravel, shard_rows(manifest, split))]).tolist()
        return {text for text in ids if str(ids[text])[1:-1] in str(rows)}

    train, validation, test = map(held, ("train", "validation", "test"))
    assert test <= {*texts[:5], *texts[330:335], *texts[340:380]} and len(test) >= 49
    assert not test & (train | validation)
    (file,) = (run / "shards" / "test").iterdir()
    assert file.name == f"dataset-0-{manifest.splits['test'].records}.tfrecord"


@pytest.mark.standard
def test_nothing_chooses_by_it(run, texts, tokenizer_folder, tmp_path):
    """Another one leaves the same training and validation rows, logs, parameters and best step, to the bit."""
    source = write_set(tmp_path / "set", texts, texts[400:480])
    for name in ("shards", "train"):
        start(name, tmp_path / "run", source, tokenizer_folder)
    one, other = (Workdir(str(folder), create=False) for folder in (run, tmp_path / "run"))
    manifest, changed = (load_manifest(str(workdir.shards)) for workdir in (one, other))
    assert manifest.splits["test"] != changed.splits["test"]
    assert manifest.fingerprint == changed.fingerprint
    assert manifest.fingerprint_of("test") != changed.fingerprint_of("test")
    for split in ("train", "validation"):
        assert contents(one.shards / split) == contents(other.shards / split)
    assert one.metrics.read_text() == other.metrics.read_text()
    params, others = (load.load(workdir, head=None).params for workdir in (one, other))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, others))
    steps, other_steps = ({path.name for path in w.checkpoints.iterdir()} for w in (one, other))
    assert steps == other_steps


@pytest.mark.standard
def test_it_is_scored_and_shown(run, capsys):
    page = run / "report.html"
    card = run / "export" / "README.md"
    assert "Test" not in page.read_text() + card.read_text()
    for line in (["evaluate", "--split=test"], ["evaluate"], ["report"], ["export"]):
        assert __main__.main([*line, f"--workdir={run}"]) == 0
    first, second, *_ = (
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    )
    logged = logs.read(UPath(run / "metrics.jsonl"), "eval")[-1]["loss"]
    assert first["split"] == "test" and second["loss"] == logged != first["loss"]
    test, validation = (f"{scores['loss']:.4f}" for scores in (first, second))
    assert "test, " in page.read_text()
    assert test in page.read_text() and validation in page.read_text()
    before, _, after = card.read_text().partition("## Test scores")
    of_test = after.partition("\n## ")[0]
    assert test in of_test and validation not in of_test
    assert validation in before and test not in before
