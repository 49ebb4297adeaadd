"""`export --push` against a stand-in for the Hub: what arrives, what isn't sent twice, and that no token is shown."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import requests

from mlm.errors import InputError
from mlm.export import push
from tests import ROOT
from tests.export.hub_stand_in import Hub, serving

pytestmark = pytest.mark.standard

TOKEN = "hf_canaryDoNotShowThisTokenAnywhere"
CARD = "---\nlibrary_name: transformers\n---\n\n# A model\n"
PUSH = """
import sys
from mlm.errors import StopError
from mlm.export import push
from mlm.paths import UPath
try:
    revision = sys.argv[-1] if sys.argv[-1].startswith("step-") else ""
    print(push.push(UPath(sys.argv[1]), sys.argv[2], public="--public" in sys.argv, revision=revision))
except StopError as error:
    print(f"mlm export: {error}", file=sys.stderr)
    sys.exit(error.code)
assert not {"jax", "tensorflow", "torch"} & set(sys.modules), "heavy imports"
"""


@pytest.fixture
def hub():
    with serving(TOKEN) as hub:
        yield hub


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """Files as an export has them: two large ones, and small ones."""
    folder = tmp_path / "run" / "export"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    (folder / "flax_model.msgpack").write_bytes(rng.bytes(300_000))
    (folder / "model.safetensors").write_bytes(rng.bytes(200_000))
    (folder / "proof.safetensors").write_bytes(rng.bytes(1_000))
    (folder / "README.md").write_text(CARD)
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    (folder / ".hidden").write_text("not of the export")
    return folder


def environment(hub: Hub | str, home: pathlib.Path, token: str = TOKEN) -> dict[str, str]:
    url = hub if isinstance(hub, str) else hub.url
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    return env | ({"HF_TOKEN": token} if token else {})


def start(hub: Hub | str, folder: pathlib.Path, *arguments: str, token: str = TOKEN) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PUSH, str(folder), *arguments],
        cwd=folder.parent,
        env=environment(hub, folder.parent, token),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments, code: int = 0, **settings) -> tuple[str, str]:
    """Returns (stdout, stderr) of a push; no output and no file that it left may hold the token."""
    process = start(*arguments, **settings)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err, err
    no_token(arguments[1].parent, out, err)
    return out, err


def no_token(root: pathlib.Path, *outputs: str) -> None:
    assert not any(TOKEN in text for text in outputs)
    files = [path for path in root.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def sentence(err: str) -> str:
    """The one sentence in which a refusal ends; progress may come before it."""
    (line,) = (line for line in err.splitlines() if line.startswith("mlm export: "))
    return line


def digest(file: pathlib.Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def objects(hub: Hub) -> list[str]:
    return [line.removeprefix("object ") for line in hub.sent if line.startswith("object ")]


def test_everything_arrives_in_one_commit_privately(hub, folder):
    out, err = run(hub, folder, "me/small")
    assert out.strip() == f"{hub.url}/me/small"
    repo = hub.repos["me/small"]
    assert repo["private"] is True
    assert repo["files"] == {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".hidden"}
    assert [line for line in hub.sent if "/commit/" in line] == ["POST /api/models/me/small/commit/main"]
    assert "push: 2 of 5: config.json" in err and "push: 3 of 5: flax_model.msgpack, 0.3 MB" in err
    assert {path.name for path in folder.iterdir()} == {*repo["files"], ".hidden"}, "the export is as it was"


def test_a_push_that_was_killed_in_mid_upload_does_not_send_again_what_arrived(hub, folder):
    hub.stall = digest(folder / "model.safetensors")  # the second of the large ones
    process = start(hub, folder, "me/small")
    assert hub.stalled.wait(60)
    process.kill()
    out, err = process.communicate()
    no_token(folder.parent, out, err)
    assert objects(hub) == [digest(folder / "flax_model.msgpack")]
    assert hub.repos["me/small"]["files"] == {}, "half a model was shown"
    hub.stall = ""
    hub.sent.clear()
    run(hub, folder, "me/small")
    assert objects(hub) == [digest(folder / name) for name in ("model.safetensors", "proof.safetensors")]
    assert len(hub.repos["me/small"]["files"]) == 5


def test_a_second_push_sends_what_changed_alone(hub, folder):
    run(hub, folder, "me/small")
    hub.sent.clear()
    run(hub, folder, "me/small")
    assert not objects(hub) and not [line for line in hub.sent if "/commit/" in line]
    (folder / "model.safetensors").write_bytes(b"trained on")
    run(hub, folder, "me/small")
    assert objects(hub) == [digest(folder / "model.safetensors")]
    assert hub.repos["me/small"]["files"]["model.safetensors"] == b"trained on"


def test_public_when_asked_and_never_by_accident(hub, folder):
    run(hub, folder, "me/open", "--public")
    assert hub.repos["me/open"]["private"] is False
    _, err = run(hub, folder, "me/open", code=2)
    assert "that repository is public; add --public, or name another" in sentence(err)
    run(hub, folder, "me/small")
    run(hub, folder, "me/small", "--public")
    assert hub.repos["me/small"]["private"] is False


def test_a_revision_is_a_branch_of_its_own(hub, folder):
    """Made before anything is sent to it, and again it is taken as it is."""
    out, _ = run(hub, folder, "me/small", "step-4")
    assert out.strip() == f"{hub.url}/me/small/tree/step-4"
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".hidden"}
    branches = hub.repos["me/small"]["branches"]
    assert branches == {"main": {}, "step-4": files}
    (folder / "config.json").write_text("{}")
    run(hub, folder, "me/small", "step-4")
    run(hub, folder, "me/small")
    assert branches["step-4"]["config.json"] == branches["main"]["config.json"] == b"{}"
    assert branches.keys() == {"main", "step-4"}


def test_the_stand_in_refuses_a_revision_that_is_not_there(hub, folder):
    """As the Hub does, so that a push that makes no branch can't pass here."""
    run(hub, folder, "me/small")

    def post(path: str) -> requests.Response:
        return requests.post(
            f"{hub.url}/api/models/me/small/{path}", headers={"Authorization": f"Bearer {TOKEN}"}, json={}
        )

    for what in ("preupload", "commit"):
        assert (found := post(f"{what}/step-8")).status_code == 404
        assert found.headers["X-Error-Code"] == "RevisionNotFound"
    assert [post("branch/step-8").status_code for _ in range(2)] == [200, 409]


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        (("/create", 403, "You don't have the rights"), "refused with 403: the token may not write there (You don't"),
        (("/commit/", 429, "Too many requests"), "refused with 429 (Too many requests); start the same command again"),
        (("/batch", 403, f"Your storage is full, Bearer {TOKEN}"), "Your storage is full, Bearer (the token)"),
        (("/validate-yaml", 400, "bad card"), "refused with 400"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(hub, folder, refuse, words):
    hub.refuse = refuse
    _, err = run(hub, folder, "me/small", code=2)
    assert words in sentence(err)
    assert hub.url in sentence(err)


def test_no_network_a_wrong_token_and_no_sense(hub, folder):
    _, err = run("http://127.0.0.1:9", folder, "me/small", code=2)
    assert "http://127.0.0.1:9 can't be reached (ConnectionError)" in sentence(err)
    _, err = run(hub, folder, "me/small", token="hf_expired", code=2)
    assert "refused with 401: the token is not valid there" in sentence(err)
    assert "hf_expired" not in err


def test_the_command_refuses_before_it_works(hub, tmp_path):
    """No token, a name that is none: code 2, within the time that importing jax takes."""
    (tmp_path / "run").mkdir()
    for arguments, token, words in [
        (["--push=me/small"], "", "there is no token of the Hugging Face Hub"),
        (["--push=small"], TOKEN, "name the repository with its user"),
        (["--push=me/my model"], TOKEN, "name the repository with its user"),
        (["--public"], TOKEN, "--public needs --push"),
        (["--revision=step-4"], TOKEN, "--revision needs --push"),
        (["--push=me/small", "--revision=a/../b"], TOKEN, "--revision=a/../b: must be letters, digits"),
        (
            ["--push=me/small", "--revision=x", "--milestones"],
            TOKEN,
            "--milestones: names the steps and their branches",
        ),
        (["--milestones", "--step=4"], TOKEN, "--milestones: names the steps and their branches"),
    ]:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "mlm", "export", f"--workdir={tmp_path / 'run'}", *arguments],
            env=environment(hub, tmp_path, token),
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2, done.stderr
        assert words in sentence(done.stderr)
        assert "|                jax\n" not in done.stderr and "| jax\n" not in done.stderr
    assert hub.sent == []


def test_offline_is_said(folder, monkeypatch):
    """HF_HUB_OFFLINE is set in the tests themselves."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        push.push(folder, "me/small", public=False)


@pytest.mark.slow
def test_export_pushes_what_it_wrote(hub, trained_workdir, tmp_path):
    """The whole command: no token is left in any file or line."""
    workdir = pathlib.Path(shutil.copytree(trained_workdir.root, tmp_path / "run"))
    command = [sys.executable, "-m", "mlm", "export", f"--workdir={workdir}", "--push=me/small"]
    done = subprocess.run(command, env=environment(hub, tmp_path), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    no_token(tmp_path, done.stdout, done.stderr)
    assert done.stdout.split() == [str(workdir / "export"), f"{hub.url}/me/small"]
    assert hub.repos["me/small"]["files"] == {p.name: p.read_bytes() for p in (workdir / "export").iterdir()}


@pytest.mark.slow
def test_each_milestone_is_pushed_to_its_own_revision(hub, family, tmp_path):
    """One command; and a run that kept none says so."""
    workdir = pathlib.Path(shutil.copytree(str(family.root), tmp_path / "run"))
    command = [sys.executable, "-m", "mlm", "export", f"--workdir={workdir}", "--milestones", "--push=me/small"]
    done = subprocess.run(command, env=environment(hub, tmp_path), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pairs = [(workdir / f"export-{step}", f"{hub.url}/me/small/tree/step-{step}") for step in (4, 8)]
    assert done.stdout.split() == [str(each) for pair in pairs for each in pair]
    branches = hub.repos["me/small"]["branches"]
    assert branches.keys() == {"main", "step-4", "step-8"} and branches["main"] == {}
    for folder, address in pairs:
        assert branches[address.rpartition("/")[2]] == {p.name: p.read_bytes() for p in folder.iterdir()}
    assert branches["step-4"]["model.safetensors"] != branches["step-8"]["model.safetensors"]
    shutil.rmtree(workdir / "checkpoints" / "12")
    for step in (4, 8):
        meta = workdir / "checkpoints" / str(step) / "meta" / "metadata"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"milestones": []}))
    done = subprocess.run(command[:-1], env=environment(hub, tmp_path), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no milestone was kept" in sentence(done.stderr)
