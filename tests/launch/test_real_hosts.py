"""The quickstart on four real hosts: by the bare line on each, and by launch/tpu.py through all that befalls a pod.

gcloud is the real one, where it is installed, and asks the TPU API of tests/launch/tpu_api; otherwise the stand-in
plays, and the name of the test says so. ssh is the real one, between real addresses, with the keys that gcloud makes
and gives to the TPU; what a TPU VM's metadata server says is played. The hosts reach one another and nothing else, so
they are given this interpreter's packages (`python` of pod.toml) instead of installing.
"""

import contextlib
import os
import pathlib
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
RUN = "run-1"
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

    def __init__(self, keys: pathlib.Path, hosts: Hosts):
        super().__init__()
        self.keys = keys
        self.hosts = hosts
        self.addresses = hosts.addresses

    def request(self, *words, **more) -> dict:
        """Leaves the keys of the TPU's metadata where Google's agent on a host has them."""
        answer = super().request(*words, **more)
        metadata = [node.get("metadata", {}) for node in self.nodes.values()]
        self.keys.write_text("\n".join(one.get("ssh-keys", "") for one in metadata))
        return answer

    def begin_hosts(self, name: str, count: int) -> None:
        """Starts the hosts, as new machines."""
        for index in range(count):
            self.hosts.start(index)

    def end_hosts(self, name: str) -> None:
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
        self.environment = server.environment(address, folder / "home")

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
        keys = folder / "keys"
        hosts = stack.enter_context(
            Hosts(folder / "hosts", variables, f"/bin/sed -n s/^%u://p {keys}")
        )
        cloud = MachineRoom(keys, hosts)
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

    That one is the bare line's, which is told nothing of hosts.
    """
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    settings = [f"--config.{setting}" for setting in SETTINGS]
    laptop.tpu("up")
    assert "ready: 4 hosts" in laptop.tpu("sync")

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
        f"--id={RUN}",
    ]
    laptop.tpu("run", *run, "--detach")
    assert laptop.tpu("status", RUN).count("running") == COUNT
    at_step(killed, 5, lambda: None).join(300)
    laptop.tpu("stop", RUN)
    assert "exit code 75" in laptop.tpu("status", RUN)
    assert "step" in laptop.tpu("logs", RUN, code=75)

    stopped = logged_step(killed)
    at_step(killed, stopped + 10, lambda: laptop.cloud.hosts.kill(2))
    at_step(killed, stopped + 30, lambda: laptop.cloud.preempt("real"))
    said = laptop.tpu("supervise", *run)
    assert [f"attempt {number} started" in said for number in (1, 2, 3, 4, 5)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert "the pod is PREEMPTED" in said and logged_step(killed) == STEPS
    for folder in (whole, killed):
        assert (folder / "export" / "model.safetensors").is_file()
    assert (killed / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert_same(state_of(killed, STEPS), state_of(whole, STEPS))

    laptop.tpu("down")
    assert laptop.cloud.nodes == {}
