"""Every attention kernel against flax's, outputs and gradients; Pallas kernels interpreted on the CPU."""

import functools
import types
from typing import NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import RobertaConfig

from mlm.errors import InputError
from mlm.model import fused_attention, kernels
from mlm.training import sharding
from tests.support.tiny import slow

HEADS, SIZE = 2, 32


class Case(NamedTuple):
    """A kernel, and what it is given."""

    name: str
    window: int = 0
    length: int = 128
    chunk: int = 512  # tokens of the fused kernel's chunks, at most
    isolated: bool = True
    dropout: bool = False
    rotated: str = ""  # "" for no rotation, "rows" if each row has its positions, "alike" if all share them
    rows: int = 2


class Inputs(NamedTuple):
    qkv: list[jax.Array]
    grad: jax.Array
    documents: jax.Array
    dropout_mask: jax.Array | None
    angles: jax.Array | None


def inputs_of(case: Case) -> Inputs:
    """Returns arrays with two documents in each row, and padding at the end of the last, whose gradient is 0."""
    shape = case.rows, case.length, HEADS * SIZE
    *qkv, grad = (jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4))
    documents = np.ones(shape[:2], np.int32)
    documents[:, case.length // 3 :], documents[-1, case.length - case.length // 5 :] = 2, 0
    mask = jax.random.uniform(jax.random.key(1), (case.length, case.length)) > 0.1
    places = np.arange(case.length) + 50 * np.arange(case.rows if case.rotated == "rows" else 1)[:, None]
    angles = places[..., None] / 100.0 ** (np.arange(SIZE // 2) / (SIZE // 2))
    return Inputs(
        qkv,
        grad * (documents > 0)[..., None],
        jnp.asarray(documents),
        mask / 0.9 if case.dropout else None,
        jnp.asarray(angles, jnp.float32) if case.rotated else None,
    )


def flax_attention(case: Case, inputs: Inputs, *qkv):
    """What FlaxRobertaSelfAttention calls, with a given dropout mask; ModernBERT's window; rotations as in RoFormer."""
    q, k, v = (x.reshape(case.rows, case.length, HEADS, SIZE) for x in qkv)
    if case.rotated:
        turn = jnp.exp(1j * inputs.angles)[:, :, None]
        complex_qk = ((x[..., : SIZE // 2] + 1j * x[..., SIZE // 2 :]) * turn for x in (q, k))
        q, k = (jnp.concatenate([x.real, x.imag], -1) for x in complex_qk)
    documents, place = inputs.documents, jnp.arange(case.length)
    allowed = documents[:, None, None, :] > 0
    if case.isolated:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    if case.window:
        allowed = allowed & (jnp.abs(place[:, None] - place) <= case.window)
    probs = flax.linen.dot_product_attention_weights(q, k, bias=jnp.where(allowed, 0.0, -1e10))
    if case.dropout:
        probs = probs * inputs.dropout_mask.T
    return jnp.einsum("bnqk,bknd->bqnd", probs, v).reshape(qkv[0].shape)


def value_and_gradients(function, inputs: Inputs):
    """Returns the context of real tokens, and the gradients of q, k and v."""

    def both(qkv, grad):
        context, pull = jax.vjp(function, *qkv)
        return context * (inputs.documents > 0)[..., None], *pull(grad.astype(context.dtype))

    return jax.jit(both)(inputs.qkv, inputs.grad)


CASES = [
    # All keys for all queries; blocks that leave a rest; a window that is most of the row.
    Case("xla", dropout=True, rotated="alike", length=80),
    Case("xla", window=24, dropout=True, rotated="rows", length=80),
    Case("xla", window=26, length=78, isolated=False),
    Case("cudnn", window=24, length=80),
    # Both rows in a step of the grid, each one tile; tiles of a row; chunks with halos; keys one chunk after the other.
    Case("fused", dropout=True, rotated="rows"),
    Case("fused", window=24, length=256, rotated="alike"),
    Case("fused", window=24, length=384, chunk=128, isolated=False, rotated="rows"),
    Case("fused", length=256, chunk=128),
    slow(Case("fused", window=150, length=384, rotated="alike")),
    slow(Case("fused", window=24, length=384, chunk=768, isolated=False, dropout=True, rotated="alike")),
    slow(Case("fused", length=1024, chunk=512, isolated=False, rotated="rows")),
]


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_flax_s(case, monkeypatch):
    monkeypatch.setattr(fused_attention, "chunk_tokens", lambda _: case.chunk)
    monkeypatch.setattr(
        fused_attention.pl, "pallas_call", functools.partial(within_bounds, fused_attention.pl.pallas_call)
    )
    inputs = inputs_of(case)
    rotation = None if inputs.angles is None else (jnp.cos(inputs.angles), jnp.sin(inputs.angles))
    kernel = kernels.make_kernel(case.name, heads=HEADS, isolated=case.isolated, window=case.window)
    if case.name == "cudnn":  # its call, done by XLA: there is no cuDNN here
        kernel = functools.partial(kernel, implementation="xla")
    found = value_and_gradients(lambda *qkv: kernel(*qkv, inputs.documents, inputs.dropout_mask, rotation), inputs)
    expected = value_and_gradients(functools.partial(flax_attention, case, inputs), inputs)
    for name, one, other in zip(("context", *"qkv"), found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)


def within_bounds(pallas_call, kernel, *, grid, in_specs, out_specs, out_shape, **settings):
    """Asserts that no block of a kernel lies outside its array: the interpreter moves it inside, a TPU reads on."""

    def run(*arrays):
        for spec, array in zip(*map(jax.tree.leaves, ([in_specs, out_specs], [arrays, out_shape])), strict=True):
            for point in np.ndindex(*grid):
                with jax.ensure_compile_time_eval():
                    index = [int(part) for part in spec.index_map(*point)]
                ends = [(part + 1) * (size or 1) for part, size in zip(index, spec.block_shape, strict=True)]
                assert min(index) >= 0 and all(np.less_equal(ends, array.shape)), (point, index, spec.block_shape)
        return call(*arrays)

    call = pallas_call(kernel, grid=grid, in_specs=in_specs, out_specs=out_specs, out_shape=out_shape, **settings)
    return run


def test_split_over_a_mesh_it_is_the_same():
    """Inside a shard_map that has split the rows by then, too."""
    case = Case("fused", window=24, rotated="rows", rows=4, isolated=False)
    inputs, mesh = inputs_of(case), sharding.make_mesh(data=2, fsdp=2, tensor=2)
    arguments = (*inputs.qkv, inputs.documents, None, (jnp.cos(inputs.angles), jnp.sin(inputs.angles)))
    kernel = kernels.make_kernel("fused", heads=HEADS, mesh=mesh, window=24)
    rows = jax.P("data")
    within = jax.shard_map(
        kernel,
        mesh=mesh,
        in_specs=(rows, rows, rows, rows, None, rows),
        out_specs=rows,
        axis_names={"data"},
        check_vma=False,
    )
    expected = flax_attention(case, inputs, *inputs.qkv)
    real = inputs.documents > 0
    for split in (kernel, within):
        np.testing.assert_allclose(jax.jit(split)(*arguments)[real], expected[real], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TPU v3", "TPU v5 lite"])
def test_fused_in_bfloat16_is_near_float32(kind, monkeypatch):
    """Whether a kernel hands float32 to the matrix unit, as on a v3, or bfloat16."""
    call = fused_attention.pl.pallas_call

    def interpreted(*args, **settings):
        return call(*args, **settings | {"interpret": True})

    monkeypatch.setattr(fused_attention.pl, "pallas_call", interpreted)
    inputs = inputs_of(Case("fused", dropout=True))

    def kernel(q, k, v):
        mask = inputs.dropout_mask.astype(q.dtype)
        return fused_attention.attend(q, k, v, inputs.documents, mask, None, HEADS, True, 0, kind)

    rounded = inputs._replace(qkv=[x.astype(jnp.bfloat16) for x in inputs.qkv])
    for one, other in zip(value_and_gradients(kernel, rounded), value_and_gradients(kernel, inputs), strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=0.03 * float(jnp.abs(other).max()))


@pytest.mark.parametrize(
    ("kind", "window", "length", "rows", "expected"),
    [
        ("TPU v3", 0, 512, 4, (1, 512, 512, 512, 0, 1, 1)),
        ("TPU v3", 0, 128, 6, (2, 128, 128, 128, 0, 1, 1)),
        ("TPU v3", 64, 1024, 4, (1, 512, 512, 128, 128, 2, 1)),
        ("TPU v5 lite", 0, 256, 8, (4, 256, 256, 256, 0, 1, 1)),
        ("TPU v5 lite", 0, 1024, 8, (1, 1024, 1024, 512, 0, 1, 1)),
        ("TPU v5 lite", 0, 8192, 8, (1, 1024, 1024, 512, 0, 8, 8)),
        ("TPU v5 lite", 64, 640, 8, (1, 640, 640, 128, 0, 1, 1)),
        ("TPU v5 lite", 0, 1152, 8, (1, 384, 384, 128, 0, 3, 3)),
    ],
)
def test_sizes_of_a_step_of_the_grid(kind, window, length, rows, expected):
    """Rows, queries, keys, tile, halo, steps along queries and keys: tuned, and known to `plan`."""
    assert fused_attention.sizes(kind, length, window, rows) == expected


def choose(
    name: str,
    platform: str = "tpu",
    kind: str = "TPU v5 lite",
    tensor: int = 2,
    heads: int = 12,
    hidden_size: int = 768,
    dropout: float = 0.0,
    capability: str = "10.0",
    **settings,
) -> str:
    """Calls `kernels.choose` for a mesh of devices that need not exist."""
    config = RobertaConfig(num_attention_heads=heads, hidden_size=hidden_size, attention_probs_dropout_prob=dropout)
    device = types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
    mesh = types.SimpleNamespace(devices=np.array([device]), shape={"tensor": tensor})
    return kernels.choose(name, config, mesh=mesh, **{"length": 512, "dtype": "bfloat16"} | settings)


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        ({"platform": "cpu"}, "xla"),
        ({"platform": "gpu", "kind": "NVIDIA H200"}, "cudnn"),
        ({"platform": "gpu", "kind": "NVIDIA H200", "window": 64}, "cudnn"),
        ({"platform": "gpu", "kind": "NVIDIA H200", "dropout": 0.1}, "xla"),
        ({"dtype": "float32"}, "xla"),
        ({"length": 64}, "xla"),
        ({"length": 128}, "fused"),
        ({"length": 8192}, "fused"),
        ({"length": 512, "dropout": 0.1}, "fused"),
        ({"length": 2048, "window": 128}, "fused"),
        ({"kind": "TPU v3", "length": 512}, "fused"),
        ({"kind": "TPU v3", "length": 1024, "window": 64}, "fused"),
        ({"kind": "TPU v3", "heads": 6}, "fused"),
        ({"heads": 24}, "fused"),  # four heads of 32 at a time
        ({"heads": 2, "tensor": 1, "hidden_size": 512}, "fused"),
        ({"heads": 1, "tensor": 1, "hidden_size": 64}, "fused"),
    ],
)
def test_auto_takes_the_fastest_that_supports_the_model(model, chosen):
    assert choose("auto", **model) == chosen


@pytest.mark.parametrize(
    ("name", "model", "what"),
    [
        ("fused", {"platform": "gpu"}, ["a GPU"]),
        ("fused", {"length": 640, "dropout": 0.1}, ["model.attention_dropout = 0.1", "640"]),
        ("fused", {"length": 200}, ["rows of 200 tokens"]),
        ("fused", {"length": 8320}, ["rows of 8320 tokens", "8192"]),
        ("fused", {"length": 640, "kind": "TPU v2"}, ["rows of 640 tokens", "TPU v2", "512"]),
        ("fused", {"heads": 8}, ["heads of 96"]),
        ("fused", {"heads": 2, "tensor": 1}, ["heads of 384"]),
        ("fused", {"heads": 24, "kind": "TPU v3"}, ["4 heads of 32", "TPU v3"]),
        ("fused", {"heads": 48}, ["8 heads of 16"]),
        ("fused", {"heads": 3, "tensor": 1, "hidden_size": 192}, ["3 heads of 64"]),
        ("fused", {"dtype": "float32"}, ["float32"]),
        ("fused", {"tensor": 8}, ["12 heads", "mesh.tensor = 8"]),
        ("fused", {"length": 2048, "window": 129}, ["129 tokens"]),
        ("cudnn", {}, ["a TPU"]),
        ("cudnn", {"platform": "gpu", "dropout": 0.1}, ["model.attention_dropout = 0.1"]),
        ("cudnn", {"platform": "gpu", "dtype": "float32"}, ["float32"]),
        ("cudnn", {"platform": "gpu", "kind": "Tesla V100", "capability": "7.0"}, ["Tesla V100"]),
        ("cudnn", {"platform": "gpu", "heads": 64}, ["heads of 12"]),
        ("cudnn", {"platform": "gpu", "length": 511}, ["rows of 511 tokens"]),
    ],
)
def test_what_a_kernel_does_not_support_is_named(name, model, what):
    with pytest.raises(InputError) as error:
        choose(name, **model)
    assert all(word in str(error.value) for word in [f"config.model.attention = {name}", *what]), error.value
