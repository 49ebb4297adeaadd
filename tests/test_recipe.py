"""Length and cost of a run: the same for a config and for the config that a checkpoint holds; its milestones.

Milestones: which steps they are, and that their checkpoints outlive the newest and the best.
"""

import json
import math
import re
import shutil

import pytest

from mlm import config as configs
from mlm.errors import InputError
from mlm.model import flops
from mlm.pretrained import checkpoint_files, locate
from mlm.report import report
from mlm.tasks.pretraining import Pretraining
from mlm.training import loop, recipe
from mlm.workdir import Workdir
from tests.fixtures import pretrain, slow, tiny_config
from tests.fixtures_data import train_tokenizer, write_shards

pytestmark = pytest.mark.usefixtures("one_device")
SETTINGS = ("data.lanes=4", "checkpoint.every=1", "evaluate.every=0", "checkpoint.keep=1")


def flat(*overrides: str):
    return configs.flatten(tiny_config(*overrides))


def test_steps_and_warmup():
    assert recipe.total_steps(flat("train.steps=7"), records=10_000) == 7
    epochs = flat("train.steps=0", "train.epochs=1.5", "data.global_batch=16")
    assert recipe.total_steps(epochs, records=100) == 10, "150 rows in batches of 16, the last one is whole too"
    assert recipe.warmup_steps(flat("schedule.warmup_steps=5", "schedule.warmup_fraction=0"), 1000) == 5
    assert recipe.warmup_steps(flat("schedule.warmup_steps=0", "schedule.warmup_fraction=0.06"), 1000) == 60
    assert recipe.short_steps(flat(), 10) == 0
    assert recipe.short_steps(flat("data.short_length=8", "data.short_share=0.7"), 10) == 7


def test_a_schedule_longer_than_a_run_of_epochs_is_refused(manifest, tmp_path):
    wsd = ("schedule.name=wsd", "schedule.decay_fraction=0.5")
    few = ("train.steps=0", "train.epochs=3", "schedule.warmup_steps=100")
    recipe.check_schedule(flat(*few), 100)
    recipe.check_schedule(flat(*few, *wsd), 200)
    words = r"warmup_steps = 100: the run has 99 steps \(train.epochs = 3\); set it lower, or use warmup_fraction\.$"
    with pytest.raises(InputError, match=words):
        recipe.check_schedule(flat(*few), 99)
    with pytest.raises(InputError, match=r"decay_fraction = 0.5: the run has 150 steps, and a warmup of 100; lower"):
        recipe.check_schedule(flat(*few, *wsd), 150)
    short = tiny_config("train.steps=0", "train.epochs=0.01", "schedule.warmup_steps=100000")
    with pytest.raises(InputError, match=r"warmup_steps = 100000: the run has \d+ steps"):
        Pretraining.open(short, Workdir(str(tmp_path)), manifest)


STAGES = ("data.lanes=4", "data.batch_stages=((4, 3), (8, 3))")  # of batches of 16 rows


def test_steps_and_rows_of_stages():
    run = flat(*STAGES, "train.steps=12")
    assert [recipe.rows_read(run, step) for step in (0, 1, 3, 4, 6, 7, 12, 14)] == [0, 4, 12, 20, 36, 52, 132, 164]
    before = {key: value for key, value in flat().items() if key not in ("data.batch_stages", "data.skip_batches")}
    assert recipe.rows_read(before, 7) == 7 * 16, "as older runs are saved"
    epochs = flat(*STAGES, "train.steps=0", "train.epochs=1.5")
    steps = [recipe.total_steps(epochs, records) for records in (160, 163, 24, 25, 8, 1)]
    assert steps == [6 + 13, 6 + 14, 6, 7, 3, 1], "240 - 36 rows in batches of 16; few rows end within the stages"


def test_neighbouring_stages_of_equal_rows_are_one():
    def stages(value: str) -> list:
        return recipe.stages(flat("data.lanes=4", f"data.batch_stages={value}"))

    assert stages("((8, 2), (8, 2))") == stages("((8, 4),)")
    assert stages("((8, 2), (16, 9))") == stages("((8, 2),)") and stages("((16, 2),)") == stages("()")


def test_rows_and_flops_of_a_branch_are_its_own():
    run = flat("train.branch_from=runs/a@4", "masking.rate=0.4", "masking.end_rate=0.2")
    assert [recipe.own_rows_read(run, step) for step in (0, 4, 5, 7)] == [0, 0, 16, 48]
    assert recipe.branch_start(flat()) == recipe.branch_start({}) == 0
    token = recipe.flops_per_token(run, 500, length=32, rate=0.4 - 0.2 * 0.5)
    assert recipe.useful_flops(run, 500, step=7, steps=11) == pytest.approx(3 * 16 * 32 * token), "steps 4, 5, 6 of 10"


def test_words_are_counted_over_stages():
    """At 25 words in a row, 3,300 words are the 132 rows of 12 steps, 900 the 36 rows of 6."""
    run = flat(*STAGES, "checkpoint.milestones=('words:900', 'words:901', 'words:3300', 'words:100')")
    assert recipe.milestone_steps(run, 12, lambda: 25.0) == [1, 6, 7, 12]
    with pytest.raises(InputError, match="words:3301 is reached at step 13"):
        recipe.milestone_steps(run | {"checkpoint.milestones": ("words:3301",)}, 12, lambda: 25.0)


def test_flops_know_the_falling_rate_and_the_short_rows():
    """The steps of short rows and those of long ones, each with its own attention, at the mean rate of the run."""
    run = flat("masking.rate=0.4", "masking.end_rate=0.2", "data.short_length=8", "data.short_share=0.5")
    sizes = {"hidden": 32, "intermediate": 64, "gated": False, "vocab_size": 500}

    def by_hand(steps: int, length: int, rate: float) -> float:
        return steps * 16 * 32 * flops.train_flops_per_token(**sizes, keys=[length], predicted_share=rate)

    whole = recipe.useful_flops(run, 500, step=11, steps=11)
    assert whole == pytest.approx(by_hand(6, 8, 0.3) + by_hand(5, 32, 0.3))
    half = recipe.useful_flops(run, 500, step=6, steps=11)
    assert half == pytest.approx(by_hand(6, 8, 0.35)), "stopped halfway, the rate has fallen by half"


@pytest.mark.parametrize(
    ("milestones", "steps"),
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
def test_the_steps_of_milestones(milestones, steps):
    """At 25 words in a row, 400 in a step."""
    run = {"checkpoint.milestones": milestones, "data.global_batch": 16}
    assert recipe.milestone_steps(run, 12, lambda: 25.0) == steps


@pytest.mark.parametrize("late", ["13", "every:13", "words:5k", "words:1k..5k", "words:1B"])
def test_a_milestone_after_the_last_step_is_refused(late):
    step = {"5": 13, "B": 2_500_000}.get(late[-2] if late[-1] == "k" else late[-1], 13)
    with pytest.raises(InputError) as error:
        recipe.milestone_steps({"checkpoint.milestones": (late,), "data.global_batch": 16}, 12, lambda: 25.0)
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

    def train(steps: int, *milestones: str) -> None:
        config = tiny_config(*SETTINGS, "schedule.name=constant", f"checkpoint.milestones={milestones!r}")
        task = Pretraining.open(config, workdir, manifest)
        task.steps = steps  # as if it was stopped there
        loop.run_task(config, workdir, task)

    def steps() -> list[int]:
        return checkpoint_files.complete_steps(workdir.checkpoints)

    train(6, "3", "every:2")
    best = checkpoint_files.choose(workdir.checkpoints, on_damage="stop", best=True)
    assert set(steps()) == {2, 3, 4, 6} and best in steps()
    train(8)
    assert {2, 3, 4, 6, 8} <= set(steps()) and not {1, 5, 7} & set(steps()), "without any"
    train(12, "9")
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
