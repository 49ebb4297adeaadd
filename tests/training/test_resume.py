"""Where a run starts: from its newest checkpoint, on other devices too, unless something changed that affects numbers.

What a resumed run computes, to the bit: test_train, and tests/test_testing.py with a real model.
"""

import contextlib
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from mlm.cluster.distributed import StopSignal
from mlm.data.stages import make_stages
from mlm.errors import DamageError, InputError, PreemptedError
from mlm.pretrained import checkpoint_files
from mlm.tasks.pretraining import Pretraining
from mlm.training import resume
from mlm.workdir import Workdir
from tests.support.corpora import train_tokenizer, write_shards
from tests.support.refusals import snapshot
from tests.support.states import assert_same, back_to, state_of
from tests.support.tiny import tiny_config
from tests.training.toy import Toy, losses, run, toy

SETTINGS = ("checkpoint.every=4", "checkpoint.keep=9", "log.every=1", "model.hidden_dropout=0.1")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight"), *SETTINGS)


class OtherClass(Toy):
    """Another class of the same numbers."""


def changed(key: str) -> Toy:
    task = toy(*SETTINGS, *([key] if "=" in key else []))
    if key == "class":
        return OtherClass(task.config)
    if key == "data":
        task = Toy(task.config)
        task.data_fingerprint = "other"
    return task


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("optimizer.learning_rate=0.1", r"optimizer.learning_rate: 0.003 -> 0.1"),
        ("train.steps=17", r"--config.train.branch_from=\S+@12:\s+train.steps: 12 -> 17"),
        (
            "data.skip_batches=3:4",
            r"data.skip_batches: .*checkpoints/12 was made with none;",
        ),
        ("class", r"toy.Toy.*OtherClass|OtherClass.*toy.Toy"),
        ("data", "other shards or rows"),
    ],
)
def test_what_affects_numbers_can_not_change(straight, key, words):
    """The old checkpoint is named, and everything stays as it was."""
    before = snapshot(straight.root)
    with pytest.raises(InputError, match=re.escape(str(straight.checkpoints))) as caught:
        run(straight.root, task=changed(key))
    assert re.search(words, str(caught.value))
    assert snapshot(straight.root) == before


@pytest.mark.parametrize("way", ["resume", "branch"])
def test_a_run_of_an_older_version_is_refused_as_such(straight, tmp_path, way):
    """And not by what a person could set back."""
    folder = back_to(straight.root, tmp_path / "old", 12)
    file = folder / "checkpoints" / "12" / "meta" / "metadata"
    meta = json.loads(file.read_text())
    meta["config"]["schedule"]["warmup_steps"] = 0
    file.write_text(json.dumps(meta))
    checkpoint_files.write_hashes(folder / "checkpoints", 12)
    with pytest.raises(InputError, match=r"12: has schedule\.warmup_steps = 0 \(now .*version"):
        if way == "resume":
            run(folder, *SETTINGS)
        else:
            run(tmp_path / "new", *SETTINGS, f"train.branch_from={folder}@12")


@pytest.mark.parametrize("change", ["train.accumulate=2", "mesh", "log.every=3"])
def test_what_changes_rounding_alone_may_change(straight, tmp_path, change):
    """On other devices, with other microbatches: the same batches, and losses to rounding, each since the last line."""
    folder = back_to(straight.root, tmp_path / "run", 4)
    if change == "mesh":
        again = run(folder, task=toy(*SETTINGS, mesh=(2, 2, 2)))
    else:
        again = run(folder, *SETTINGS, change)
    expected = losses(straight)
    if change == "log.every=3":
        weights = 1 - np.arange(12) / 24  # of a step's tokens
        means = (
            np.average(expected[i:j], weights=weights[i:j]) for i, j in ((4, 6), (6, 9), (9, 12))
        )
        expected = [*expected[:4], *means]
    assert losses(again) == pytest.approx(expected, rel=1e-5)


def test_batches_that_are_skipped_from_now_on(straight, tmp_path):
    """The same as when they are skipped from the beginning; what was read before is not skipped."""
    ranges = "data.skip_batches=6:7"
    late = run(back_to(straight.root, tmp_path / "late", 4), *SETTINGS, ranges)
    early = run(tmp_path / "early", *SETTINGS, ranges)
    assert losses(late) == losses(early) and losses(late)[:5] == losses(straight)[:5]
    assert losses(late)[5] != losses(straight)[5]
    with pytest.raises(InputError, match="--skip-batches 6:7"):
        run(late.root, *SETTINGS)


def test_a_damaged_checkpoint_is_named_and_left_out_if_asked(straight, tmp_path):
    folder = back_to(straight.root, tmp_path / "run", 8)
    file = next((folder / "checkpoints" / "8").rglob("state/d/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DamageError, match=r"checkpoints/8: .*on_damage=fallback"):
        run(folder, *SETTINGS)
    again = run(folder, *SETTINGS, "checkpoint.on_damage=fallback")
    assert_same(state_of(again.root, 12), state_of(straight.root, 12))
    assert again.metrics.read_text() == straight.metrics.read_text()
    assert (folder / "checkpoints" / "damaged.8").is_dir()


# Milestones -----------------------------------------------------------------------------------------------------------


def milestones(texts: tuple, *overrides: str, same_rows: bool = True) -> list[int]:
    """Those of a run of 12 steps, of 16 rows unless there are stages, at 25 words in a row: 400 in a step."""
    epoch = ("train.steps=0", "train.epochs=1")
    config = tiny_config(f"checkpoint.milestones={texts!r}", *(overrides or epoch))
    task = SimpleNamespace(stages=make_stages(config, 12 * 16), words_per_row=lambda: 25.0)
    return sorted(resume.find_milestones(config, task, same_rows=same_rows))


@pytest.mark.parametrize(
    ("texts", "steps"),
    [
        (("7", 3, "12"), [3, 7, 12]),
        (("every:4", "10"), [4, 8, 10, 12]),
        (("words:1200", "words:1201"), [3, 4]),
        (("words:1k..4k", "words:1k"), [3, 5, 8, 10]),
    ],
)
def test_the_steps_of_milestones(texts, steps):
    assert milestones(texts) == steps


def test_words_are_counted_over_stages(capsys):
    """3,300 words are the 132 rows of 12 steps, 900 the 36 rows of 6."""
    stages = ("data.lanes=4", "data.batch_stages=((4, 3), (8, 3))")
    assert milestones(("words:900", "words:901", "words:3300"), *stages) == [6, 7, 12]
    assert "900 at step 6" in capsys.readouterr().err
    with pytest.raises(InputError, match="words can't be counted"):
        milestones(("words:900",), same_rows=False)
    assert milestones(("3",), same_rows=False) == [3]


@pytest.mark.standard
def test_words_are_counted_as_a_person_counts_them(texts, tmp_path):
    """Within a tenth of the words of the documents, cut at white space, whatever the tokenizer does; not indented."""
    flat = [text for text in texts if "\n " not in text][:400]
    folder = train_tokenizer(texts, tmp_path / "tokenizer", "unigram", vocab_size=2000)
    manifest = write_shards(flat, tmp_path / "shards", folder)
    task = Pretraining.open(tiny_config(), Workdir(str(tmp_path)), manifest)
    words = sum(len(text.split()) for number, text in enumerate(flat) if number % 10)
    rows = manifest.splits["train"].records
    assert task.words_per_row() == pytest.approx(words / rows, rel=0.1)


@pytest.mark.parametrize(
    ("late", "step"), [("13", 13), ("every:13", 13), ("words:1k..5k", 13), ("words:1M", 2500)]
)
def test_a_milestone_after_the_last_step_is_refused(late, step):
    with pytest.raises(
        InputError, match=rf"milestones: {late} is reached at step {step:,}, .* step 12;"
    ):
        milestones((late,))


def test_milestones_are_kept_whatever_later_lists_say(tmp_path):
    """Beside the newest and the best; a run that goes on with another list keeps those of the first, too."""
    settings = ("checkpoint.every=1", "checkpoint.keep=1", "evaluate.every=0")
    workdir = Workdir(str(tmp_path))

    def train_to(step: int, texts: tuple) -> set[int]:
        task = toy(*settings, f"checkpoint.milestones={texts!r}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StopSignal, "requested", lambda signal, now: now == step)
            with pytest.raises(PreemptedError) if step < 12 else contextlib.nullcontext():
                run(tmp_path, task=task)
        return set(checkpoint_files.complete_steps(workdir.checkpoints))

    assert train_to(6, ("2", "4")) >= {2, 4, 6}
    assert train_to(8, ()) >= {2, 4, 8}
    left = train_to(12, ("9",))
    assert left >= {2, 4, 9, 12} and not left & {1, 3, 5, 7, 10, 11}
    assert checkpoint_files.read_meta(workdir.checkpoints, 12)["milestones"] == [2, 4, 9]
