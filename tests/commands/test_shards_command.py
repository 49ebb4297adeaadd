"""The commands `tokenizer` and `shards`: what is there is kept, and what another program made is used as it is."""

import pathlib
import shutil

import pytest

from mlm.commands.common import open_data
from mlm.commands.shards import make_shards
from mlm.commands.tokenizer import make_tokenizer
from mlm.errors import InputError
from mlm.workdir import Workdir
from tests.support.corpora import InProcess, contents
from tests.support.tiny import tiny_config


@pytest.fixture
def foreign(manifest, tmp_path) -> pathlib.Path:
    """Shards as transformers' TF-TPU example leaves them: no manifest."""
    folder = pathlib.Path(shutil.copytree(manifest.folder, tmp_path / "shards"))
    (folder / "manifest.json").unlink()
    return folder


def test_run_takes_shards_of_the_tf_tpu_example(
    foreign, manifest, tokenizer_folder, tmp_path, capfd
):
    before = contents(foreign)
    overrides = (f"shards.dir={foreign}", f"tokenizer.path={tokenizer_folder}", "data.lanes=2")
    config = tiny_config(*overrides)
    workdir = Workdir(str(tmp_path / "run"))
    make_tokenizer(config, workdir, InProcess())
    make_shards(config, workdir, InProcess())
    found = open_data(config, workdir)
    assert contents(foreign) == before and "used as they are" in capfd.readouterr().err
    assert found.splits["train"].records == manifest.splits["train"].records


def test_no_tokenizer_is_trained_for_shards_that_have_one(foreign, tmp_path):
    config = tiny_config(f"shards.dir={foreign}")
    with pytest.raises(InputError, match=r"tokenizer\.path"):
        make_tokenizer(config, Workdir(str(tmp_path / "run")), InProcess())
    assert not (tmp_path / "run" / "tokenizer").exists()


@pytest.mark.standard
def test_a_second_start_writes_nothing(texts, tmp_path, capfd):
    corpus = tmp_path / "texts.txt"
    corpus.write_text("\n".join(" ".join(text.split()) for text in texts))
    sizes = (
        "tokenizer.vocab_size=600",
        "shards.workers=1",
        "data.lanes=2",
        "corpus.validation_fraction=0.1",
    )
    config = tiny_config(f"corpus.sources='text:{corpus}'", *sizes)
    workdir = Workdir(str(tmp_path / "run"))
    written = []
    for words in ("tokens/s", "not read again"):
        make_tokenizer(config, workdir, InProcess())
        make_shards(config, workdir, InProcess())
        assert words in capfd.readouterr().err
        paths = (path for path in (tmp_path / "run").rglob("*") if path.is_file())
        written.append({path: path.stat().st_mtime_ns for path in paths})
    first, second = written
    assert first == second
