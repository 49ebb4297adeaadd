"""launch/sky.yaml, as SkyPilot's own parser reads it; no cloud is asked."""

import json
import os
import subprocess
import sys

import pytest
from pods.supervise import FINAL

from tests import ROOT
from tests.launch import LAUNCH

SKY = "skypilot==0.14.1"
LOOK = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
found = {"run": task.run, "setup": task.setup, "workdir": task.workdir, "accelerators": resources.accelerators}
found |= {"recovery": resources.job_recovery, "spot": resources.use_spot, "down": resources.autostop_config.down}
print(json.dumps(found | {"cloud": str(resources.cloud), "runtime": resources.accelerator_args["runtime_version"]}))
"""


@pytest.mark.slow
def test_sky_s_own_parser_takes_it(tmp_path):
    """In an environment of its own, which uv makes: its packages are none of ours."""
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, SKY], check=True)
    home = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    words = [python, "-c", LOOK, LAUNCH / "sky.yaml"]
    done = subprocess.run(words, cwd=ROOT, env=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["run"].startswith(".venv/bin/python -m mlm run --config=configs/quickstart.py ")
    assert (found["setup"], found["workdir"], found["cloud"]) == (
        "bash launch/environment.sh",
        ".",
        "GCP",
    )
    assert (
        found["accelerators"] == {"tpu-v5litepod-16": 1}
        and found["runtime"] == "v2-alpha-tpuv5-lite"
    )
    assert found["spot"] and found["down"]
    recovery = found["recovery"]
    assert recovery["recover_on_exit_codes"] == [75] and not FINAL.keys() & {
        *recovery["recover_on_exit_codes"]
    }
    assert recovery["max_restarts_on_errors"] == 0
