"""The fused and tiled kernels fit into a TPU core; their costs in `plan` are those of the compiler's schedule."""

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

from mlm.model import fused_attention, tiled_attention
from mlm.plan import attention_cycles
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
    kind, *cycles = scheduled("fused", tmp_path, topology, length)
    assert cycles == pytest.approx(attention_cycles.FUSED_CYCLES[kind][length], rel=0.02), CHANGED


@pytest.mark.parametrize(
    ("topology", "window", "length"),
    [
        slow("v5e:2x2", 0, 8192),
        slow("v5e:2x2", 0, 1024),
        slow("v5e:2x2", 64, 8192),
        slow("v4:2x2x1", 0, 8192),
        ("v6e:2x2", 64, 1024),
    ],
)
def test_tiled_cycles_are_those_of_the_schedule(topology, window, length, tmp_path):
    kind, *bundles = scheduled("tiled", tmp_path, topology, length, window, 1)
    several = length > tiled_attention.chunk_tokens(kind)
    known = attention_cycles.TILED_CYCLES[kind][window, several]
    assert [each / 2 for each in bundles] == pytest.approx(known, rel=0.02), CHANGED  # two heads in a block


CHANGED = "the schedule has changed (another libtpu, or the kernel): put the new figures into the table"


def scheduled(name, tmp_path, *args):
    """Returns what tests/{fused,tiled}_schedule.py print."""
    dump = f"--xla_jf_dump_to={tmp_path} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
    settings = {"LIBTPU_INIT_ARGS": dump, "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": "."}
    command = [sys.executable, f"tests/{name}_schedule.py", *map(str, args), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


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


@pytest.mark.parametrize(
    ("topology", "window", "length"),
    [slow("v5e:2x2", 0, 8192), slow("v4:2x2x1", 0, 8192), slow("v5e:2x2", 128, 8192), slow("v3:2x2", 128, 1024)],
)
def test_tiled_kernels_fit_into_a_core(topology, window, length):
    """With what needs most memory: documents, and angles of each row."""
    device = find(topology).devices[0]
    kind = device.device_kind
    assert tiled_attention.unsupported(kind, length, window, 2, 64) is None
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), P())
    x = jax.ShapeDtypeStruct((2, length, 128), jnp.bfloat16, sharding=sharding)
    angles = jax.ShapeDtypeStruct((2, length, 32), jnp.float32, sharding=sharding)
    documents = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=sharding)

    def both(q, k, v, documents, rotation, grad):
        def attend(q, k, v):
            return tiled_attention.attend(q, k, v, documents, None, rotation, 2, True, window, kind)

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(grad)

    with no_cache():
        text = jax.jit(both).lower(x, x, x, documents, (angles, angles), x).compile().as_text()
    assert text.count("tiled_attention_forward") and text.count("tiled_attention_backward")
