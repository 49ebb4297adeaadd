"""The bare line, by ssh to each of four real hosts at once: from an empty workdir to the export, without the launcher.

What a TPU VM's metadata server says is played; ssh, addresses, ports and processes are real.
"""

import contextlib
import pathlib
import subprocess
import sys

import pytest

from tests import ROOT
from tests.launch.pod_network import NETWORK, Hosts
from tests.support.metadata_server import MetadataServer, tpu_vm

pytestmark = pytest.mark.hosts

COUNT = 4
LAPTOP = f"{NETWORK}.254"
LINE = "cd mlm && .venv/bin/python -m mlm run --config=configs/quickstart.py --workdir={workdir} {settings}"
SETTINGS = (
    "--config.tokenizer.sample_megabytes=2.0 --config.corpus.max_documents=8000 --config.evaluate.every=0 "
    "--config.corpus.validation_groups=absl-py --config.train.steps=40 --config.log.every=10"
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Hosts:
    """Four hosts with the code in their homes, each with a metadata server of its own."""
    folder = tmp_path_factory.mktemp("bare")
    addresses = [f"{NETWORK}.{index + 1}" for index in range(COUNT)]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(MetadataServer(tpu_vm(addresses, index), at="0.0.0.0")) for index in range(COUNT)
        ]
        ports = [server.address.rpartition(":")[2] for server in servers]
        variables = [{"GCE_METADATA_IP": f"{LAPTOP}:{port}"} for port in ports]
        found = stack.enter_context(Hosts(folder / "hosts", COUNT, variables))
        code = folder / "mlm"
        subprocess.run(["git", "clone", "--quiet", ROOT, code], check=True)
        patch = subprocess.run(["git", "diff", "HEAD", "--binary"], cwd=ROOT, capture_output=True, check=True).stdout
        if patch:
            subprocess.run(["git", "apply"], cwd=code, input=patch, check=True)
        (code / ".venv").symlink_to(pathlib.Path(sys.prefix))
        for index in range(COUNT):
            (found.home(index) / "mlm").symlink_to(code)
        yield found


def on_each(hosts: Hosts, lines: list[str]) -> list[str]:
    """Runs a line on each host, all at once, and returns what each said; all must end with 0."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(hosts.ssh(index, line), **pipes) for index, line in enumerate(lines)]
    said = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(lines), "\n".join(said)
    return said


def test_from_an_empty_workdir_to_the_export(hosts, tmp_path):
    """No word about hosts; to the bits of the run that is told its hosts by flags."""
    bare, told = tmp_path / "bare", tmp_path / "told"
    said = on_each(hosts, [LINE.format(workdir=bare, settings=SETTINGS)] * COUNT)
    print(said[0])
    for index, text in enumerate(said):
        assert f"process {index} of {COUNT}, process 0 at {NETWORK}.1 (from the TPU VM's metadata)" in text
    assert (bare / "export" / "model.safetensors").is_file()
    line = LINE.format(workdir=told, settings=SETTINGS)
    flags = f"--coordinator={NETWORK}.1 --processes={COUNT}"
    on_each(hosts, [f"{line} {flags} --process-id={index}" for index in range(COUNT)])
    assert (bare / "metrics.jsonl").read_text() == (told / "metrics.jsonl").read_text()
    one, other = (folder / "export" / "model.safetensors" for folder in (bare, told))
    assert one.read_bytes() == other.read_bytes()
