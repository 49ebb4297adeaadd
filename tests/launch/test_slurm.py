"""launch/slurm.sbatch: its options are sbatch's, and it starts, ends and requeues as Slurm's tools are asked to."""

import re
import shutil
import subprocess

import pytest

from tests.launch import LAUNCH

FILE = LAUNCH / "slurm.sbatch"
SBATCH = shutil.which("sbatch")


def options() -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", FILE.read_text(), re.MULTILINE)
    assert len(found) == FILE.read_text().count("#SBATCH")
    return dict(found)


def test_what_its_options_ask_for():
    assert options()["ntasks-per-node"] == "1"  # a process owns all GPUs of its node
    # to the tasks, not ("B:") to the script's own shell
    assert re.fullmatch(r"TERM@[0-9]+", options()["signal"])
    lines = FILE.read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    # sbatch stops reading at the first command
    assert all(line.startswith("#") for line in lines[:last])


@pytest.mark.standard
@pytest.mark.parametrize(
    "sbatch", [pytest.param(SBATCH, id="real_sbatch" if SBATCH else "no_sbatch_here")]
)
def test_sbatch_reads_them(tmp_path, sbatch):
    """The real one, where it is installed, gets as far as the controller that is not there."""
    if not sbatch:
        return
    conf = "ClusterName=c\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nGresTypes=gpu\nNodeName=localhost\n"
    (tmp_path / "slurm.conf").write_text(
        conf + "PartitionName=p Nodes=ALL Default=YES\nMessageTimeout=1\n"
    )
    environment = {"SLURM_CONF": str(tmp_path / "slurm.conf"), "PATH": "/usr/bin:/bin"}
    argv = [sbatch, "--test-only", FILE]
    try:
        stderr = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=5
        ).stderr
    # it waits for the controller: it has read everything
    except subprocess.TimeoutExpired as error:
        stderr = (error.stderr or b"").decode()
    assert not re.search("unrecognized|[Ii]nvalid", stderr), stderr


@pytest.mark.standard
@pytest.mark.parametrize(("code", "requeued", "cpus"), [(2, False, "32"), (75, True, "")])
def test_its_end_is_that_of_the_run(tmp_path, code, requeued, cpus):
    """Slurm sets the number of CPUs only where the job asks for one; a site may allow no requeue."""
    for name in ("srun", "scontrol"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\necho "$0" "$@" >>{tmp_path}/calls\nexit {code if name == "srun" else 1}\n'
        )
        program.chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_CPUS_PER_TASK": cpus} if cpus else {}
    words = ["--config=configs/a.py", "--workdir=/shared/my runs"]
    environment = variables | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", FILE, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == code
    first, *others = (tmp_path / "calls").read_text().replace(f"{tmp_path}/", "").splitlines()
    assert first.startswith("srun --cpus-per-task=32 --label " if cpus else "srun --label ")
    assert first.endswith(
        ".venv/bin/python -m mlm run --config=configs/a.py --workdir=/shared/my runs"
    )
    assert others == (["scontrol requeue 7"] if requeued else [])
