"""Pushes while a run trains (config.hub): their order, and what happens when the Hub is slow, refuses, or is gone."""

import itertools
import json
import signal
import socket
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load as load_tensors

from mlm import __main__, entry
from mlm.export import hub as hub_pushes
from mlm.export import push
from mlm.model import weights
from mlm.pretrained import load
from mlm.pretrained.checkpoint_files import HASHES, complete_steps
from mlm.training import train
from mlm.workdir import Workdir
from tests.export.conftest import TOKEN
from tests.support import processes
from tests.support.refusals import refuse, snapshot
from tests.training.toy import Toy, run, toy

START = "Config and tokenizer of mlm"
OVERRIDES = ("hub.name=me/small", "evaluate.every=4", "checkpoint.keep=1")
WAIT = 30.0  # seconds, at most


class Process:
    """In the place of the process of a push: `during` it, something happens that returns what is wrong."""

    def __init__(self, command, **_):
        self.what = next((part for part in command if part.startswith("--step=")), "start")
        self.killed, self.returncode = threading.Event(), None
        self.pushes.append(self.what)

    def communicate(self, timeout):
        error = self.during()
        self.returncode = 2 if error else 0
        return b"", error.encode()

    def during(self) -> str:
        return ""

    def kill(self):
        self.killed.set()


@pytest.fixture
def process(monkeypatch) -> type[Process]:
    class OfTest(Process):
        pushes: ClassVar[list[str]] = []

    monkeypatch.setattr(hub_pushes, "Popen", OfTest)
    return OfTest


def train_toy(folder, *overrides: str, task: Toy | None = None) -> Workdir:
    task, workdir = task or toy(*OVERRIDES, *overrides), Workdir(str(folder))
    task.module = None
    with hub_pushes.pushing(task.config, workdir, task, entry.MLM) as on_complete:
        train.train(task.config, workdir, task, on_complete)
    return workdir


def is_complete(workdir, step: int) -> bool:
    return (workdir / "checkpoints" / str(step) / HASHES).is_file()


def wait_for(moment) -> None:
    deadline = time.monotonic() + WAIT
    while not moment():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.01)


def test_one_at_a_time_and_the_newest_waits(process, tmp_path, monkeypatch):
    """The checkpoint that is being pushed is kept, whatever checkpoint.keep says; the newest is waited for."""
    said: list[str] = []
    monkeypatch.setattr(hub_pushes.Pushes, "_say", lambda self, message: said.append(message))
    begun, root, task = threading.Event(), tmp_path / "slow", Toy(toy(*OVERRIDES).config)
    batches = task.batches

    def during(self) -> str:
        if self.what == "--step=4":
            begun.set()
            wait_for(lambda: is_complete(root, 12) and not is_complete(root, 8))
            assert is_complete(root, 4)
        if self.what == "--step=12":
            wait_for(lambda: said)
        return ""

    def after_push(start):  # of step 4, which is complete when step 8 is saved
        for step, batch in enumerate(batches(start), start + 1):
            assert step < 9 or begun.wait(WAIT)
            yield batch

    process.during, task.batches = during, after_push
    workdir = train_toy(root, task=task)
    assert process.pushes == ["start", "--step=4", "--step=12"]
    assert len(said) == 1 and said[0].startswith("waits up to 30 min")
    quiet = run(tmp_path / "quiet", "evaluate.every=4")
    assert workdir.metrics.read_text() == quiet.metrics.read_text()


@pytest.mark.parametrize(("every", "steps"), [("evaluation", [3, 6, 7]), ("2", [2, 4, 6, 7])])
def test_what_is_due_is_saved_and_pushed(process, tmp_path, every, steps):
    """The last step always; and a run that has ended pushes again when it is started again."""
    names = ("train.steps=7", "evaluate.every=3", "checkpoint.every=0", f"hub.every={every}", "checkpoint.keep=9")
    workdir = train_toy(tmp_path, *names)
    assert complete_steps(workdir.checkpoints) == steps
    assert process.pushes[0] == "start" and process.pushes[-1] == "--step=7"
    train_toy(tmp_path, *names, "hub.every=5")  # which may change
    assert process.pushes[-2:] == ["start", "--step=7"]


def test_what_fails_is_a_warning(process, tmp_path, capsys, monkeypatch):
    """A push that is refused, one that can't be started, and one that takes too long for the end of the run."""
    process.during = lambda self: "some line\nmlm export: refused with 401" if self.what == "start" else ""
    train_toy(tmp_path / "refused")
    assert "lacks config.json and the tokenizer (mlm export: refused with 401)" in capsys.readouterr().err
    monkeypatch.setattr(hub_pushes.tempfile, "TemporaryDirectory", lambda **_: (tmp_path / "absent").read_bytes())
    train_toy(tmp_path / "full")
    err = capsys.readouterr().err
    assert "lacks step 12 (FileNotFoundError" in err and "lacks the last checkpoint; run the same" in err


def test_an_end_by_an_error_waits_for_no_push(process, tmp_path):
    task = Toy(toy(*OVERRIDES).config)
    task.batches = lambda start: itertools.islice(toy().batches(start), 7)
    process.during = lambda self: "killed" if self.killed.wait(WAIT) else "not killed"
    begin = time.monotonic()
    with pytest.raises(StopIteration):
        train_toy(tmp_path, task=task)
    assert process.pushes == ["start"] and time.monotonic() - begin < WAIT


def test_a_token_that_is_refused_is_refused_first(hub, tmp_path, capsys, monkeypatch):
    """So are a public repository and a Hub without an answer; nothing is written, and nothing is read."""
    command = ["train", "--config=configs/base.py", f"--workdir={tmp_path}", "--config.hub.name=me/small"]
    command += ["--config.shards.dir=/absent", "--config.hub.every=100"]
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    refuse(command, 2, "config.hub.name=me/small", hub.url, "401: the token is not valid", capsys=capsys)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuse = "/preupload", 403, "You don't have the rights"
    refuse(command, 2, "403: the token may not write there", capsys=capsys)
    hub.refuse = None
    hub.repos["me/small"]["private"] = False
    refuse(command, 2, "config.hub.name=me/small", "public", capsys=capsys)
    refuse([*command[:-3], "--config.hub.name=small"], 2, "config.hub.name = 'small'", capsys=capsys)
    refuse([*command[:-1], "--config.hub.every=never"], 2, "config.hub.every = 'never'", capsys=capsys)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(push, "ANSWER", 0.2)
        refuse(command, 2, "config.hub.name=me/small: the Hub gives no answer in 0.2 s", capsys=capsys)
    assert not snapshot(tmp_path)


def arguments(root, manifest, tokenizer_folder: str, *overrides: str) -> list[str]:
    settings = (*OVERRIDES, f"tokenizer.path={tokenizer_folder}", *overrides)
    return processes.train_arguments(root, str(manifest.folder), *settings)


@pytest.mark.standard
def test_two_processes_push_the_checkpoint_that_they_hold_together(hub, manifest, tokenizer_folder, tmp_path):
    """What is on the Hub is what `export` writes of the last step: weights, card, tokenizer; no token is shown."""
    line = arguments(tmp_path / "run", manifest, tokenizer_folder, "mesh.data=1", "mesh.fsdp=2", "evaluate.every=0")
    errors = processes.run_together(line, processes=2, devices=1)
    assert hub.commits == [START, "Export of mlm, step 12"] and hub.repos["me/small"]["private"]
    files = hub.repos["me/small"]["branches"]["main"]
    model = load.from_workdir(Workdir(str(tmp_path / "run")), head=load.LM_HEAD)
    expected = weights.to_torch(model.params)
    pushed = load_tensors(files["model.safetensors"])
    assert pushed.keys() == expected.keys()
    assert all(np.array_equal(pushed[name], expected[name]) for name in expected)
    assert b"| steps | 12 |" in files["README.md"]
    assert TOKEN not in "".join(errors)
    assert not [name for name, content in snapshot(tmp_path).items() if TOKEN.encode() in content]


@pytest.mark.standard
@pytest.mark.usefixtures("one_device")
def test_refused_in_the_middle_it_goes_on_and_pushes_when_it_is_started_again(
    hub, manifest, tokenizer_folder, tmp_path, capsys
):
    line = arguments(tmp_path / "run", manifest, tokenizer_folder, "evaluate.every=0")
    hub.on_commit = lambda message: setattr(hub, "refuse", (r"/api/", 401, "Invalid username or password."))
    assert __main__.main(line) == 0
    err = capsys.readouterr().err
    assert "401: the token is not valid there" in err and "lacks the last checkpoint" in err and TOKEN not in err
    assert hub.commits == [START]
    files = dict(hub.repos["me/small"]["branches"]["main"])
    assert json.loads(files["config.json"])["model_type"] == "roberta" and "tokenizer.json" in files
    hub.refuse, hub.on_commit = None, lambda message: None
    assert __main__.main(line) == 0
    assert hub.commits == [START, START, "Export of mlm, step 12"]
    pushed = hub.repos["me/small"]["branches"]["main"]
    assert [name for name in files if pushed[name] != files[name]] == []
    hub.shutdown()
    hub.server_close()
    assert __main__.main(line) == 0
    assert "can't be reached" in capsys.readouterr().err


@pytest.mark.standard
def test_a_signal_waits_for_no_push(hub, manifest, tokenizer_folder, tmp_path):
    begun = threading.Event()
    hub.on_commit = lambda message: begun.set() or time.sleep(WAIT)
    started = processes.start(arguments(tmp_path, manifest, tokenizer_folder, "train.steps=1000000"))
    assert begun.wait(100)
    wait_for(lambda: processes.logged_step(tmp_path) > 8)
    begin = time.monotonic()
    started.send_signal(signal.SIGTERM)
    processes.finish(started, code=75)
    assert time.monotonic() - begin < WAIT / 2
