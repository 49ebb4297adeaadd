"""README's first changes, as printed, in a file of their own."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests import ROOT

BLOCKS = dict(re.findall(r"```python\n# ([a-z_]+\.py)\S*[^\n]*\n(.*?)```", (ROOT / "README.md").read_text(), re.S))


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """The file, imported as pytest does."""
    path = tmp_path_factory.mktemp("changes") / "changes.py"
    path.write_text(BLOCKS["changes.py"])
    spec = importlib.util.spec_from_file_location("changes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_step(changes):
    changes.test_one_step()


def test_each_change_passes_its_test(changes):
    changes.test_changes()


@pytest.mark.standard
def test_the_file_is_a_config_and_trains(changes, manifest, tmp_path):
    """From another folder, with a model that transformers lacks, to what `evaluate` reads."""
    small = ("model.hidden_size=32", "model.layers=2", "model.heads=2", "model.intermediate_size=64")
    small += ("train.steps=4", "data.lanes=2", "data.batch_stages=()", "data.short_length=0", "data.global_batch=8")
    small += ("model.init=stock", f"shards.length={manifest.length}", f"shards.dir={manifest.folder}", "log.every=1")
    settings = [f"--config.{key}" for key in (*small, "evaluate.batch=8", "schedule.warmup_steps=0")]
    environment, file, workdir = {**os.environ, "PYTHONPATH": str(ROOT)}, changes.__file__, f"--workdir={tmp_path}/run"
    for arguments in (["train", f"--config={file}", *settings], ["evaluate"]):
        command = [sys.executable, file, *arguments, workdir]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
