"""The quickstart on four real hosts, started, killed, and brought to its end by launch/tpu.py.

gcloud is played by tests/fake_gcloud; its ssh is the real one, between real addresses. The hosts reach one
another and nothing else, so they are given this interpreter's packages (`python` of pod.toml) instead of installing.
"""

import json
import os
import pathlib
import secrets
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from mlm.paths import UPath
from mlm.pretrained import checkpoint_files
from mlm.training.sharding import named_leaves
from tests.pod_network import Hosts
from tests.processes import ROOT, logged_step

pytestmark = pytest.mark.hosts

COUNT = 4
STEPS = 240
CANARY = f"canary-{secrets.token_hex(8)}"
HOSTILE = 'it\'s $(touch $HOME/hacked) "ü" `id`'
POD = """name = "real"
project = "nobody"
zone = "us-central2-b"
accelerator_type = "v4-32"
price = 1.0
python = "{python}"
"""
SETTINGS = [
    "tokenizer.sample_megabytes=2.0",
    "corpus.max_documents=8000",
    "corpus.validation_groups=absl-py",
    f"train.steps={STEPS}",
    "checkpoint.every=40",
    "evaluate.every=0",
    "log.every=10",
    "pod.heartbeat=20",
]


class Laptop:
    """A clone of the code, a fake gcloud, and a machine room that starts and ends hosts as the cloud says."""

    def __init__(self, folder: pathlib.Path, hosts: Hosts):
        self.folder, self.hosts, self.state = folder, hosts, folder / "cloud"
        self.code = folder / "laptop"
        self.state.mkdir()
        subprocess.run(["git", "clone", "--quiet", ROOT, self.code], check=True)
        patch = subprocess.run(["git", "diff", "HEAD", "--binary"], cwd=ROOT, capture_output=True, check=True).stdout
        if patch:
            subprocess.run(["git", "apply"], cwd=self.code, input=patch, check=True)
        (self.code / "pod.toml").write_text(POD.format(python=sys.executable))
        options = hosts.ssh_options()
        words = {"hosts": hosts.addresses, "identity": str(hosts.key), "user": "root", "options": options}
        (folder / "ssh.json").write_text(json.dumps(words))
        (self.state / "settings.json").write_text(json.dumps({"retry_seconds": 0.2}))
        self._closed = threading.Event()
        self._room = threading.Thread(target=self._machine_room)
        self._room.start()

    def close(self) -> None:
        """Ends the machine room: from here on nobody but the caller starts or ends hosts."""
        self._closed.set()
        self._room.join()

    def environment(self) -> dict[str, str]:
        path = f"{ROOT / 'tests' / 'fake_gcloud'}:{os.environ['PATH']}"
        names = {"FAKE_GCLOUD_STATE": str(self.state), "FAKE_GCLOUD_SSH": str(self.folder / "ssh.json"), "PATH": path}
        names["WANDB_API_KEY"] = CANARY
        return {**os.environ, **names}

    def tpu(self, *words: str, code: int = 0) -> str:
        """Runs launch/tpu.py, shows what it shows, and returns it."""
        command = [sys.executable, "launch/tpu.py", *words]
        begin = time.monotonic()
        print(f"\n$ python launch/tpu.py {' '.join(words)}", flush=True)
        process = subprocess.Popen(
            command, cwd=self.code, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said = []
        with process.stdout as lines:
            for line in lines:
                print(line, end="", flush=True)
                said.append(line)
        assert process.wait() == code, "".join(said)
        print(f"({time.monotonic() - begin:.0f} s)", flush=True)
        return "".join(said)

    def _machine_room(self) -> None:
        """Hosts of a deleted TPU are gone; those of a new one are new."""
        seen, file = 0, self.state / "calls.jsonl"
        while not self._closed.wait(0.2):
            calls = [json.loads(line)["argv"] for line in file.read_text().splitlines()] if file.exists() else []
            for argv in calls[seen:]:
                for index in range(COUNT):
                    if "delete" in argv:
                        self.hosts.kill(index)
                    if "create" in argv:
                        self.hosts.kill(index)
                        self.hosts.start(index)
            seen = len(calls)


@pytest.fixture(scope="module")
def laptop(tmp_path_factory) -> Laptop:
    folder = tmp_path_factory.mktemp("pod")
    with Hosts(folder / "hosts", COUNT) as hosts:
        laptop = Laptop(folder, hosts)
        yield laptop
        laptop.close()


def saved_state(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the whole state that the last checkpoint holds."""
    assert checkpoint_files.complete_steps(UPath(workdir / "checkpoints"))[-1] == STEPS
    folder = workdir / "checkpoints" / str(STEPS) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        like = checkpointer.metadata(folder).item_metadata.tree
        as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
        state = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_arrays))
    return dict(named_leaves(state))


def test_quickstart_over_four_hosts_one_of_which_dies(laptop, tmp_path):
    """Bitwise the run that nothing happened to; hostile words arrive as they are, and a secret is written nowhere."""
    killed, whole = tmp_path / "killed", tmp_path / HOSTILE.replace("/", "")
    settings = [f"--config.{setting}" for setting in SETTINGS]
    follow = ["--every=2", "--timeout=120"]
    laptop.tpu("up", "--every=0.5")
    laptop.tpu("sync", "--timeout=900")
    assert "ready: 4 hosts" in laptop.tpu("preflight")
    data = ["configs/quickstart.py", *settings, f"--workdir={killed}"]
    laptop.tpu("run", *data, "--id=data", "--command=shards", *follow)

    def pull_the_plug() -> None:
        while logged_step(killed) < 60:
            time.sleep(0.2)
        print("\n(the plug of host 2 is pulled)", flush=True)
        laptop.hosts.kill(2)

    threading.Thread(target=pull_the_plug, daemon=True).start()
    train = ["configs/quickstart.py", *settings, f"--config.shards.dir={killed / 'shards'}", "--env=WANDB_API_KEY"]
    said = laptop.tpu("supervise", *train, "--id=killed", f"--workdir={killed}", "--silent=2", *follow)
    assert "attempt 2 started" in said
    laptop.tpu("run", *train, f"--id={HOSTILE}", f"--workdir={whole}", "--command=train", *follow)
    assert (killed / "export" / "model.safetensors").is_file()
    assert "exit code 0" in laptop.tpu("status", HOSTILE)
    assert (killed / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    one, other = saved_state(killed), saved_state(whole)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)

    assert files_with(CANARY, laptop.folder, tmp_path) == []
    assert [path for index in range(COUNT) for path in laptop.hosts.home(index).glob("hacked*")] == []
    laptop.tpu("down")


def files_with(text: str, *folders: pathlib.Path) -> list[str]:
    """Returns the files below the folders that hold a text, in their content or their name."""
    found = subprocess.run(["grep", "-rlaF", text, *folders], capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stderr
    names = [str(path) for folder in folders for path in folder.rglob("*") if text in path.name]
    return found.stdout.splitlines() + names
