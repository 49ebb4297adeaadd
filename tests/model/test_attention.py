"""Every attention kernel against flax's, outputs and gradients; Pallas kernels interpreted on the CPU."""

import functools
import types

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import RobertaConfig

from mlm.errors import InputError
from mlm.model import attention, fused_attention
from mlm.training import sharding
from tests.support.tiny import slow, tiny_config, tiny_run

ROWS, LENGTH, HEADS, SIZE = 8, 128, 4, 32
HIDDEN = HEADS * SIZE


def inputs():
    """Returns q, k, v, a gradient, and documents: two in each row, and padding in the last."""
    arrays = [jax.random.normal(key, (ROWS, LENGTH, HIDDEN)) for key in jax.random.split(jax.random.key(0), 4)]
    documents = np.ones((ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        documents[row, 20 + 10 * row :] = 2
    documents[-1, 100:] = 0
    return arrays, jnp.asarray(documents)


def flax_attention(q, k, v, documents, dropout_mask, *, isolated, window=0):
    """What FlaxRobertaSelfAttention calls, with a given dropout mask; with ModernBERT's rule of a window."""
    split = [x.reshape(ROWS, LENGTH, HEADS, SIZE) for x in (q, k, v)]
    allowed = documents[:, None, None, :] > 0
    if isolated:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    if window:
        distance = jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH))
        allowed = allowed & (distance <= window)
    probs = flax.linen.dot_product_attention_weights(*split[:2], bias=jnp.where(allowed, 0.0, -1e10))
    if dropout_mask is not None:
        probs = probs * dropout_mask.T
    return jnp.einsum("bnqk,bknd->bqnd", probs, split[2]).reshape(q.shape)


CASES = [(0, "xla", False), (0, "xla", True), slow(0, "fused", False), (0, "fused", True), (0, "cudnn", False)]
# Windows that are blocks of the row (128), that leave a rest, and that are the row but for its ends.
CASES += [(16, "xla", False), (24, "xla", False), (100, "xla", False), (24, "xla", True), slow(100, "xla", True)]
CASES += [slow(24, "fused", False), (24, "fused", True), (24, "cudnn", False)]


@pytest.mark.standard
@pytest.mark.parametrize("isolated", [slow(False), True])
@pytest.mark.parametrize(("window", "name", "dropout"), CASES)
def test_output_and_gradients_are_flax_s(window, name, isolated, dropout):
    (*qkv, grad), documents = inputs()
    dropout_mask = None
    if dropout:
        dropout_mask = (jax.random.uniform(jax.random.key(1), (LENGTH, LENGTH)) > 0.1) / 0.9
    kernel = attention.make_kernel(name, heads=HEADS, isolated=isolated, window=window)
    if name == "cudnn":  # its call, done by XLA: there is no cuDNN here
        kernel = functools.partial(kernel, implementation="xla")
    settings = {"isolated": isolated, "window": window}
    expected, pull = jax.vjp(lambda q, k, v: flax_attention(q, k, v, documents, dropout_mask, **settings), *qkv)
    found, ours = jax.vjp(lambda q, k, v: kernel(q, k, v, documents, dropout_mask, None), *qkv)
    grad = grad * (documents > 0)[..., None]  # padding's context is never read
    real = np.asarray(documents > 0)
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], atol=1e-5)
    for name_, one, other in zip("qkv", ours(grad), pull(grad), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=f"gradient of {name_}")


# Both rows in a step of the grid, a row as one chunk, chunks and halos, and keys one chunk after the other.
@pytest.mark.standard
@pytest.mark.parametrize(
    ("window", "length", "most", "isolated", "per_row", "dropout"),
    [
        slow(16, 384, 384, True, True, False),
        (64, 384, 128, False, True, False),
        slow(24, 384, 128, True, True, False),
        slow(150, 384, 384, True, False, False),
        slow(0, 384, 128, True, False, False),
        slow(0, 384, 384, False, True, False),
        (0, 256, 512, True, True, True),
        slow(24, 384, 768, False, False, True),
    ],
)
def test_fused_rotates_and_attends_over_chunks(window, length, most, isolated, per_row, dropout, monkeypatch):
    rows = 2
    monkeypatch.setattr(fused_attention, "chunk_tokens", lambda _: most)
    dropout_mask = (jax.random.uniform(jax.random.key(1), (length, length)) > 0.1) / 0.9 if dropout else None
    q, k, v, grad = (jax.random.normal(key, (rows, length, 64)) for key in jax.random.split(jax.random.key(0), 4))
    documents = np.ones((rows, length), np.int32)
    documents[:, 100:], documents[1, length - 84 :] = 2, 0
    documents = jnp.asarray(documents)
    places = jnp.stack([jnp.arange(length), jnp.arange(length)[::-1]]) if per_row else jnp.arange(length)[None]
    angles = places[..., None] / 100.0 ** (jnp.arange(16) / 16)
    rotation = jnp.cos(angles), jnp.sin(angles)
    results = []
    for name in ("xla", "fused"):
        kernel = attention.make_kernel(name, heads=2, isolated=isolated, window=window)
        found, pull = jax.vjp(lambda q, k, v: kernel(q, k, v, documents, dropout_mask, rotation), q, k, v)  # noqa: B023
        real = (documents > 0)[..., None]
        results.append((found * real, *pull(grad * real)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("each", [False, True])
def test_rotary_positions_are_complex_products(each):
    x = jax.random.normal(jax.random.key(0), (2, 8, 64))
    angles = jax.random.uniform(jax.random.key(1), (2 if each else 1, 8, 16), maxval=6.0)
    first, second = np.asarray(x).reshape(2, 8, 2, 2, 16).swapaxes(0, 3)[[0, 1]]
    expected = (first + 1j * second).transpose(2, 0, 1, 3) * np.exp(1j * np.asarray(angles))[:, :, None]
    found = attention.rotate(x, jnp.cos(angles), jnp.sin(angles)).reshape(2, 8, 2, 2, 16)
    np.testing.assert_allclose(found[..., 0, :] + 1j * found[..., 1, :], expected, atol=1e-5)


MESHED = [slow("xla", 0), ("xla", 24), slow("fused", 0), ("fused", 24)]


@pytest.mark.parametrize(("name", "window"), MESHED)
def test_split_over_a_mesh_it_is_the_same(name, window):
    (*qkv, _), documents = inputs()
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    angles = jax.random.uniform(jax.random.key(1), (ROWS, LENGTH, SIZE // 2), maxval=6.0)
    rest = documents, None, (jnp.cos(angles), jnp.sin(angles))
    split = jax.jit(attention.make_kernel(name, heads=HEADS, mesh=mesh, window=window))(*qkv, *rest)
    whole = attention.make_kernel(name, heads=HEADS, window=window)(*qkv, *rest)
    np.testing.assert_allclose(split, whole, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TPU v3", "TPU v5 lite"])
def test_fused_in_bfloat16_is_near_float32(kind, monkeypatch):
    """Whether a kernel hands float32 to the matrix unit, as on a v3, or bfloat16."""
    call = fused_attention.pl.pallas_call

    def interpreted(*args, **settings):
        return call(*args, **settings | {"interpret": True})

    monkeypatch.setattr(fused_attention.pl, "pallas_call", interpreted)
    (*qkv, grad), documents = inputs()
    dropout_mask = (jax.random.uniform(jax.random.key(1), (LENGTH, LENGTH)) > 0.1) / 0.9

    def both(*qkv):
        def kernel(q, k, v):
            return fused_attention.attend(q, k, v, documents, dropout_mask.astype(q.dtype), None, HEADS, True, 0, kind)

        found, pull = jax.vjp(kernel, *qkv)
        return found, *pull(grad.astype(found.dtype))

    for one, other in zip(both(*(x.astype(jnp.bfloat16) for x in qkv)), both(*qkv), strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=0.03 * float(jnp.abs(other).max()))


DEFAULTS = {
    "kind": "TPU v5 lite",
    "tensor": 2,
    "length": 512,
    "heads": 12,
    "hidden_size": 768,
    "dropout": 0.1,
    "dtype": "bfloat16",
    "window": 0,
}


def choose(name: str, platform: str, changes: dict) -> str:
    """Calls `attention.choose` for a mesh of devices that need not exist."""
    given = types.SimpleNamespace(**{**DEFAULTS, **changes})
    config = RobertaConfig(
        num_attention_heads=given.heads,
        hidden_size=given.hidden_size,
        attention_probs_dropout_prob=given.dropout,
    )
    device = types.SimpleNamespace(platform=platform, device_kind=given.kind)
    mesh = types.SimpleNamespace(devices=np.array([device]), shape={"tensor": given.tensor})
    return attention.choose(name, config, length=given.length, mesh=mesh, dtype=given.dtype, window=given.window)


@pytest.mark.parametrize(
    ("platform", "changes", "chosen"),
    [
        ("cpu", {}, "xla"),
        ("gpu", {"dropout": 0.0}, "xla"),
        ("tpu", {}, "fused"),
        ("tpu", {"length": 128}, "fused"),
        ("tpu", {"length": 64}, "xla"),
        ("tpu", {"length": 2048}, "xla"),
        ("tpu", {"length": 2048, "dropout": 0.0}, "fused"),
        ("tpu", {"length": 16384, "dropout": 0.0}, "xla"),
        ("tpu", {"length": 512, "dropout": 0.0, "window": 64}, "fused"),
        ("tpu", {"length": 2048, "dropout": 0.0, "window": 200}, "xla"),
        ("tpu", {"kind": "TPU v3", "length": 2048, "dropout": 0.0}, "xla"),
        ("tpu", {"kind": "TPU v3", "length": 2048, "dropout": 0.0, "window": 64}, "fused"),
        ("tpu", {"heads": 8}, "xla"),  # heads of 96
        ("tpu", {"kind": "TPU v3"}, "fused"),
        ("tpu", {"kind": "TPU v3", "heads": 24}, "xla"),  # heads of 32
        ("tpu", {"dtype": "float32"}, "xla"),
        ("tpu", {"tensor": 8}, "xla"),
    ],
)
def test_auto_takes_the_first_that_supports_the_model(platform, changes, chosen):
    assert choose("auto", platform, changes) == chosen


@pytest.mark.parametrize(
    ("name", "platform", "changes", "what"),
    [
        ("fused", "gpu", {}, "a GPU"),
        ("fused", "tpu", {"length": 1024}, "dropout (model.attention_dropout = 0.1) in rows of 1024 tokens"),
        ("fused", "tpu", {"length": 200}, "rows of 200 tokens"),
        ("fused", "tpu", {"length": 16384, "dropout": 0.0}, "rows of 16384 tokens"),
        ("fused", "tpu", {"length": 1024, "dropout": 0.0, "kind": "TPU v2"}, "rows of 1024 tokens without a window"),
        ("fused", "tpu", {"heads": 8}, "heads of 96"),
        ("fused", "tpu", {"heads": 2, "tensor": 1}, "heads of 384"),
        ("fused", "tpu", {"heads": 24, "kind": "TPU v3"}, "4 heads of 32 at a time on a TPU v3"),
        ("fused", "tpu", {"heads": 3, "tensor": 1, "hidden_size": 192}, "3 heads of 64 on a device"),
        ("fused", "tpu", {"dtype": "float32"}, "float32, only bfloat16"),
        ("fused", "tpu", {"tensor": 8}, "12 heads over mesh.tensor = 8, only whole heads"),
        ("fused", "tpu", {"dropout": 0.0, "length": 2048, "window": 200}, "windows of 200 tokens to each side"),
        ("cudnn", "tpu", {"dropout": 0.0}, "a TPU"),
        ("cudnn", "gpu", {}, "dropout (model.attention_dropout = 0.1)"),
        ("cudnn", "gpu", {"dropout": 0.0, "dtype": "float32"}, "float32"),
    ],
)
def test_what_a_kernel_does_not_support_is_named(name, platform, changes, what):
    with pytest.raises(InputError) as error:
        choose(name, platform, changes)
    assert f"config.model.attention = {name}: the kernel does not support {what}" in str(error.value)


def test_the_config_chooses_the_kernel():
    with pytest.raises(
        InputError, match=r"config.model.attention = fused: the kernel does not support rows of 32 tokens"
    ):
        tiny_run("model.attention=fused")
    with pytest.raises(InputError, match=r"config.model.attention = 'cudnn': has no dropout"):
        tiny_config("model.attention=cudnn", "model.attention_dropout=0.1")
