"""Checkpoints in their folder: what kills leave goes when a later one is complete, and nothing else does."""

import pathlib
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest

from mlm import cluster
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.training import checkpoint
from tests.processes import ROOT, environment

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
    assert after[6] == {"15", "20", "25"} | aside, "four kills at step 25, nothing complete since"
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
