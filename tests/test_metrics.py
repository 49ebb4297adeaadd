"""What a run tells the outside: Weights & Biases gets every line once, and a trace is written where it is asked for."""

import sys
import types

import pytest

from mlm import logs
from mlm.errors import InputError
from mlm.paths import UPath
from mlm.training import pretraining
from mlm.workdir import Workdir
from tests import processes
from tests.fixtures import tiny_config


@pytest.fixture
def wandb(monkeypatch) -> types.SimpleNamespace:
    """A stand-in that keeps what it is told."""
    seen = types.SimpleNamespace(settings=None, lines=[], finished=0)

    def init(**settings):
        seen.settings = settings
        run = types.SimpleNamespace()
        run.log = lambda values, step: seen.lines.append((step, values))
        run.finish = lambda: setattr(seen, "finished", seen.finished + 1)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return seen


def test_weights_and_biases_gets_what_the_log_gets(manifest, tmp_path, wandb):
    config = tiny_config("log.wandb=my-project", "data.lanes=2", "train.steps=4")
    pretraining.train(config, Workdir(str(tmp_path / "run")), manifest)
    assert wandb.settings["project"] == "my-project" and wandb.settings["config"]["train.steps"] == 4
    assert wandb.finished == 1
    written = logs.read(UPath(tmp_path / "run" / "metrics.jsonl"))
    assert [(line["step"], f"{line['kind']}/loss") for line in written] == [
        (step, next(key for key in values if key.endswith("/loss"))) for step, values in wandb.lines
    ]
    for line, (_, values) in zip(written, wandb.lines, strict=True):
        assert values[f"{line['kind']}/loss"] == line["loss"]


def test_weights_and_biases_missing_is_told(manifest, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_config("log.wandb=my-project", "data.lanes=2")
    with pytest.raises(InputError, match=r"log\.wandb.*install"):
        pretraining.train(config, Workdir(str(tmp_path / "run")), manifest)


# In processes of their own: jax's profiler would look for a TPU where another test has loaded the TPU's compiler.
def test_updates_are_profiled(manifest, tmp_path):
    settings = ("log.profile_start=2", "log.profile_steps=2", "train.steps=5")
    processes.run(processes.train_arguments(tmp_path / "run", str(manifest.folder), *settings))
    [trace] = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert b"train" in trace.read_bytes()


@pytest.mark.slow
def test_a_trace_that_reaches_past_the_last_update_is_written(manifest, tmp_path):
    settings = ("log.profile_start=3", "log.profile_steps=9", "train.steps=4")
    processes.run(processes.train_arguments(tmp_path / "run", str(manifest.folder), *settings))
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
