"""The kernels of attention fit into a TPU core; their costs in `plan` are those of the compiler's schedule."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlm.model import fused_attention
from mlm.plan.attention_cycles import CYCLES
from mlm.plan.compile import no_cache
from mlm.plan.topology import find
from tests.support.tiny import slow


@pytest.mark.parametrize(
    ("topology", "window", "length", "rotated"),
    [
        slow("v3:2x2", 0, 512, 0),
        slow("v5e:2x2", 0, 512, 0),
        slow("v5e:2x2", 0, 8192, 1),
        slow("v5e:2x2", 64, 8192, 1),
        slow("v6e:2x2", 64, 1024, 1),
        slow("v6e:2x2", 64, 512, 1),
    ],
)
def test_cycles_are_those_of_the_schedule(topology, window, length, rotated, tmp_path):
    dump = f"--xla_jf_dump_to={tmp_path} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
    settings = {"LIBTPU_INIT_ARGS": dump, "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": "."}
    command = [
        sys.executable,
        "tests/programs/fused_schedule.py",
        topology,
        *map(str, (length, window, rotated, tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-2000:]
    kind, *cycles = json.loads(done.stdout.splitlines()[-1])
    size = fused_attention.sizes(kind, length, window)
    known = CYCLES[kind][bool(rotated), window, size.queries, size.query_steps > 1]
    assert cycles == pytest.approx(known, rel=0.02), CHANGED


CHANGED = "the schedule has changed (another libtpu, or the kernel): put the new figures into the table"


@pytest.mark.standard
@pytest.mark.parametrize(
    ("topology", "window", "length", "heads", "head_size"),
    [
        ("v3:2x2", 0, 512, 2, 64),
        slow("v5e:2x2", 0, 512, 4, 32),
        slow("v4:2x2x1", 0, 8192, 2, 64),
        slow("v5e:2x2", 128, 8192, 2, 64),
    ],
)
def test_what_is_supported_fits_into_a_core(topology, window, length, heads, head_size):
    """With what needs most memory: documents, and dropout in short rows, angles of each row in long ones."""
    device = find(topology).devices[0]
    kind, is_short = device.device_kind, length <= fused_attention.LONGEST_WITH_DROPOUT
    dropout = 0.1 if is_short else 0.0
    assert fused_attention.unsupported(kind, length, window, dropout, heads, head_size) is None
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), P())

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x, documents = array(jnp.bfloat16, 8, length, heads * head_size), array(jnp.int32, 8, length)
    angles = array(jnp.float32, 8, length, head_size // 2)
    extras = (array(jnp.bfloat16, length, length), None) if is_short else (None, (angles, angles))

    def both(q, k, v, documents, extras, grad):
        def attend(q, k, v):
            return fused_attention.attend(q, k, v, documents, *extras, heads, True, window, kind)

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(grad)

    with no_cache():
        text = jax.jit(both).lower(x, x, x, documents, extras, x).compile().as_text()
    assert text.count("fused_attention_forward") and text.count("fused_attention_backward")
