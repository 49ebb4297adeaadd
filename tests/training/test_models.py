"""The step and the loop with real models: meshes, processes that are killed, and what compilers may do to numbers."""

import pathlib

import jax
import numpy as np
import pytest

from mlm import logs
from mlm.pretrained import checkpoint_files
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.workdir import Workdir
from tests.support.corpora import train_tokenizer, write_shards
from tests.support.processes import DELAYED, kill_when, start, train_arguments
from tests.support.states import assert_same, state_of
from tests.support.tiny import INFO, meshes_of, pretrain, random_batch, slow, tiny_config

MODERNBERT = ("model.family=modernbert", "model.layers=3", "model.local_attention=8")
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")


def train(*overrides: str, mesh: tuple[int, int, int] = (1, 1, 1), count: int = 2):
    """Returns the state after `count` updates, and the metrics of each."""
    devices = jax.devices()[: int(np.prod(mesh))]
    shape = dict(zip(sharding.AXES, mesh, strict=True))
    run = Pretraining(
        tiny_config(*overrides), INFO, mesh=sharding.make_mesh(**shape, devices=devices)
    )
    state = run.init()
    history = []
    for index in range(count):
        state, metrics = run.train_step(
            state, sharding.put_batch(random_batch(16, index), run.mesh, 16)
        )
        history.append({key: float(value) for key, value in metrics.items() if value.ndim == 0})
    assert run.train_step._cache_size() == 1
    return state, history


# A run that is killed -------------------------------------------------------------------------------------------------

SETTINGS = (
    "train.steps=24",
    "checkpoint.every=7",
    "evaluate.every=10",
    "log.every=4",
    "model.hidden_dropout=0.1",
    "optimizer.ema_decay=0.9",
    "data.batch_stages=((8, 6),)",
)


@pytest.fixture(scope="module")
def straight(manifest, tmp_path_factory) -> pathlib.Path:
    """In this process; the others of these runs have one device, too."""
    workdir = tmp_path_factory.mktemp("straight")
    with meshes_of(1):
        pretrain(tiny_config("data.lanes=4", *SETTINGS), Workdir(str(workdir)), manifest)
    return workdir


def assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
    """Every line of the log and every bit of the last state."""
    assert (one / "metrics.jsonl").read_text() == (other / "metrics.jsonl").read_text()
    assert_same(state_of(one, 24), state_of(other, 24))


def go_on(workdir: pathlib.Path, manifest) -> None:
    with meshes_of(1):
        pretrain(tiny_config("data.lanes=4", *SETTINGS), Workdir(str(workdir)), manifest)


@pytest.mark.standard
def test_killed_and_started_again_it_ends_with_the_same_bits(straight, manifest, tmp_path):
    """Within the steps after a checkpoint, by SIGKILL; the log has a line for each of its steps, and none twice."""
    process = start(
        train_arguments(tmp_path, manifest.folder, *SETTINGS), devices=1, program=DELAYED
    )
    kill_when(process, lambda: checkpoint_files.complete_steps(tmp_path / "checkpoints") == [7])
    go_on(tmp_path, manifest)
    assert_same_run(straight, tmp_path)
    lines = logs.read(Workdir(str(tmp_path)).metrics, "train")
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20, 24]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1


@pytest.mark.standard
@pytest.mark.parametrize("kind", ["unigram", slow("bpe"), slow("wordpiece")])
def test_words_are_counted_as_a_person_counts_them(texts, kind, tmp_path):
    """Within a tenth of the words of the documents, cut at white space, whatever the tokenizer does; not indented."""
    flat = [text for text in texts if "\n " not in text][:400]
    workdir = Workdir(str(tmp_path))
    folder = train_tokenizer(texts, tmp_path / "tokenizer", kind, vocab_size=2000)
    manifest = write_shards(flat, tmp_path / "shards", folder)
    with meshes_of(1):
        task = Pretraining.open(tiny_config(), workdir, manifest)
        words = sum(len(text.split()) for number, text in enumerate(flat) if number % 10)
        assert task.words_per_row() == pytest.approx(
            words / manifest.splits["train"].records, rel=0.1
        )
        (tmp_path / "tokenizer" / "tokenizer.json").unlink()
        run_of_words = tiny_config("data.lanes=4", "checkpoint.milestones=words:1k")
        with pytest.raises(Exception, match=r"tokenizer.json: there is no such file"):
            pretrain(run_of_words, workdir, manifest)
    assert not workdir.config.exists() and not workdir.checkpoints.exists()
