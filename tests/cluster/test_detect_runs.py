"""The same line on every host, without a flag about hosts: to the bits of the run that is given flags."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import ROOT
from tests.cluster.launched import SETTINGS, assert_same, metrics
from tests.support.metadata_server import PLATFORM, MetadataServer, tpu_vm
from tests.support.processes import environment, run_together, train_arguments


def start_bare(arguments: list[str], hosts: list[dict[str, str]], devices: int) -> list[str]:
    """Starts the same line once on each host, of which only the environment differs; returns what each printed."""
    clean = {key: value for key, value in environment(devices).items() if not key.startswith(PLATFORM)}
    clean["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-m", "mlm", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, cwd=ROOT, env=clean | host, **pipes) for host in hosts]
    printed = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(hosts), "\n".join(printed)
    return printed


def addresses(count: int) -> list[str]:
    """Of a test of its own: all of 127/8 is this machine, and the ports are fixed."""
    return [f"127.{1 + os.getpid() % 200}.{1 + os.getpid() // 200 % 200}.{index + 1}" for index in range(count)]


@pytest.fixture(scope="module")
def with_flags(manifest, tmp_path_factory):
    """count of processes -> the workdir of a run that was given its hosts by flags."""
    made: dict[int, pathlib.Path] = {}

    def run(count: int) -> pathlib.Path:
        if count not in made:
            made[count] = tmp_path_factory.mktemp("flags") / str(count)
            arguments = train_arguments(made[count], manifest.folder, *SETTINGS)
            run_together(arguments, processes=count, devices=4 // count)
        return made[count]

    return run


@pytest.mark.slow
def test_on_tpu_vms(with_flags, manifest, tmp_path):
    """Each asks its own metadata server; an answer in the old format and one in the new."""
    hosts = addresses(2)
    with MetadataServer(tpu_vm(hosts, 0)) as first, MetadataServer(tpu_vm(hosts, 1, old=False)) as second:
        variables = [{"GCE_METADATA_IP": server.address} for server in (first, second)]
        printed = start_bare(train_arguments(tmp_path / "bare", manifest.folder, *SETTINGS), variables, devices=2)
    for index, text in enumerate(printed):
        assert f"mlm train: process {index} of 2, process 0 at {hosts[0]} (from the TPU VM's metadata)" in text
    assert_same(tmp_path / "bare", with_flags(2))


def jobset(count: int) -> list[dict[str, str]]:
    names = ",".join(addresses(count))
    variables = {"TPU_WORKER_HOSTNAMES": names, "JAX_FORCE_TPU_INIT": "1"}  # it has no chip
    return [variables | {"TPU_WORKER_ID": str(index)} for index in range(count)]


@pytest.mark.slow
def test_pods_of_a_jobset_meet_and_train(manifest, tmp_path):
    settings = [*SETTINGS, "train.steps=2"]
    printed = start_bare(train_arguments(tmp_path, manifest.folder, *settings), jobset(2), devices=1)
    for index, text in enumerate(printed):
        assert f"mlm train: process {index} of 2, process 0 at {addresses(2)[0]}" in text
    assert [json.loads(line)["step"] for line in metrics(tmp_path).splitlines()] == [1, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_in_a_jobset_on_gke(count, with_flags, manifest, tmp_path):
    start_bare(train_arguments(tmp_path / "bare", manifest.folder, *SETTINGS), jobset(count), devices=4 // count)
    assert_same(tmp_path / "bare", with_flags(count))
