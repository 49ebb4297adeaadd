"""README's first changes, as printed, in a file of their own."""

import os
import re
import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = pytest.mark.standard

BLOCKS = dict(re.findall(r"```python\n# ([a-z_]+\.py)\S*[^\n]*\n(.*?)```", (ROOT / "README.md").read_text(), re.S))


def run(folder, *command: object) -> None:
    (folder / "changes.py").write_text(BLOCKS["changes.py"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)  # the tests ask for their own devices
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_each_change_passes_its_test(tmp_path):
    run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", tmp_path / "changes.py")


def test_the_file_is_a_config_and_trains(manifest, tmp_path):
    """From another folder, with a model that transformers lacks, to what `predict` and `evaluate` read."""
    small = ("model.hidden_size=32", "model.layers=2", "model.heads=2", "model.intermediate_size=64")
    small += ("train.steps=4", "data.lanes=2", "data.batch_stages=()", "data.short_length=0", "data.global_batch=8")
    small += ("model.init=stock", f"shards.length={manifest.length}", f"shards.dir={manifest.folder}", "log.every=1")
    settings = [f"--config.{key}" for key in (*small, "evaluate.batch=8", "schedule.warmup_steps=0")]
    changes, workdir = tmp_path / "changes.py", tmp_path / "run"
    run(tmp_path, changes, "train", f"--config={changes}", f"--workdir={workdir}", *settings)
    run(tmp_path, changes, "evaluate", f"--workdir={workdir}")
