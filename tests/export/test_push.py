"""`export --push` against a stand-in for the Hub: what arrives, what isn't sent twice, and what a busy Hub is given."""

import json
import pathlib
import shutil
import socket
import threading

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import reset_sessions

from mlm import __main__
from mlm.errors import InputError
from mlm.export import export, push
from tests.export.conftest import TOKEN
from tests.support.refusals import refuse


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """Files as an export has them: three large ones, and small ones."""
    folder = tmp_path / "run" / "export"
    folder.mkdir(parents=True)
    for name in ("flax_model.msgpack", "model.safetensors", "proof.safetensors"):
        (folder / name).write_bytes(name.encode() * 10_000)
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# A model\n")
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    (folder / ".hidden").write_text("not of the export")
    return folder


class Pauses(threading.Event):
    """Notes how long a push would wait for its next try, and does not wait."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout=None):
        self.seconds.append(timeout)
        return False


def send(folder: pathlib.Path, *, public: bool = False, **settings) -> str:
    return push.push(folder, "me/small", public=public, **settings)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".hidden"}


def no_token(root: pathlib.Path, *outputs: str) -> None:
    """No output and no file that was left may hold the token."""
    assert not any(TOKEN in text for text in outputs)
    files = [path for path in root.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_everything_arrives_in_one_commit_privately(hub, folder, capsys):
    assert send(folder) == f"{hub.url}/me/small"
    assert hub.repos["me/small"] == {"private": True, "branches": {"main": contents(folder)}}
    assert [line for line in hub.sent if "/commit/" in line] == [
        "POST /api/models/me/small/commit/main"
    ]
    no_token(folder.parent, *capsys.readouterr())


def test_public_when_asked_and_never_by_accident(hub, folder):
    send(folder, public=True)
    assert not hub.repos["me/small"]["private"]
    with pytest.raises(InputError, match=r"--push=me/small: .*--public"):
        send(folder)
    hub.repos.clear()
    send(folder)
    send(folder, public=True)
    assert not hub.repos["me/small"]["private"]


@pytest.mark.parametrize("path", ["/create$", "/preupload/", "/batch$", "/commit/"])
def test_a_busy_hub_is_tried_again(hub, folder, capsys, path):
    """After the pause that it asks for, else after ours, which grow; each try but the last is a warning."""
    bad = [(429, "7"), (500, ""), (503, "3"), (0, ""), (502, ""), (412, "")]
    hub.bad_minutes = [(path, *minute) for minute in bad]
    pauses = Pauses()
    assert send(folder, stopped=pauses) == f"{hub.url}/me/small"
    assert hub.repos["me/small"]["branches"]["main"] == contents(folder)
    assert pauses.seconds == [7.0, 10.0, 3.0, 20.0, 40.0, 80.0]
    err = capsys.readouterr().err
    assert err.count("warning: ") == len(bad)
    assert "answers 429 (a bad minute); the next try is in 7 s" in err and "can't be reached" in err
    no_token(folder.parent, err)


def test_a_hub_that_stays_busy_may_be_tried_later(hub, folder):
    """Code 75 lets a supervisor start the same command again."""
    hub.refuse = "/create", 503, "a bad hour"
    pauses = Pauses()
    with pytest.raises(push.HubBusyError, match=r"--push=me/small: .* 503 \(a bad hour\)") as error:
        send(folder, patience=31.0, stopped=pauses)
    assert error.value.code == 75 and pauses.seconds == [10.0, 20.0]


@pytest.mark.parametrize(
    ("path", "code", "answer", "words"),
    [
        ("/create", 403, "You don't have the rights", "may not write there (You don't have"),
        ("/batch", 403, f"Storage is full, Bearer {TOKEN}", "Storage is full, Bearer (the token)"),
        ("/validate-yaml", 400, "bad card", "400"),
        ("/create", 401, "Invalid username or password.", "401: the token is not valid there"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence_at_once(hub, folder, path, code, answer, words):
    hub.refuse = path, code, answer
    pauses = Pauses()
    with pytest.raises(InputError) as error:
        send(folder, stopped=pauses)
    assert words in str(error.value) and hub.url in str(error.value) and pauses.seconds == []


def test_offline_is_a_refusal(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    reset_sessions()
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        send(folder)


def test_a_start_is_refused_by_a_refusal_alone(hub, capsys, monkeypatch):
    """A Hub that is busy, gone, or silent is a warning with the answer's code."""
    for code, shown in ((429, "answers 429"), (503, "answers 503"), (0, "can't be reached")):
        hub.bad_minutes = [("/create", code, "")]
        push.try_out("me/small")
        err = capsys.readouterr().err
        assert err.startswith("warning: config.hub.name=me/small: ") and shown in err
    push.try_out("me/small")
    assert capsys.readouterr().err == "" and hub.repos["me/small"]["private"]
    hub.repos["me/small"]["private"] = False
    with pytest.raises(InputError, match=r"config\.hub\.name=me/small: .*public"):
        push.try_out("me/small")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(push, "ANSWER", 0.2)
        push.try_out("me/small")
    assert "no answer in 0.2 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--push=me/my model"], "--push=me/my model: "),
        (["--public"], "--public, --revision: need --push"),
        (["--revision=step-4"], "--public, --revision: need --push"),
        (["--push=me/small", "--revision=a/../b"], "--revision=a/../b: "),
        (["--milestones", "--to=x"], "--milestones: "),
        (["--config.train.steps=3"], "--config.train.steps"),
    ],
)
def test_the_command_refuses_before_it_works(
    hub, trained_workdir, capsys, monkeypatch, flags, words
):
    command = ["export", f"--workdir={trained_workdir.root}"]
    refuse([*command, *flags], 2, words, capsys=capsys)
    monkeypatch.setattr(push, "get_token", lambda: None)
    refuse([*command, "--push=me/small"], 2, "HF_TOKEN", capsys=capsys)
    assert hub.sent == [] and not trained_workdir.export.exists()


@pytest.mark.standard
def test_each_milestone_is_pushed_to_its_own_revision(hub, family, tmp_path, capsys, monkeypatch):
    """One command, which leaves no token in any file or line; and a run that kept none says so."""
    monkeypatch.setattr(export, "check_files", lambda *_: [])  # which other tests hold
    workdir = pathlib.Path(shutil.copytree(str(family.root), tmp_path / "run"))
    command = ["export", f"--workdir={workdir}", "--milestones", "--push=me/small"]
    assert __main__.main(command) == 0
    out, err = capsys.readouterr()
    no_token(tmp_path, out, err)
    address = f"{hub.url}/me/small/tree/step-"
    assert out.split() == [
        f"{start}{step}" for step in (4, 8) for start in (f"{workdir}/export-", address)
    ]
    branches = hub.repos["me/small"]["branches"]
    assert branches == {"main": {}} | {
        f"step-{step}": contents(workdir / f"export-{step}") for step in (4, 8)
    }
    for meta in workdir.glob("checkpoints/*/meta/metadata"):
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"milestones": []}))
    refuse(command[:-1], 2, "--milestones: ", capsys=capsys)
