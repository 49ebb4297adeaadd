"""The kernels of attention fit into a TPU core, and say what they cost."""

import re

import jax
import jax.numpy as jnp
import pytest

from mlm.model import fused_attention
from mlm.plan.compile import no_cache
from mlm.plan.topology import find
from tests.support.tiny import slow


@pytest.mark.standard
@pytest.mark.parametrize(
    ("topology", "window", "length", "heads", "head_size"),
    [
        ("v3:2x2", 0, 512, 2, 64),
        slow("v4:2x2x1", 0, 8192, 2, 64),
        slow("v5e:2x2", 128, 8192, 2, 64),
    ],
)
def test_what_is_supported_fits_into_a_core(topology, window, length, heads, head_size):
    """With what needs most memory: documents, and dropout in short rows, angles of each row in long ones."""
    device = find(topology).devices[0]
    kind = device.device_kind
    is_short = length <= fused_attention.LONGEST_WITH_DROPOUT
    dropout = 0.1 if is_short else 0.0
    assert fused_attention.unsupported(kind, length, window, dropout, heads, head_size) is None
    settings = fused_attention.Settings(heads, True, window, kind)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x = array(jnp.bfloat16, 8, length, heads * head_size)
    documents = array(jnp.int32, 8, length)
    angles = array(jnp.float32, 8, length, head_size // 2)
    extras = (array(jnp.bfloat16, length, length), None) if is_short else (None, (angles, angles))

    def both(q, k, v, documents, extras, grad):
        def attend(q, k, v):
            return fused_attention.attend(q, k, v, documents, *extras, settings)

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(grad)

    with no_cache():
        text = jax.jit(both).lower(x, x, x, documents, extras, x).compile().as_text()
    keys = 384 if window else length  # of a tile and its halos
    flops = [2 * products * 8 * length * keys * heads * head_size for products in (2, 5)]
    assert sorted(map(int, re.findall(r'"flops":"(\d+)"', text))) == flops, "as plan reads them"
