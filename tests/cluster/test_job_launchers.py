"""The bare line under the real mpirun and the real srun of this machine (Debian's openmpi-bin and slurm-wlm)."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests import ROOT
from tests.cluster.launched import SETTINGS, assert_same
from tests.support.metadata_server import PLATFORM
from tests.support.processes import environment, train_arguments

pytestmark = pytest.mark.hosts

SLURM = """
ClusterName=one
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort=7817
SlurmdPort=7818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
NodeName={name} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={name} Default=YES State=UP
"""


def job_environment() -> dict[str, str]:
    clean = {name: value for name, value in environment(2).items() if not name.startswith(PLATFORM)}
    return clean | {"JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def slurm():
    """The configuration of a cluster of one node: munged, slurmctld and slurmd, with a key and ports of their own."""
    folder = pathlib.Path("/run/mlm-slurm")  # munged wants a folder that nobody else can write
    shutil.rmtree(folder, ignore_errors=True)
    for path in (folder / "state", folder / "spool"):
        path.mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(
        SLURM.format(name=socket.gethostname().partition(".")[0], folder=folder)
    )
    variables = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    names = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munge.pid",
        "log-file": "munge.log",
    }
    paths = [f"--{option}={folder / name}" for option, name in names.items()]
    daemons = [
        ["/usr/sbin/munged", "--foreground", "--force", f"--seed-file={folder}/munge.seed", *paths],
        ["/usr/sbin/slurmctld", "-D", "-L", f"{folder}/slurmctld.log"],
        ["/usr/sbin/slurmd", "-D", "-L", f"{folder}/slurmd.log"],
    ]
    started = []
    try:
        for command in daemons:
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            started.append(process)
            time.sleep(1)
        deadline = time.monotonic() + 30
        look = ["sinfo", "--noheader"]
        while (
            b"idle" not in (said := subprocess.run(look, env=variables, capture_output=True)).stdout
        ):
            logs = [path.read_text() for path in folder.glob("*.log")]
            assert time.monotonic() < deadline, "\n".join([str(said), *logs])
            time.sleep(0.5)
        yield variables["SLURM_CONF"]
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def finish(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_under_mpirun_and_srun(slurm, manifest, tmp_path):
    """To the same bits; that they are those of flags is the business of tests/launch/test_real_hosts.py."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for name, words, variables in (
        ("Open MPI", ["mpirun", "-n", "2"], root),
        ("Slurm", ["srun", "--ntasks=2"], {"SLURM_CONF": slurm}),
    ):
        line = [
            sys.executable,
            "-m",
            "mlm",
            *train_arguments(tmp_path / name, manifest.folder, *SETTINGS),
        ]
        said = finish([*words, *line], job_environment() | variables)
        assert "process 0 of 2" in said and "process 1 of 2" in said and f"(from {name})" in said
    assert_same(tmp_path / "Open MPI", tmp_path / "Slurm")


def test_the_shell_of_a_batch_script_is_no_task(slurm, tmp_path):
    """Between its lines `python -m mlm` is a single process; under its srun it is one of several."""
    look = f"{sys.executable} -c 'from mlm.cluster import detect; print(detect.detect().processes)'"
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --ntasks=2\n{look}\nsrun {look}\n")
    variables = job_environment() | {"SLURM_CONF": slurm}
    finish(["sbatch", "--wait", f"--output={tmp_path}/said", str(script)], variables)
    assert (tmp_path / "said").read_text().split() == ["1", "2", "2"]
