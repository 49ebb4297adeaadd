"""Checkpoints in their folder: what kills leave goes when a later one is complete, and nothing else does."""

import logging
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from mlm import __main__, cluster
from mlm.errors import DamageError, InputError
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.training import checkpoint
from mlm.workdir import Workdir
from tests import ROOT
from tests.support.processes import environment

# Saves the steps after the newest complete one, as a run does, and is killed where the first of them is hashed. The
# imports are shared by forks: jax has not started any thread before a child uses it.
KILLED = """
import os, signal, sys
import jax.numpy as jnp
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.training import checkpoint

def killed(folder, step):
    os.kill(os.getpid(), signal.SIGKILL)

folder, hash = UPath(sys.argv[1]), checkpoint.write_hashes
for kill in (True, True, False, True, True, True, True, False):
    child = os.fork()
    if not child:
        checkpoint.write_hashes = killed if kill else hash
        start = max(checkpoint_files.complete_steps(folder), default=0)
        with checkpoint.Checkpoints(folder, keep=3) as checkpoints:
            for step in range(start + 5, start + (10 if kill else 25), 5):
                checkpoints.save(step, {"weight": jnp.full(3, step)}, {"step": step}, None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if kill else 0), status
    print(*sorted(os.listdir(sys.argv[1])))
"""


@pytest.mark.slow
def test_what_six_kills_leave_goes_when_a_later_step_is_complete(tmp_path):
    """Each between orbax's commit and the hashes, at two steps of one run."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(1), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    after = [set(line.split()) for line in done.stdout.splitlines()]
    assert after[0] == {"5"} and after[1] == {"5", "incomplete.5"}, "it is set aside at the next start"
    assert after[2] == {"10", "15", "20"}
    aside = {"incomplete.25", "incomplete.25.2", "incomplete.25.3"}
    assert after[6] == {"10", "15", "20", "25"} | aside, "four kills at step 25, nothing complete since"
    assert after[7] == {"30", "35", "40"}
    assert [checkpoint_files.find_damage(UPath(tmp_path), step) for step in (30, 35, 40)] == [None] * 3


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> UPath:
    save(UPath(tmp_path), 10)
    return UPath(tmp_path)


def save(folder: UPath, step: int) -> None:
    with checkpoint.Checkpoints(folder, keep=3) as checkpoints:
        checkpoints.save(step, {"weight": jnp.zeros(3)}, {"step": step}, None)


def test_other_hosts_go_on_when_all_is_complete(tmp_path, monkeypatch):
    """`run` reads the newest checkpoint on every host, and the first host alone writes its hashes."""
    met: dict[str, list[int]] = {}
    monkeypatch.setattr(cluster, "barrier", lambda name: met.update({name: checkpoint_files.complete_steps(folder)}))
    folder = UPath(tmp_path)
    save(folder, 10)
    assert met == {"checkpoints opened": [], "checkpoints complete": [10]}


def test_nothing_else_is_removed(saved, tmp_path):
    elsewhere = tmp_path.with_name(f"{tmp_path.name} elsewhere")
    shutil.copytree(saved / "10", elsewhere)
    for name in ("damaged.10", "incomplete.21", "incomplete.10.copy", "notes.incomplete.10", "incomplete.9"):
        shutil.copytree(saved / "10", saved / name)
    (saved / "incomplete.8").mkdir()
    (saved / "incomplete.8" / "notes.txt").write_text("a person's")
    (saved / "incomplete.7").symlink_to(elsewhere)
    (saved / "incomplete.6").write_text("a file")
    save(saved, 20)
    kept = {"damaged.10", "incomplete.21", "incomplete.10.copy", "notes.incomplete.10"}
    assert {path.name for path in saved.iterdir()} == {
        "10",
        "20",
        "incomplete.6",
        "incomplete.7",
        "incomplete.8",
    } | kept
    assert (elsewhere / "state").is_dir() and (saved / "incomplete.8" / "notes.txt").is_file()


def test_a_removal_that_was_cut_short_is_taken_up_again(saved):
    left = saved / "incomplete.5"
    left.mkdir()
    (left / checkpoint.COMMITTED).write_text("")
    save(saved, 20)
    assert not left.exists()


LETTERS = ["[1]", "*", "a**b", "what?", "{a,b}", "#1", "c:d", "a::b", "@5", "50%", "~", "é 'x\"", "-x", "a\nb", "end~"]


@pytest.mark.parametrize("letters", LETTERS)
def test_any_letters_of_a_path(tmp_path, letters):
    folder, state = UPath(tmp_path / letters / "checkpoints"), {"weight": jnp.arange(3.0), "step": jnp.int32(7)}
    with checkpoint.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(7, state, {"step": 7}, None)
    assert checkpoint_files.choose(folder, on_damage="stop") == 7
    restored = checkpoint.restore(folder, 7, jax.eval_shape(lambda: state))
    assert restored["weight"].tolist() == [0.0, 1.0, 2.0] and restored["step"] == 7
    assert [path.name for path in tmp_path.iterdir()] == [letters]


@pytest.mark.parametrize("path", ["a\\b", "/gs/x", "/hf"])
def test_paths_that_orbax_takes_for_others_are_refused_before_anything_is_written(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--workdir="):
        Workdir(path)
    assert not list(tmp_path.iterdir())


def lose_the_parts(step: pathlib.Path) -> None:
    shutil.rmtree(step / "state" / "ocdbt.process_0")


def lose_the_tree(step: pathlib.Path) -> None:
    (step / "state" / "manifest.ocdbt").unlink()


def cut_the_data(step: pathlib.Path) -> None:
    largest = max((step / "state" / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def change_the_metadata(step: pathlib.Path) -> None:
    (step / "meta" / "metadata").write_text('{"step": 19}')


def change_the_shape(step: pathlib.Path) -> None:
    other = step.parent.parent / "other"
    with checkpoint.Checkpoints(UPath(other), keep=1) as checkpoints:
        checkpoints.save(20, {"weight": jnp.zeros((100, 200))}, {"step": 20}, None)
    shutil.rmtree(step / "state")
    shutil.copytree(other / "20" / "state", step / "state")


@pytest.mark.parametrize("damage", [lose_the_parts, lose_the_tree, cut_the_data, change_the_metadata, change_the_shape])
def test_what_cant_be_read_back_has_no_hashes_and_leaves_the_checkpoint_before(tmp_path, monkeypatch, damage):
    folder, read_back = UPath(tmp_path / "run"), checkpoint._read_back
    state = {"weight": jax.random.normal(jax.random.key(0), (200, 200))}

    def damaged(folder, step, *rest):
        if step == 20:
            monkeypatch.setattr(checkpoint, "_read_back", read_back)
            damage(pathlib.Path(folder, "20"))
        read_back(folder, step, *rest)

    monkeypatch.setattr(checkpoint, "_read_back", damaged)
    refused = pytest.raises(DamageError, match=r"run/20: can't be read back.*; the earlier")
    with refused, checkpoint.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(10, state, {"step": 10}, None)
        checkpoints.save(20, state, {"step": 20}, None)
    assert checkpoint_files.complete_steps(folder) == [10]
    assert checkpoint_files.find_damage(folder, 10) is None


def test_a_merge_that_finds_no_parts_is_warned_of_once_and_never_called_saved(tmp_path, monkeypatch, capsys):
    """As in a folder with brackets by etils's own glob."""
    log = logging.getLogger("absl")
    monkeypatch.setattr(log, "filters", [])
    __main__.main([])
    monkeypatch.setattr(epath.gpath._GPath, "glob", lambda path, pattern: iter(()))
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))
    log.addHandler(handler)
    try:
        for step in (10, 20):
            with pytest.raises(DamageError, match=f"{step}: can't be read back"):
                save(UPath(tmp_path), step)
    finally:
        log.removeHandler(handler)
    assert len(lines) == 1 and "\n" not in lines[0]
    assert "ocdbt" in lines[0].lower() and str(tmp_path) in lines[0]
    assert checkpoint_files.complete_steps(UPath(tmp_path)) == []


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([3.0, 1.0, 2.0, None, None], [10, 20, 40, 50]),
        ([1.0, None, 1.0, 2.0, 3.0], [10, 30, 40, 50]),
        ([None, float("nan"), None, None, None], [10, 40, 50]),
    ],
)
def test_the_newest_two_the_best_one_and_the_milestone_are_kept(tmp_path, scores, kept):
    folder = UPath(tmp_path)
    for part in (slice(3), slice(3, 5)):  # started again after three
        with checkpoint.Checkpoints(folder, keep=2, milestones=[10]) as checkpoints:
            for step, score in list(zip(range(10, 60, 10), scores, strict=True))[part]:
                checkpoints.save(step, {"weight": jnp.zeros(3)}, {"step": step}, score)
    assert checkpoint_files.complete_steps(folder) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, kept))
