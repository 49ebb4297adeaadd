"""The step and the loop with real models: meshes, processes that are killed, and what compilers may do to numbers."""

import pathlib

import pytest

from mlm import logs
from mlm.pretrained import checkpoint_files
from mlm.tasks.pretraining import Pretraining
from mlm.workdir import Workdir
from tests.support.corpora import train_tokenizer, write_shards
from tests.support.processes import DELAYED, kill_when, start, train_arguments
from tests.support.states import assert_same, state_of
from tests.support.tiny import meshes_of, pretrain, tiny_config

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


def train(folder: pathlib.Path, manifest) -> pathlib.Path:
    """In this process, on one device as the one that is killed."""
    with meshes_of(1):
        pretrain(tiny_config("data.lanes=4", *SETTINGS), Workdir(str(folder)), manifest)
    return folder


@pytest.mark.standard
def test_killed_and_started_again_it_ends_with_the_same_bits(manifest, tmp_path):
    """Within the steps after a checkpoint, by SIGKILL; the log has a line for each of its steps, and none twice."""
    straight = train(tmp_path / "straight", manifest)
    killed = tmp_path / "killed"
    process = start(train_arguments(killed, manifest.folder, *SETTINGS), devices=1, program=DELAYED)
    kill_when(process, lambda: checkpoint_files.complete_steps(killed / "checkpoints") == [7])
    train(killed, manifest)
    assert (straight / "metrics.jsonl").read_text() == (killed / "metrics.jsonl").read_text()
    assert_same(state_of(straight, 24), state_of(killed, 24))
    lines = logs.read(killed / "metrics.jsonl", "train")
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20, 24]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1


@pytest.mark.standard
def test_words_are_counted_as_a_person_counts_them(texts, tmp_path):
    """Within a tenth of the words of the documents, cut at white space, whatever the tokenizer does; not indented."""
    flat = [text for text in texts if "\n " not in text][:400]
    workdir = Workdir(str(tmp_path))
    folder = train_tokenizer(texts, tmp_path / "tokenizer", "unigram", vocab_size=2000)
    manifest = write_shards(flat, tmp_path / "shards", folder)
    with meshes_of(1):
        task = Pretraining.open(tiny_config(), workdir, manifest)
        words = sum(len(text.split()) for number, text in enumerate(flat) if number % 10)
        assert task.words_per_row() == pytest.approx(
            words / manifest.splits["train"].records, rel=0.1
        )
