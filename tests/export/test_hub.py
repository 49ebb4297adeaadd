"""Pushes while a run trains (config.hub): their order, and what happens when the Hub is slow, refuses, or is gone."""

import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load as load_tensors

from mlm import entry
from mlm.commands import common
from mlm.export import hub as hub_pushes
from mlm.export import push
from mlm.model import weights
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.pretrained.checkpoint_files import complete_steps
from mlm.workdir import Workdir
from tests.export.conftest import TOKEN
from tests.support import processes
from tests.support.refusals import refuse, snapshot
from tests.training.toy import Toy, run, toy

OVERRIDES = ("hub.name=me/small", "evaluate.every=4", "checkpoint.keep=1")
WAIT = 60.0  # seconds, at most


@pytest.fixture
def exports(monkeypatch) -> None:
    """The export of a toy is a file with the step."""

    def write(step, workdir, folder):
        folder.mkdir()
        (folder / "README.md").write_text(f"---\nstep: {step}\n---\n")

    monkeypatch.setattr(hub_pushes.export, "load_checkpoint", lambda workdir, entry, step: step)
    monkeypatch.setattr(hub_pushes.export, "export_checkpoint", write)
    monkeypatch.setattr(push, "PAUSES", (0.01,))


def train_toy(folder, *overrides: str, task: Toy | None = None) -> Workdir:
    task = task or toy(*OVERRIDES, *overrides)
    workdir = Workdir(str(folder))
    common.train_and_push(task.config, workdir, task, entry.MLM)
    return workdir


def wait_for(moment) -> None:
    deadline = time.monotonic() + WAIT
    while not moment():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.01)


def steps_of(hub) -> list[int]:
    return [int(message.rpartition(" ")[2]) for message in hub.commits]


@pytest.mark.usefixtures("exports")
def test_one_at_a_time_and_the_last_is_waited_for(hub, tmp_path, capsys):
    """The checkpoint that is being pushed is kept, whatever checkpoint.keep says; the run's numbers are the same."""
    begun = threading.Event()
    root = UPath(tmp_path / "slow")
    task = Toy(toy(*OVERRIDES).config)
    batches = task.batches

    def on_commit(message: str) -> None:
        if message.endswith("step 4"):
            begun.set()
            wait_for(lambda: complete_steps(root / "checkpoints") == [4, 12])

    def after_push(start):  # of step 4, which is sent while step 8 is saved
        for step, batch in enumerate(batches(start), start + 1):
            assert step < 9 or begun.wait(WAIT)
            yield batch

    hub.on_commit = on_commit
    task.batches = after_push
    workdir = train_toy(root, task=task)
    assert steps_of(hub) == [4, 12], "step 8 was evaluated while step 4 was sent"
    assert b"step: 12" in hub.repos["me/small"]["branches"]["main"]["README.md"]
    err = capsys.readouterr().err
    assert [line for line in err.splitlines() if line.startswith("hub: step")] == [
        f"hub: step {step} is at {hub.url}/me/small" for step in (4, 12)
    ]
    quiet = run(tmp_path / "quiet", "evaluate.every=4")
    assert workdir.metrics.read_text() == quiet.metrics.read_text()


@pytest.mark.usefixtures("exports")
def test_the_best_classifier_is_the_last_to_be_pushed(hub, tmp_path, monkeypatch):
    """The loss of a toy falls or rises; the lowest one is not of the last step here."""
    task = toy(*OVERRIDES, "checkpoint.keep=9")
    losses = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(task, "evaluate", lambda params: {"loss": next(losses)})
    task.metadata["labels"] = ["a", "b"]
    train_toy(tmp_path, task=task)
    assert steps_of(hub)[-1] == 8


@pytest.mark.usefixtures("exports")
def test_what_fails_is_a_warning(hub, tmp_path, capsys, monkeypatch):
    """A Hub that refuses, or whatever else breaks, ends no run; one that is busy is asked again."""
    hub.bad_minutes = [("/create", 503, ""), ("/commit", 0, "")]
    train_toy(tmp_path / "busy")
    err = capsys.readouterr().err
    assert "answers 503 (a bad minute)" in err and "lacks" not in err
    assert steps_of(hub)[-1] == 12 and hub.repos["me/small"]["private"]
    hub.refuse = "/commit", 403, "You don't have the rights"
    train_toy(tmp_path / "refused")
    err = capsys.readouterr().err
    assert "me/small lacks step 12: " in err and "403: the token may not write there" in err
    command = f"mlm export --workdir={tmp_path / 'refused'} --push=me/small"
    assert command in err and TOKEN not in err
    monkeypatch.setattr(
        hub_pushes.export, "load_checkpoint", lambda *_, **__: (tmp_path / "absent").read_bytes()
    )
    train_toy(tmp_path / "full")
    assert "lacks step 12: FileNotFoundError" in capsys.readouterr().err


@pytest.mark.usefixtures("exports")
def test_an_error_ends_the_pushes_too(hub, tmp_path, monkeypatch):
    """A Hub that is busy holds up neither the end nor its cause, and nothing of the export stays."""
    hub.refuse = "/create", 503, "a bad hour"
    monkeypatch.setattr(push, "PAUSES", (WAIT,))
    monkeypatch.setattr(hub_pushes.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    task = toy(*OVERRIDES)

    def batches(start):
        for step in range(start + 1, 10):
            if step == 9:
                wait_for(lambda: any("create" in line for line in hub.sent))
                raise ZeroDivisionError
            yield Toy.batches(task, step - 1).__next__()

    task.batches = batches
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        train_toy(tmp_path / "run", task=task)
    assert time.monotonic() - begin < WAIT / 2
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_token_that_is_refused_is_refused_first(hub, tmp_path, capsys, monkeypatch):
    """Nothing is written, and nothing is read."""
    command = ["train", "--config=configs/base.py", f"--workdir={tmp_path}"]
    command += ["--config.shards.dir=/absent", "--config.hub.name=me/small"]
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    refuse(command, 2, "config.hub.name=me/small", hub.url, "401: the token", capsys=capsys)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuse = "/preupload", 403, "You don't have the rights"
    refuse(command, 2, "403: the token may not write there", capsys=capsys)
    assert not snapshot(tmp_path)
    hub.refuse = None
    sweep = ["sweep", *command, "--vary=train.seed=0,1"]
    refuse(sweep, 2, "config.hub.name = me/small: several", capsys=capsys)


@pytest.mark.slow
def test_two_processes_push_the_checkpoint_that_they_hold_together(
    hub, manifest, tokenizer_folder, tmp_path
):
    """What is on the Hub is what `export` writes of the last step: weights, card, tokenizer; no token is shown."""
    settings = ("mesh.fsdp=2", f"tokenizer.path={tokenizer_folder}")
    overrides = (*OVERRIDES, "evaluate.every=0", *settings)
    line = processes.train_arguments(tmp_path / "run", str(manifest.folder), *overrides)
    errors = "".join(processes.run_together(line, processes=2, devices=1))
    assert steps_of(hub) == [12] and f"hub: step 12 is at {hub.url}/me/small" in errors
    files = hub.repos["me/small"]["branches"]["main"]
    model = load.from_workdir(Workdir(str(tmp_path / "run")), head=load.LM_HEAD)
    expected = weights.to_torch(model.params)
    pushed = load_tensors(files["model.safetensors"])
    assert pushed.keys() == expected.keys()
    assert all(np.array_equal(pushed[name], expected[name]) for name in expected)
    assert b"| steps | 12 of 12 |" in files["README.md"] and "tokenizer.json" in files
    written = "".join(map(str, snapshot(tmp_path).values()))
    assert TOKEN not in errors + written
