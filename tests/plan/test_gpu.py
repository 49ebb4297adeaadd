"""plan for GPUs that aren't there: by jax's CUDA plugin, in a folder of its own, so that no other test finds it."""

import json
import os
import subprocess
import sys

import jax
import pytest

from tests import ROOT
from tests.plan.planned import LENGTH, PARAMETERS, ROWS, SIZES
from tests.support.tiny import TINY

GPUS = 2


@pytest.mark.slow
def test_bytes_are_those_counted_by_hand(tmp_path):
    packages = [f"jax-cuda12-{part}=={jax.__version__}" for part in ("plugin", "pjrt")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={tmp_path}"]
    subprocess.run([*pip, *packages], check=True)
    settings = [f"--config.{key}" for key in (*TINY, *SIZES)]
    plan = ["plan", "--config=configs/base.py", f"--topology=h100:{GPUS}", "--json", *settings]
    done = subprocess.run(
        [sys.executable, "-m", "mlm", *plan],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
    )
    row = json.loads(done.stdout)["plan"]
    state = 3 * 4 * PARAMETERS + ROWS // GPUS * (2 * 4 * LENGTH + 8)
    assert row["fits"] and row["devices"] == GPUS and row["hosts"]["count"] == 1
    assert state <= row["bytes_per_chip"]["arguments"] < state + 100
    assert row["bytes_per_chip"]["needs"] > state and "milliseconds" not in row
