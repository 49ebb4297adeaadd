"""Branches: a run that goes on from another one's full state, the same to the bit where nothing changes."""

import re
import shutil

import numpy as np
import pytest

from mlm import config as configs
from mlm import logs
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files
from mlm.training import branch, sharding
from mlm.workdir import Workdir
from tests.support.states import assert_same, back_to, edit_meta, lines_after, meta_of, state_of
from tests.support.tiny import tiny_config
from tests.training.toy import VOCABULARY, Toy, run, toy

SETTINGS = (
    "checkpoint.every=6",
    "checkpoint.keep=9",
    "evaluate.every=4",
    "log.every=4",
    "model.hidden_dropout=0.1",
    "optimizer.ema_decay=0.9",
    "schedule.name=wsd",
    "schedule.decay_fraction=0.25",
)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory) -> Workdir:
    """A run of 12 steps, with checkpoints of the steps 6 and 12."""
    return run(tmp_path_factory.mktemp("trunk"), *SETTINGS)


def start(trunk: Workdir, folder, *overrides: str, step: int = 6) -> Workdir:
    """Trains a branch of the trunk."""
    return run(folder, *SETTINGS, f"train.branch_from={trunk.root}@{step}", *overrides)


def source_of(task: Toy) -> branch.Source:
    return branch.open_source(meta_of(task), task.stages)


def test_a_branch_that_changes_nothing_is_the_run_it_left(trunk, tmp_path):
    made = start(trunk, tmp_path)
    assert_same(state_of(trunk.root, 12), state_of(made.root, 12))
    assert lines_after(made.root, 0) == lines_after(trunk.root, 6), (
        "the window of the log goes on within it"
    )
    assert [line["step"] for line in lines_after(made.root, 0)] == [8, 8, 12, 12]
    saved = checkpoint_files.read_meta(made.checkpoints, 12)
    lineage = {
        "from": str(trunk.root),
        "step": 6,
        "config_changes": [],
        "same_data": True,
        "same_rows": True,
    }
    assert saved["branch"] == lineage | {"useful_flops": 6000.0}
    assert saved["useful_flops"] == 12_000, "with the trunk's"
    assert checkpoint_files.complete_steps(trunk.checkpoints) == [6, 12]


def test_later_starts_resume_the_branch(trunk, tmp_path):
    overrides = ("train.steps=10", "checkpoint.every=2", "data.seed=7")
    straight = start(trunk, tmp_path / "a", *overrides)
    again = start(trunk, back_to(straight.root, tmp_path / "b", 8), *overrides)
    assert_same(state_of(straight.root, 10), state_of(again.root, 10))
    assert lines_after(straight.root, 0) == lines_after(again.root, 0)
    assert [line["step"] for line in logs.read(again.root / "timing.jsonl", "start")] == [6, 8]
    lineage = checkpoint_files.read_meta(again.checkpoints, 10)["branch"]
    assert lineage["config_changes"] == [
        "checkpoint.every: 6 -> 2",
        "data.seed: 0 -> 7",
        "train.steps: 12 -> 10",
    ]
    assert (lineage["from"], lineage["step"]) == (str(trunk.root), 6)


@pytest.mark.parametrize("positions", [80, 48])
def test_what_may_change_changes(trunk, tmp_path, positions):
    """Another table of positions, schedule, batch and rate: all but new rows comes from the trunk."""
    task = toy(*SETTINGS, f"train.branch_from={trunk.root}@6", f"model.positions={positions}", "train.steps=20",
               "schedule.name=constant", "data.global_batch=8", "optimizer.learning_rate=0.001")  # fmt: skip
    found = branch.restore(source_of(task), task.abstract_state, task.initial_state)
    assert sharding.shardings_of(found) == sharding.shardings_of(task.abstract_state)
    old = {
        "/".join(re.findall(r"\w+", name)): value for name, value in state_of(trunk.root, 6).items()
    }
    fresh = dict(sharding.named_leaves(task.initial_state()))
    kept = min(positions, 64)
    resized = 0
    for name, leaf in sharding.named_leaves(found):
        if name.endswith(branch.POSITIONS):
            resized += 1
            new = np.zeros_like(fresh[name]) if name.startswith("opt_state") else fresh[name]
            assert leaf.shape == (positions, 8) and np.array_equal(leaf[:kept], old[name][:kept]), (
                name
            )
            assert np.allclose(leaf[kept:], new[kept:], rtol=1e-6), name
        else:
            assert np.array_equal(leaf, old[name]), name
    assert resized == 4, "parameter, ema, two moments"
    made = run(tmp_path, task=task)
    rates = [line["learning_rate"] for line in logs.read(made.metrics, "train")]
    assert rates == pytest.approx([0.001] * 4)
    lineage = checkpoint_files.read_meta(made.checkpoints, 20)["branch"]
    assert f"model.positions: 64 -> {positions}" in lineage["config_changes"]
    assert len(lineage["config_changes"]) == 5
    assert lineage["same_data"] and not lineage["same_rows"]
    with pytest.raises(InputError, match=r"@6 read different rows, so words"):
        run(
            tmp_path,
            task=Toy(configs.replace(task.config, {"checkpoint.milestones": ("words:1k",)})),
        )


class OtherMetric(Toy):
    def metrics(self, logits_BxL, inputs, intermediates):
        return {"seen": super().metrics(logits_BxL, inputs, intermediates)["visible"]}


def test_a_class_of_other_metrics_branches_off(trunk, tmp_path):
    """At step 6, in the middle of a window of the log: the new metric is that of the steps since."""
    made = run(
        tmp_path,
        task=OtherMetric(
            tiny_config("data.lanes=1", *SETTINGS, f"train.branch_from={trunk.root}@6")
        ),
    )
    lines = logs.read(made.metrics, "train")
    old = logs.read(trunk.metrics, "train")
    assert [line["loss"] for line in lines] == [line["loss"] for line in old if line["step"] > 6]
    assert lines[-1]["seen"] == old[-1]["visible"] and "visible" not in lines[-1]
    assert lines[0]["seen"] < old[1]["visible"], "the weights of tokens fall from step to step"


def test_factored_moments_of_another_table_of_positions_start_anew(tmp_path, monkeypatch):
    """Adafactor's row moments are those of the shorter side of a table, so they may be of rows, or of columns."""
    monkeypatch.setattr("tests.training.toy.HIDDEN", 160)
    settings = ("data.lanes=1", *SETTINGS, "optimizer.name=adafactor")
    trunk = run(tmp_path, task=Toy(tiny_config(*settings, "model.positions=140")))
    longer = ("model.positions=200", f"train.branch_from={trunk.root}@6")
    task = Toy(tiny_config(*settings, *longer))
    found = branch.restore(source_of(task), task.abstract_state, task.initial_state)
    moments = found.opt_state[0][0]
    for moment, size in ((moments.v_row, 160), (moments.v_col, 200)):
        table = moment["position_embeddings"]["embedding"]
        assert table.shape == (size,) and not table.any()


@pytest.mark.parametrize(
    ("overrides", "step", "words"),
    [
        (
            ("optimizer.name=adafactor", "optimizer.b1=0"),
            6,
            r"\n  optimizer.b1: 0.9 -> 0.0\n  optimizer.name: ",
        ),
        ((), 7, r"branch_from = .*@7: .* step 7; those that are there: 6, 12\."),
        (("train.branch_from=nowhere@6",), 6, r"nowhere@6: no checkpoints"),
        (("model.layers=2",), 6, r"\n  model.layers: 1 -> 2"),
        (("optimizer.ema_decay=0",), 6, r"\n  optimizer.ema_decay: 0.9 -> 0.0$"),
        (
            ("data.batch_stages=((8, 4),)", "data.skip_batches=('2:3',)"),
            6,
            "@6: it read batches 1 to 6 of 16 rows;",
        ),
        (
            ("data.global_batch=8", "checkpoint.milestones=('words:1k',)"),
            6,
            "milestones: .*@6 read different rows",
        ),
        (("train.steps=6",), 6, r"would end after step 6, but the branch starts after step 6;"),
        (
            ("train.steps=0", "train.epochs=0.5"),
            6,
            r"would end after step 4, but the branch starts after step 6;",
        ),
    ],
)
def test_what_may_not_is_refused(trunk, tmp_path, overrides, step, words):
    with pytest.raises(InputError, match=words):
        start(trunk, tmp_path, *overrides, step=step)
    assert not (tmp_path / "config.json").exists()


def test_a_branch_goes_on_where_the_batches_were(tmp_path):
    """A longer run has the same stages; what comes after the branch may differ."""
    stages = (
        "data.batch_stages=((4, 2), (8, 2))",
        "data.lanes=4",
        "train.steps=8",
        "checkpoint.every=3",
    )
    trunk = run(tmp_path / "trunk", *SETTINGS, *stages)

    def opens(step: int, *overrides: str) -> bool:
        task = toy(*SETTINGS, *stages, f"train.branch_from={trunk.root}@{step}", *overrides)
        return source_of(task).lineage["same_rows"]

    assert opens(6, "train.steps=16")
    assert opens(3, "data.batch_stages=((4, 2), (8, 4))")
    read = "batches 1 to 2 of 4 rows, batches 3 to 4 of 8 rows, batches 5 to 6 of 16 rows"
    with pytest.raises(InputError, match=f"@6: it read {read};"):
        opens(6, "data.batch_stages=()")
    edit_meta(trunk.checkpoints, 6, data_fingerprint="other")
    assert not opens(6, "data.batch_stages=()"), "of other data"


def test_other_sources_are_refused(trunk, tmp_path):
    dataset = checkpoint_files.read_meta(trunk.checkpoints, 6)["dataset"]
    for number, (changes, words) in enumerate(
        (
            ({"averaged": []}, "an average or"),
            ({"dataset": dataset | {"labels": ["a", "b"]}}, "or a classifier"),
            ({"dataset": dataset | {"vocab_size": VOCABULARY + 1}}, "another tokenizer"),
        )
    ):
        other = Workdir(str(shutil.copytree(trunk.root, tmp_path / f"other {number}")))
        edit_meta(other.checkpoints, 6, **changes)
        with pytest.raises(InputError, match=f"{other.root}@6: .*{words}"):
            start(other, tmp_path / "new")
