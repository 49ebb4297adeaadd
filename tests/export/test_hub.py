"""Pushes while a run trains (config.hub): their order, and what happens when the Hub is slow, refuses, or is gone."""

import signal
import socket
import threading
import time

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load as load_tensors

from mlm import __main__, entry
from mlm.cluster import watch
from mlm.export import hub as hub_pushes
from mlm.export import push
from mlm.model import weights
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.pretrained.checkpoint_files import complete_steps
from mlm.workdir import Workdir
from tests.export.conftest import TOKEN
from tests.export.hub_stand_in import serving
from tests.support import labelled_texts, processes
from tests.support.refusals import refuse, snapshot
from tests.training.toy import Toy, run, toy

START = "Config and tokenizer of mlm"
OVERRIDES = ("hub.name=me/small", "evaluate.every=4", "checkpoint.keep=1")
WAIT = 240.0  # seconds, at most


class Process:
    """In the place of the process of a push: what `during` it returns is what it says is wrong."""

    during = staticmethod(lambda what: "")

    def __init__(self, command, **_):
        self.pushes.append(next((part for part in command if part.startswith("--step=")), "start"))

    def communicate(self, timeout):
        error = self.during(self.pushes[-1])
        self.returncode = 2 if error else 0
        return b"", error.encode()

    def kill(self):
        pass


@pytest.fixture
def pushes(monkeypatch) -> list[str]:
    monkeypatch.setattr(Process, "pushes", [], raising=False)
    monkeypatch.setattr(hub_pushes, "Popen", Process)
    return Process.pushes


def train_toy(folder, *overrides: str, task: Toy | None = None) -> Workdir:
    task, workdir = task or toy(*OVERRIDES, *overrides), Workdir(str(folder))
    task.module = None
    hub_pushes.train_and_push(task.config, workdir, task, entry.MLM)
    return workdir


def wait_for(moment) -> None:
    deadline = time.monotonic() + WAIT
    while not moment():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.01)


def test_one_at_a_time_and_the_newest_waits(pushes, tmp_path, monkeypatch):
    """The checkpoint that is being pushed is kept, whatever checkpoint.keep says; the newest is waited for."""
    said: list[str] = []
    monkeypatch.setattr(hub_pushes.Pushes, "_say", lambda self, message: said.append(message))
    begun, root, task = threading.Event(), UPath(tmp_path / "slow"), Toy(toy(*OVERRIDES).config)
    batches = task.batches

    def during(what: str) -> str:
        if what == "--step=4":
            begun.set()
            wait_for(lambda: complete_steps(root / "checkpoints") == [4, 12])
        if what == "--step=12":
            wait_for(lambda: said)
        return ""

    def after_push(start):  # of step 4, which is complete when step 8 is saved
        for step, batch in enumerate(batches(start), start + 1):
            assert step < 9 or begun.wait(WAIT)
            yield batch

    monkeypatch.setattr(Process, "during", staticmethod(during))
    task.batches = after_push
    workdir = train_toy(root, task=task)
    assert pushes == ["start", "--step=4", "--step=12"]
    assert len(said) == 1 and said[0].startswith("waits up to 30 min")
    quiet = run(tmp_path / "quiet", "evaluate.every=4")
    assert workdir.metrics.read_text() == quiet.metrics.read_text()


@pytest.mark.parametrize(("every", "steps"), [("evaluation", [3, 6, 7]), ("2", [2, 4, 6, 7])])
def test_what_is_due_is_saved_and_pushed(pushes, tmp_path, every, steps):
    """The last step always; and a run that has ended pushes again when it is started again."""
    names = ("train.steps=7", "evaluate.every=3", "checkpoint.every=0", f"hub.every={every}", "checkpoint.keep=9")
    workdir = train_toy(tmp_path, *names)
    assert complete_steps(workdir.checkpoints) == steps
    assert pushes[0] == "start" and pushes[-1] == "--step=7"
    train_toy(tmp_path, *names, "hub.every=5")  # which may change
    assert pushes[-2:] == ["start", "--step=7"]


@pytest.mark.usefixtures("pushes")
def test_what_fails_is_a_warning(tmp_path, capsys, monkeypatch):
    """A push that is refused, and one that can't be started."""
    said = {"start": "some line\nmlm export: refused with 401"}
    monkeypatch.setattr(Process, "during", staticmethod(lambda what: said.get(what, "")))
    train_toy(tmp_path / "refused")
    assert "lacks config.json and the tokenizer (mlm export: refused with 401)" in capsys.readouterr().err
    monkeypatch.setattr(hub_pushes.tempfile, "TemporaryDirectory", lambda **_: (tmp_path / "absent").read_bytes())
    train_toy(tmp_path / "full")
    err = capsys.readouterr().err
    assert "lacks step 12 (FileNotFoundError" in err and "lacks the last checkpoint; run the same" in err


def test_an_end_at_once_ends_the_push_first(pushes, tmp_path, capsys, monkeypatch):
    """SIGTERM while the last push is waited for; nothing of it stays, and what is said is true."""
    killed, seen = threading.Event(), []
    monkeypatch.setattr(
        Process, "during", staticmethod(lambda what: "" if what == "start" else f"{killed.wait(WAIT / 10)}")
    )
    monkeypatch.setattr(Process, "kill", lambda self: self.pushes[-1] != "start" and killed.set())
    monkeypatch.setattr(hub_pushes.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(hub_pushes.Pushes, "_say", lambda self, message: __main__._stop(signal.SIGTERM, None))
    monkeypatch.setattr(watch, "current", watch.Watch("train", None))
    monkeypatch.setattr(watch.os, "_exit", lambda code: seen.append((code, killed.is_set(), [*tmp_path.glob("mlm-*")])))
    train_toy(tmp_path / "run")
    assert seen == [(75, True, [])] and "mlm train: stopped after step 12;" in capsys.readouterr().err


def test_a_token_that_is_refused_is_refused_first(hub, tmp_path, capsys, monkeypatch):
    """So are a public repository and a Hub without an answer; nothing is written, and nothing is read."""
    command = ["train", "--config=configs/base.py", f"--workdir={tmp_path}", "--config.hub.name=me/small"]
    command += ["--config.shards.dir=/absent"]
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    refuse(command, 2, "config.hub.name=me/small", hub.url, "401: the token is not valid", capsys=capsys)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuse = "/preupload", 403, "You don't have the rights"
    refuse(command, 2, "403: the token may not write there", capsys=capsys)
    hub.refuse = None
    hub.repos["me/small"]["private"] = False
    refuse(command, 2, "config.hub.name=me/small", "public", "make it private", capsys=capsys)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(push, "ANSWER", 0.2)
        begin = time.monotonic()
        refuse(command, 2, "config.hub.name=me/small: the Hub gives no answer in 0.2 s", capsys=capsys)
        assert time.monotonic() - begin < WAIT / 2
    refuse([*command, "--config.hub.name=me/small.git"], 2, "as in config.hub.name=me/my-model", capsys=capsys)
    assert not snapshot(tmp_path)
    hub.repos.clear()
    refuse(["sweep", *command, "--vary=train.seed=0,1"], 2, "config.hub.name = me/small: several", capsys=capsys)
    assert not hub.repos


def arguments(root, manifest, tokenizer_folder: str, *overrides: str) -> list[str]:
    settings = (*OVERRIDES, f"tokenizer.path={tokenizer_folder}", *overrides)
    return processes.train_arguments(root, str(manifest.folder), *settings)


@pytest.mark.slow
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
    assert b"| steps | 12 of 12 |" in files["README.md"]
    assert TOKEN not in "".join(errors)
    assert not [name for name, content in snapshot(tmp_path).items() if TOKEN.encode() in content]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_hub_that_is_killed_gets_the_best_classifier_when_it_is_back(
    hub, tokenizer_folder, tmp_path, capsys, monkeypatch
):
    settings = labelled_texts.settings(tmp_path, tokenizer_folder, "train.epochs=3", "hub.name=me/small")
    line = ["classify", "--config=configs/base.py", f"--workdir={tmp_path}", *(f"--config.{text}" for text in settings)]
    hub.on_commit = lambda message: (hub.shutdown(), hub.server_close())
    assert __main__.main(line) == 0
    err = capsys.readouterr().err
    assert "can't be reached" in err and "lacks the last checkpoint" in err and TOKEN not in err
    start = hub.repos["me/small"]["branches"]["main"]
    with serving(TOKEN) as again:
        monkeypatch.setenv("HF_ENDPOINT", again.url)
        assert __main__.main(line) == 0
    best = load.load(Workdir(str(tmp_path)), head=load.CLASSIFIER).step
    assert hub.commits == [START] and again.commits == [START, f"Export of mlm, step {best}"]
    files = again.repos["me/small"]["branches"]["main"]
    assert "tokenizer.json" in start and {name: files[name] for name in start} == start
    assert files["model.safetensors"] == (tmp_path / "export" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_refused_in_the_middle_and_stopped_during_a_push(hub, manifest, tokenizer_folder, tmp_path):
    """The next push is another attempt; a run that is told to stop does not wait for it."""
    hangs = threading.Event()
    hub.on_commit = lambda message: setattr(hub, "refuse", ("/api/", 401, "Invalid username or password."))
    line = arguments(tmp_path, manifest, tokenizer_folder, "train.steps=1000000")
    started = processes.start(line, program=processes.DELAYED)  # pushes need the processor, too
    wait_for(lambda: sum(line == "POST /api/repos/create" for line in hub.sent) == 3)  # one to try, one of the start
    hub.refuse, hub.on_commit = None, lambda message: hangs.set() or time.sleep(WAIT)
    assert hangs.wait(WAIT)
    begin = time.monotonic()
    started.send_signal(signal.SIGTERM)
    _, err = processes.finish(started, code=75)
    assert time.monotonic() - begin < WAIT / 2
    assert "401: the token is not valid there" in err and TOKEN not in err
