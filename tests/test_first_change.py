"""README's first changes, as printed, in a file of their own."""

import importlib.util
import re
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
    sys.modules["changes"] = module  # its classes are looked up by their module's name
    spec.loader.exec_module(module)
    yield module
    del sys.modules["changes"]


def test_one_step(changes):
    changes.test_one_step()


@pytest.mark.slow
def test_each_change_passes_its_test(changes):
    changes.test_changes()


def test_the_file_is_a_config_and_trains(changes, one_device, manifest, tmp_path):
    """With a model that transformers lacks, to what `evaluate` reads."""
    small = ("model.hidden_size=32", "model.layers=2", "model.heads=2", "model.intermediate_size=64")
    small += ("train.steps=4", "data.lanes=2", "data.batch_stages=()", "data.short_length=0", "data.global_batch=8")
    small += ("model.init=stock", f"shards.length={manifest.length}", f"shards.dir={manifest.folder}", "log.every=1")
    settings = [f"--config.{key}" for key in (*small, "evaluate.batch=8", "schedule.warmup_steps=0")]
    for arguments in (["train", f"--config={changes.__file__}", *settings], ["evaluate"]):
        assert changes.main([*arguments, f"--workdir={tmp_path}/run"], pretraining=changes.Gated) == 0
