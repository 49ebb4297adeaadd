"""What a run tells the outside: Weights & Biases gets every line once, and a trace is written where it is asked for."""

import functools
import inspect
import pathlib
import sys
import types

import pytest

from mlm import logs
from mlm.errors import DamageError, InputError
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.workdir import Workdir
from tests.support import processes
from tests.support.tiny import pretrain, tiny_config

# The parameters of wandb.init, in wandb's own order (wandb/sdk/wandb_init.py).
INIT = (
    "entity project dir id name notes tags config config_exclude_keys config_include_keys allow_val_change group "
    "job_type mode force anonymous reinit resume resume_from fork_from save_code tensorboard sync_tensorboard "
    "monitor_gym settings"
)


def signature(names: str) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind, default=None) for name in names.split()])


@pytest.fixture
def wandb(monkeypatch) -> types.SimpleNamespace:
    """A stand-in that records every call, and refuses what wandb refuses."""
    seen = types.SimpleNamespace(settings=None, lines=[], finished=0)

    def init(*args, **settings):
        seen.settings = signature(INIT).bind(*args, **settings).arguments
        assert settings["resume"] in ("allow", "never", "must", "auto")
        assert not set(settings["id"]) & set("/\\#?%:"), "wandb refuses these in an id"
        assert settings["id"].strip() == settings["id"] != ""
        return types.SimpleNamespace(log=log, finish=functools.partial(setattr, seen, "finished", seen.finished + 1))

    def log(*args, **kwargs):
        given = signature("data step commit").bind(*args, **kwargs).arguments
        seen.lines.append((given["step"], given["data"]))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return seen


@pytest.mark.slow
def test_weights_and_biases_gets_what_the_log_gets(manifest, tmp_path, wandb):
    config = tiny_config("log.wandb=my-project", "data.lanes=2", "train.steps=4")
    pretrain(config, Workdir(str(tmp_path / "run")), manifest)
    assert wandb.settings["project"] == "my-project" and wandb.settings["config"]["train.steps"] == 4
    assert wandb.finished == 1
    written = logs.read(UPath(tmp_path / "run" / "metrics.jsonl"))
    assert [(line["step"], f"{line['kind']}/loss") for line in written] == [
        (step, next(key for key in values if key.endswith("/loss"))) for step, values in wandb.lines
    ]
    for line, (_, values) in zip(written, wandb.lines, strict=True):
        assert values[f"{line['kind']}/loss"] == line["loss"]


@pytest.mark.slow
def test_weights_and_biases_goes_on_with_the_same_run(manifest, tmp_path, wandb):
    """Started again from step 2, with another key that may change; another workdir is another run."""
    ids = []
    for name, lines in (("run", 10), ("run", 20), ("other", 10)):
        keys = ("log.wandb=my-project", "data.lanes=2", "train.steps=4", "checkpoint.every=2", f"log.every={lines}")
        pretrain(tiny_config(*keys), Workdir(str(tmp_path / name)), manifest)
        checkpoint_files.set_aside(UPath(tmp_path / name / "checkpoints"), 4, "later")
        assert wandb.settings["resume"] == "allow" and wandb.settings["allow_val_change"]
        ids.append(wandb.settings["id"])
    assert ids[0] == ids[1] != ids[2] and len(ids[0]) == 32
    assert (tmp_path / "run" / "wandb_id").read_text().strip() == ids[0]


@pytest.mark.parametrize("data", [b"", b"a/b", b"\xff", b"x" * 129, b"one\ntwo"])
def test_a_damaged_id_of_weights_and_biases_is_reported(manifest, tmp_path: pathlib.Path, wandb, data):
    (tmp_path / "wandb_id").write_bytes(data)
    with pytest.raises(DamageError, match="wandb_id: is not the id of a run"):
        pretrain(tiny_config("log.wandb=my-project", "data.lanes=2"), Workdir(str(tmp_path)), manifest)
    assert wandb.settings is None and (tmp_path / "wandb_id").read_bytes() == data


def test_weights_and_biases_missing_is_reported(manifest, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_config("log.wandb=my-project", "data.lanes=2")
    with pytest.raises(InputError, match=r"log\.wandb.*install"):
        pretrain(config, Workdir(str(tmp_path / "run")), manifest)


# In processes of their own: jax's profiler would look for a TPU where another test has loaded the TPU's compiler.
@pytest.mark.slow
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
