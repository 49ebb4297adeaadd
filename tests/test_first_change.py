"""README's first changes, as printed, in a file of their own."""

import importlib.util
import re
import sys

import jax
import pytest

from mlm import config as configs
from mlm import testing
from mlm.data.manifest import DatasetInfo
from tests import ROOT

SMALL = (
    "model.hidden_size=32",
    "model.layers=2",
    "model.heads=2",
    "model.intermediate_size=64",
    "data.lanes=2",
)
SMALL += (
    "train.steps=4",
    "data.batch_stages=()",
    "data.short_length=0",
    "data.global_batch=8",
    "model.init=stock",
)
BLOCKS = dict(
    re.findall(
        r"```python\n# ([a-z_]+\.py)\S*[^\n]*\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
)


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


def shards_of(manifest) -> tuple[str, str]:
    return f"shards.length={manifest.length}", f"shards.dir={manifest.folder}"


def test_one_step(changes):
    changes.test_one_step()


@pytest.mark.parametrize("name", ["RareTokens", "Nadam", "Kernel", "Gated"])
def test_the_step_of_each_change_is_traced(changes, manifest, name):
    config = configs.load(changes.__file__, [*SMALL, *shards_of(manifest)])
    task = getattr(changes, name)(config, DatasetInfo.from_manifest(manifest), manifest=manifest)
    _, metrics = jax.eval_shape(task.train_step, task.abstract_state, task.batch_shapes(8))
    assert "loss" in metrics


@pytest.mark.slow
def test_each_change_passes_its_test(changes, monkeypatch):
    """As printed; of one layer, which compiles in half of the time."""
    monkeypatch.setitem(testing.SMALL, "model.layers", 1)
    changes.test_changes()


def test_the_file_is_a_config_and_trains(changes, one_device, manifest, tmp_path):
    """With a model that transformers lacks, to what `evaluate` reads."""
    keys = (*SMALL, "evaluate.batch=8", "schedule.warmup=0", *shards_of(manifest))
    settings = [f"--config.{key}" for key in keys]
    for arguments in (["train", f"--config={changes.__file__}", *settings], ["evaluate"]):
        assert (
            changes.main([*arguments, f"--workdir={tmp_path}/run"], pretraining=changes.Gated) == 0
        )
