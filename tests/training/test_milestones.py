"""Milestones: which steps they are, and that their checkpoints outlive the newest and the best."""

import dataclasses
import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest

from mlm.data.stages import make_stages
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files, locate
from mlm.report import report
from mlm.tasks.pretraining import Pretraining
from mlm.training import resume, train
from mlm.workdir import Workdir
from tests.support.corpora import train_tokenizer, write_shards
from tests.support.tiny import pretrain, slow, tiny_config

pytestmark = pytest.mark.usefixtures("one_device")
SETTINGS = ("data.lanes=4", "checkpoint.every=1", "evaluate.every=0", "checkpoint.keep=1")


def steps_of(texts: tuple, *overrides: str) -> list[int]:
    """The milestones of a run of 12 steps, of 16 rows unless there are stages, at 25 words in a row: 400 in a step."""
    config = tiny_config(f"checkpoint.milestones={texts!r}", "train.steps=0", "train.epochs=1", *overrides)
    records = make_stages(tiny_config(*overrides), records=0).rows_read(12)
    task = SimpleNamespace(stages=make_stages(config, records), words_per_row=lambda: 25.0)
    return sorted(resume.find_milestones(config, task, same_rows=True))


@pytest.mark.parametrize(
    ("texts", "steps"),
    [
        ((), []),
        (("7", 3), [3, 7]),
        (("every:4", "10"), [4, 8, 10, 12]),
        (("words:1k",), [3]),
        (("words:1200",), [3]),
        (("words:1201",), [4]),
        (("words:1k..4k", "words:1k"), [3, 5, 8, 10]),
        (("words:400..1k",), [1, 2]),
    ],
)
def test_the_steps_of_milestones(texts, steps):
    assert steps_of(texts) == steps


def test_words_are_counted_over_stages():
    """3,300 words are the 132 rows of 12 steps, 900 the 36 rows of 6."""
    stages = ("data.lanes=4", "data.batch_stages=((4, 3), (8, 3))")
    assert steps_of(("words:900", "words:901", "words:3300", "words:100"), *stages) == [1, 6, 7, 12]
    with pytest.raises(InputError, match="words:3301 is reached at step 13"):
        steps_of(("words:3301",), *stages)


@pytest.mark.parametrize("late", ["13", "every:13", "words:5k", "words:1k..5k", "words:1B"])
def test_a_milestone_after_the_last_step_is_refused(late):
    step = {"5": 13, "B": 2_500_000}.get(late[-2] if late[-1] == "k" else late[-1], 13)
    with pytest.raises(InputError) as error:
        steps_of((late,))
    sentence = f"config.checkpoint.milestones: {late} is reached at step {step:,}, but the run ends after step 12;"
    assert str(error.value) == f"{sentence} remove it, or train longer."


@pytest.mark.parametrize("kind", [slow("unigram"), slow("bpe"), "wordpiece"])
def test_words_are_counted_as_a_person_counts_them(texts, kind, tmp_path):
    """Within a tenth of the words of the documents, cut at white space, whatever the tokenizer does."""
    workdir = Workdir(str(tmp_path))
    folder = train_tokenizer(texts, tmp_path / "tokenizer", kind, vocab_size=2000)
    manifest = write_shards(texts[:400], tmp_path / "shards", folder)
    task = Pretraining.open(tiny_config(*SETTINGS), workdir, manifest)
    rows = manifest.splits["train"].records
    words = sum(len(text.split()) for number, text in enumerate(texts[:400]) if number % 10)
    assert rows < 10_000
    assert task.words_per_row() == pytest.approx(words / rows, rel=0.1)


@pytest.mark.slow
def test_milestones_are_kept_whatever_later_lists_say(manifest, tokenizer_folder, tmp_path, capsys):
    """Beside the newest and the best; a run that goes on with another list keeps those of the first, too."""
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(tokenizer_folder, str(workdir.tokenizer))

    def train_to(steps: int, *texts: str) -> None:
        config = tiny_config(*SETTINGS, "schedule.name=constant", f"checkpoint.milestones={texts!r}")
        task = Pretraining.open(config, workdir, manifest)
        task.stages = dataclasses.replace(task.stages, steps=steps)  # as if it was stopped there
        train.train(config, workdir, task)

    def steps() -> list[int]:
        return checkpoint_files.complete_steps(workdir.checkpoints)

    train_to(6, "3", "every:2")
    best = checkpoint_files.choose(workdir.checkpoints, on_damage="stop", best=True)
    assert set(steps()) == {2, 3, 4, 6} and best in steps()
    train_to(8)
    assert {2, 3, 4, 6, 8} <= set(steps()) and not {1, 5, 7} & set(steps()), "without any"
    train_to(12, "9")
    assert {2, 3, 4, 6, 9, 12} <= set(steps()) and not {1, 5, 7, 10, 11} & set(steps()), "with another list"
    assert locate.milestones(workdir) == [2, 3, 4, 6, 9]
    assert all(checkpoint_files.find_damage(workdir.checkpoints, step) is None for step in steps())
    report.write(workdir)
    table = re.search(r"<h2>Milestones and branches</h2>.*?</table>", workdir.report.read_text(), re.DOTALL)[0]
    assert re.findall(r"step (\d+)</td><td>([\d,]+)</td>", table) == [
        (str(step), f"{step * 16 * 32:,}") for step in (2, 3, 4, 6, 9, 12)
    ]
    evaluated = [json.loads(line) for line in workdir.metrics.read_text().splitlines()]
    assert {line["step"] for line in evaluated if line["kind"] == "eval"} >= {2, 3, 4, 6, 9, 12}


@pytest.mark.slow
def test_milestones_of_words_are_saved_at_their_step(manifest, tokenizer_folder, tmp_path, capsys):
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(tokenizer_folder, str(workdir.tokenizer))
    settings = ("data.lanes=4", "checkpoint.every=0", "checkpoint.keep=1", "evaluate.every=0")
    rate = Pretraining.open(tiny_config(*settings), workdir, manifest).words_per_row()
    pretrain(tiny_config(*settings, "checkpoint.milestones=words:1k"), workdir, manifest)
    first = math.ceil(1000 / rate / 16)
    assert checkpoint_files.complete_steps(workdir.checkpoints) == [first, 12]
    assert f"milestones, at {rate:,.1f} words per row: 1,000 at step {first}" in capsys.readouterr().err


def test_nothing_is_written_before_a_milestone_is_refused(manifest, tokenizer_folder, tmp_path):
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(tokenizer_folder, str(workdir.tokenizer))
    with pytest.raises(InputError, match="words:1B is reached at step"):
        pretrain(tiny_config(*SETTINGS, "checkpoint.milestones=words:1B"), workdir, manifest)
    (workdir.tokenizer / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer.json: there is no such file"):
        pretrain(tiny_config(*SETTINGS, "checkpoint.milestones=words:1k"), workdir, manifest)
    assert not workdir.config.exists() and not workdir.checkpoints.exists()
