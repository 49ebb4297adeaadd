"""The costs that the fused kernels state are those of the compiler's schedule."""

import json
import os
import subprocess
import sys

import pytest

from mlm.model import fused_attention


@pytest.mark.parametrize(("topology", "length"), [("v5e:2x2", 512), ("v6e:2x2", 128)])
def test_stated_cycles_are_those_of_the_schedule(topology, length, tmp_path):
    dump = f"--xla_jf_dump_to={tmp_path} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
    settings = {"LIBTPU_INIT_ARGS": dump, "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": "."}
    command = [sys.executable, "tests/fused_schedule.py", topology, str(length), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-2000:]
    kind, *cycles = json.loads(done.stdout.splitlines()[-1])
    assert cycles == pytest.approx(fused_attention.CYCLES[kind][length], rel=0.02), (
        "the schedule has changed (another libtpu, or the kernel): put the new figures into CYCLES"
    )
