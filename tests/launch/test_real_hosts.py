"""The quickstart on four real hosts: by the bare line on each, and by launch/tpu.py through all that befalls a pod.

gcloud is the real one, where it is installed, and asks the TPU API of tests/launch/tpu_api; otherwise the stand-in
plays, and the name of the test says so. ssh is the real one, between real addresses, with the keys that gcloud makes
and gives to the TPU; what a TPU VM's metadata server says is played. The hosts reach one another and nothing else, so
they are given this interpreter's packages (`python` of pod.toml) instead of installing.
"""

import contextlib
import os
import pathlib
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests import QUICK_COMPILE, ROOT
from tests.launch.pod_network import NETWORK, Hosts
from tests.launch.tpu_api import server
from tests.launch.tpu_api.model import Cloud
from tests.support.metadata_server import MetadataServer, tpu_vm
from tests.support.processes import logged_step
from tests.support.states import assert_same, state_of

pytestmark = pytest.mark.hosts

COUNT = 4
STEPS = 100
CANARY = f"canary-{secrets.token_hex(8)}"
KEYS = f"/usr/bin/env {sys._base_executable} -S -E {ROOT / 'tests' / 'launch' / 'tpu_api' / 'ssh_keys.py'} {{state}} %u"
HOSTILE = 'it\'s $(touch $HOME/hacked) "ü" `id`'
POD = """name = "real"
project = "nobody"
zone = "us-central2-b"
accelerator_type = "v4-32"
price = 1.0
python = "{python}"
"""
SETTINGS = [
    "tokenizer.sample_megabytes=1.0",
    "corpus.max_documents=4000",
    "corpus.validation_groups=absl-py",
    "corpus.validation_fraction=0.04",
    f"train.steps={STEPS}",
    "checkpoint.every=20",
    "evaluate.every=0",
    "log.every=5",
    "pod.heartbeat=10",
]
LINE = "cd mlm && .venv/bin/python -m mlm run --config=configs/quickstart.py --workdir={workdir} {settings}"


class MachineRoom(Cloud):
    """The TPU API, whose one TPU is made of our hosts."""

    def __init__(self, state: pathlib.Path, hosts: Hosts):
        super().__init__(state)
        self.hosts = hosts

    def begin_hosts(self, name: str, addresses: list[str]) -> None:
        """Starts the hosts, as new machines."""
        for index in range(len(addresses)):
            self.hosts.start(index)

    def end_hosts(self, name: str, keep_disks: bool) -> None:
        """Pulls all plugs."""
        for index in range(COUNT):
            self.hosts.kill(index)


class Laptop:
    """A clone of the code, and gcloud in an account of its own."""

    def __init__(self, folder: pathlib.Path, cloud: MachineRoom, address: str):
        self.folder = folder
        self.cloud = cloud
        self.code = folder / "laptop"
        subprocess.run(["git", "clone", "--quiet", ROOT, self.code], check=True)
        patch = subprocess.run(
            ["git", "diff", "HEAD", "--binary"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        if patch:
            subprocess.run(["git", "apply"], cwd=self.code, input=patch, check=True)
        (self.code / ".venv").symlink_to(pathlib.Path(sys.prefix))
        (self.code / "pod.toml").write_text(POD.format(python=sys.executable))
        self.environment = server.environment(address, folder / "home") | {"WANDB_API_KEY": CANARY}

    def tpu(self, *words: str, code: int = 0) -> str:
        """Runs launch/tpu.py, shows what it has said, and returns it."""
        print(f"\n$ python launch/tpu.py {' '.join(words)}", flush=True)
        line = [sys.executable, "launch/tpu.py", *words]
        pipe = subprocess.PIPE
        same = subprocess.STDOUT
        done = subprocess.run(
            line, cwd=self.code, env=self.environment, stdout=pipe, stderr=same, text=True
        )
        print(done.stdout, flush=True)
        assert done.returncode == code
        return done.stdout

    def on_each_host(self, line: str) -> list[str]:
        """Runs a line on each host by plain ssh, all at once, and returns what each said; all must end with 0."""
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        hosts = self.cloud.hosts
        started = []
        for index in range(COUNT):
            (hosts.home(index) / "mlm").symlink_to(self.code)
            started.append(subprocess.Popen(hosts.ssh(index, line), **pipes))
        said = [process.communicate(timeout=600)[0] for process in started]
        assert [process.returncode for process in started] == [0] * COUNT, "\n".join(said)
        return said


@pytest.fixture
def laptop(tmp_path_factory) -> Laptop:
    folder = tmp_path_factory.mktemp("pod")
    addresses = [f"{NETWORK}.{index + 1}" for index in range(COUNT)]
    # once for all runs
    compiled = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    with contextlib.ExitStack() as stack:
        variables = []
        for index in range(COUNT):
            metadata = stack.enter_context(MetadataServer(tpu_vm(addresses, index), at="0.0.0.0"))
            port = metadata.address.rpartition(":")[2]
            variables.append(
                compiled | {"GCE_METADATA_IP": f"{NETWORK}.254:{port}", "XLA_FLAGS": QUICK_COMPILE}
            )
        keys = KEYS.format(state=folder / "cloud")
        hosts = stack.enter_context(Hosts(folder / "hosts", variables, keys))
        cloud = MachineRoom(folder / "cloud", hosts)
        cloud.settings(addresses=hosts.addresses)
        yield Laptop(folder, cloud, stack.enter_context(server.serving(cloud)))


def at_step(workdir: pathlib.Path, step: int, then: Callable[[], object]) -> threading.Thread:
    """Does something once a run is at a step; returns the thread that waits for it."""

    def wait() -> None:
        while logged_step(workdir) < step:
            time.sleep(0.2)
        then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_quickstart_over_four_hosts(laptop, tmp_path):
    """A run is stopped, loses a host, then the whole pod, and ends with the bits of the run that nothing happened to.

    That one is the bare line's, which is told nothing of hosts. Hostile words arrive as they are, and a secret is
    written nowhere.
    """
    whole = tmp_path / "whole"
    killed = tmp_path / HOSTILE.replace("/", "")
    settings = [f"--config.{setting}" for setting in SETTINGS]
    laptop.tpu("up", "--every=0.5")
    laptop.tpu("sync", "--timeout=900")
    assert "ready: 4 hosts" in laptop.tpu("preflight")

    said = laptop.on_each_host(LINE.format(workdir=whole, settings=" ".join(settings)))
    for index, text in enumerate(said):
        assert (
            f"process {index} of {COUNT}, process 0 at {NETWORK}.1 (from the TPU VM's metadata)"
            in text
        )

    run = [
        "configs/quickstart.py",
        *settings,
        f"--workdir={killed}",
        f"--id={HOSTILE}",
        "--env=WANDB_API_KEY",
    ]
    laptop.tpu("run", *run, "--detach", "--timeout=120")
    assert laptop.tpu("status", HOSTILE).count("running") == COUNT
    at_step(killed, 5, lambda: None).join(300)
    laptop.tpu("stop", HOSTILE, "--timeout=120")
    assert "exit code 75" in laptop.tpu("status", HOSTILE)
    assert "step" in laptop.tpu("logs", HOSTILE, code=75)

    stopped = logged_step(killed)
    at_step(killed, stopped + 10, lambda: laptop.cloud.hosts.kill(2))
    at_step(killed, stopped + 30, lambda: laptop.cloud.preempt("real"))
    said = laptop.tpu("supervise", *run, "--every=5", "--timeout=15")
    assert [f"attempt {number} started" in said for number in (1, 2, 3, 4, 5)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert "the pod is PREEMPTED" in said and logged_step(killed) == STEPS
    assert "has ended" in laptop.tpu("run", *run)
    for folder in (whole, killed):
        assert (folder / "export" / "model.safetensors").is_file()
    assert (killed / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert_same(state_of(killed, STEPS), state_of(whole, STEPS))

    assert files_with(CANARY, laptop.folder, tmp_path) == []
    assert [
        path for index in range(COUNT) for path in laptop.cloud.hosts.home(index).glob("hacked*")
    ] == []
    laptop.tpu("down")
    assert laptop.cloud.all("nodes") == {}


def files_with(text: str, *folders: pathlib.Path) -> list[str]:
    """Returns the files below the folders that hold a text, in their content or their name."""
    found = subprocess.run(["grep", "-rlaF", text, *folders], capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stderr
    names = [str(path) for folder in folders for path in folder.rglob("*") if text in path.name]
    return found.stdout.splitlines() + names
