"""`export --push` against a stand-in for the Hub: what arrives, what isn't sent twice, and that no token is shown."""

import hashlib
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
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
    rng = np.random.default_rng(0)
    for name, size in (("flax_model.msgpack", 300_000), ("model.safetensors", 200_000), ("proof.safetensors", 1_000)):
        (folder / name).write_bytes(rng.bytes(size))
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# A model\n")
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    (folder / ".hidden").write_text("not of the export")
    return folder


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".hidden"}


def no_token(root: pathlib.Path, *outputs: str) -> None:
    """No output and no file that was left may hold the token."""
    assert not any(TOKEN in text for text in outputs)
    files = [path for path in root.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_everything_arrives_in_one_commit_privately(hub, folder, capsys):
    assert push.push(folder, "me/small", public=False) == f"{hub.url}/me/small"
    repo = hub.repos["me/small"]
    assert repo["private"] is True
    assert repo["branches"] == {"main": contents(folder)}
    assert [line for line in hub.sent if "/commit/" in line] == ["POST /api/models/me/small/commit/main"]
    out, err = capsys.readouterr()
    assert "2 of 5: config.json" in err and "3 of 5: flax_model.msgpack, 0.3 MB" in err
    no_token(folder.parent, out, err)


def test_what_has_arrived_is_not_sent_again(hub, folder):
    """By a push that comes after one that broke off, and by one of a model that has changed."""

    def sent() -> list[str]:
        return [line.rpartition("/")[2] for line in hub.sent if line.startswith("PUT /lfs/")]

    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    hub.refuse = digests["model.safetensors"], 403, "full"  # the second of the large ones
    with pytest.raises(InputError):
        push.push(folder, "me/small", public=False)
    assert hub.repos["me/small"]["branches"] == {"main": {}}, "half a model was shown"
    hub.refuse = None
    hub.sent.clear()
    push.push(folder, "me/small", public=False)
    assert sent() == [digests[name] for name in ("model.safetensors", "proof.safetensors")]
    hub.sent.clear()
    (folder / "model.safetensors").write_bytes(b"trained on")
    push.push(folder, "me/small", public=False)
    assert sent() == [hashlib.sha256(b"trained on").hexdigest()]
    assert hub.repos["me/small"]["branches"]["main"] == contents(folder)


def test_public_when_asked_and_never_by_accident(hub, folder):
    push.push(folder, "me/open", public=True)
    assert hub.repos["me/open"]["private"] is False
    with pytest.raises(InputError, match=r"--push=me/open: .*--public"):
        push.push(folder, "me/open", public=False)
    push.push(folder, "me/small", public=False)
    push.push(folder, "me/small", public=True)
    assert hub.repos["me/small"]["private"] is False


def test_a_revision_is_a_branch_of_its_own(hub, folder):
    """Made before anything is sent to it, and again it is taken as it is."""
    assert push.push(folder, "me/small", public=False, revision="step-4") == f"{hub.url}/me/small/tree/step-4"
    branches = hub.repos["me/small"]["branches"]
    assert branches == {"main": {}, "step-4": contents(folder)}
    (folder / "config.json").write_text("{}")
    push.push(folder, "me/small", public=False, revision="step-4")
    push.push(folder, "me/small", public=False)
    assert branches["step-4"]["config.json"] == branches["main"]["config.json"] == b"{}"
    assert branches.keys() == {"main", "step-4"}


@pytest.mark.standard
def test_a_process_that_only_pushes_ends_with_one_sentence(folder, monkeypatch):
    """As it is started for the config and the tokenizer of a run."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    command = [sys.executable, "-m", "mlm.export.push", str(folder), "me/small", "A message"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == "--push: HF_HUB_OFFLINE is set; unset it to reach the Hub.\n"


@pytest.mark.parametrize(
    ("path", "code", "answer", "words"),
    [
        ("/create", 403, "You don't have the rights", "403: the token may not write there (You don't"),
        ("/batch", 403, f"Your storage is full, Bearer {TOKEN}", "Your storage is full, Bearer (the token)"),
        ("/validate-yaml", 400, "bad card", "400"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(hub, folder, path, code, answer, words):
    hub.refuse = path, code, answer
    with pytest.raises(InputError) as error:
        push.push(folder, "me/small", public=False)
    assert words in str(error.value) and hub.url in str(error.value)


def test_no_network_and_a_wrong_token(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(InputError, match="401: the token") as error:
        push.push(folder, "me/small", public=False)
    assert "hf_expired" not in str(error.value)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"http://127\.0\.0\.1:9 can't be reached"):
        push.push(folder, "me/small", public=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    reset_sessions()
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        push.push(folder, "me/small", public=False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--push=me/my model"], "--push=me/my model: "),
        (["--public"], "--public needs --push"),
        (["--revision=step-4"], "--revision needs --push"),
        (["--push=me/small", "--revision=a/../b"], "--revision=a/../b: "),
        (["--push=me/small", "--revision=x", "--milestones"], "--milestones: "),
        (["--milestones", "--step=4"], "--milestones: "),
        (["--milestones", "--to=x"], "--milestones: "),
    ],
)
def test_the_command_refuses_before_it_works(hub, trained_workdir, capsys, monkeypatch, flags, words):
    command = ["export", f"--workdir={trained_workdir.root}"]
    refuse([*command, *flags], 2, words, capsys=capsys)
    monkeypatch.setattr(push, "get_token", lambda: None)
    refuse([*command, "--push=me/small"], 2, "HF_TOKEN", capsys=capsys)
    assert hub.sent == [] and not trained_workdir.export.exists()


@pytest.mark.standard
def test_each_milestone_is_pushed_to_its_own_revision(hub, family, tmp_path, capsys, monkeypatch):
    """One command, which leaves no token in any file or line; and a run that kept none says so."""
    monkeypatch.setattr(export, "check_files", lambda *_: None)  # which other tests hold
    workdir = pathlib.Path(shutil.copytree(str(family.root), tmp_path / "run"))
    command = ["export", f"--workdir={workdir}", "--milestones", "--push=me/small"]
    assert __main__.main(command) == 0
    out, err = capsys.readouterr()
    no_token(tmp_path, out, err)
    pairs = [(workdir / f"export-{step}", f"{hub.url}/me/small/tree/step-{step}") for step in (4, 8)]
    assert out.split() == [str(printed) for pair in pairs for printed in pair]
    branches = hub.repos["me/small"]["branches"]
    assert branches.keys() == {"main", "step-4", "step-8"} and branches["main"] == {}
    for folder, address in pairs:
        assert branches[address.rpartition("/")[2]] == contents(folder)
    assert branches["step-4"]["model.safetensors"] != branches["step-8"]["model.safetensors"]
    shutil.rmtree(workdir / "checkpoints" / "12")
    for step in (4, 8):
        meta = workdir / "checkpoints" / str(step) / "meta" / "metadata"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"milestones": []}))
    refuse(command[:-1], 2, "--milestones: ", capsys=capsys)
