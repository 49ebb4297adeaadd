"""The fused kernels fit into a TPU core, and their costs in `plan` are those of the compiler's schedule."""

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
from mlm.plan import cost_model
from mlm.plan.compile import no_cache
from mlm.plan.topology import find
from tests.fixtures import slow


@pytest.mark.parametrize(
    ("topology", "length"),
    [
        slow("v3:2x2", 512),
        slow("v5e:2x2", 512),
        ("v6e:2x2", 128),
    ],
)
def test_cycles_are_those_of_the_schedule(topology, length, tmp_path):
    dump = f"--xla_jf_dump_to={tmp_path} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
    settings = {"LIBTPU_INIT_ARGS": dump, "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": "."}
    command = [sys.executable, "tests/fused_schedule.py", topology, str(length), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-2000:]
    kind, *cycles = json.loads(done.stdout.splitlines()[-1])
    assert cycles == pytest.approx(cost_model.ATTENTION_CYCLES[kind][length], rel=0.02), (
        "the schedule has changed (another libtpu, or the kernel): put the new figures into ATTENTION_CYCLES"
    )


@pytest.mark.parametrize(
    ("topology", "length", "heads", "head_size"),
    [
        ("v3:2x2", 512, 2, 64),
        ("v3:2x2", 512, 1, 256),
        slow("v5e:2x2", 512, 16, 8),
        slow("v4:2x2x1", 512, 1, 256),
    ],
)
def test_what_is_supported_fits_into_a_core(topology, length, heads, head_size):
    """Those that need most of it, with dropout and documents: rows of 512; two heads on a v3, many on others."""
    device = find(topology).devices[0]
    kind = device.device_kind
    assert fused_attention.unsupported(kind, length, heads, head_size) is None
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), P())
    x = jax.ShapeDtypeStruct((8, length, heads * head_size), jnp.bfloat16, sharding=sharding)
    dropout_mask = jax.ShapeDtypeStruct((length, length), jnp.bfloat16, sharding=sharding)
    documents = jax.ShapeDtypeStruct((8, length), jnp.int32, sharding=sharding)

    def both(q, k, v, documents, dropout_mask, grad):
        out, pull = jax.vjp(
            lambda q, k, v: fused_attention.attend(q, k, v, documents, dropout_mask, heads, True, 0, kind), q, k, v
        )
        return out, pull(grad)

    with no_cache():
        text = jax.jit(both).lower(x, x, x, documents, dropout_mask, x).compile().as_text()
    assert text.count("fused_attention_forward") and text.count("fused_attention_backward")
