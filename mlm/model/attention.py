"""Attention is one call, `attend(q, k, v, segments, ...)`, which each layer makes; here are the kernels that answer it.

    xla     plain jax, on any device
    fused   our Pallas kernel for TPU: bfloat16, rows up to 8,192 tokens, with dropout up to 512
    cudnn   cuDNN's kernel for GPU: bfloat16, no dropout
    auto    fused on a TPU and cudnn on a GPU if they support the model, else xla (measured: mlm/bench/README.md)

To add one, write it as `xla`, list it in KERNELS, and say in `unsupported` what it does not support.

Dimensions: B rows, L tokens in a row, Q queries, K keys, H hidden size = N heads x head size.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from transformers import PretrainedConfig

from mlm.errors import InputError
from mlm.model.rotary import Rotation, rotate

# attend(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, heads=, window=, isolated=, dropout_mask_LxL=, rotation=) returns the
# context_BxLxH.
#   segments_BxL: int32, the document of each token, 0 for padding
#   window: a token attends to so many tokens on each side; 0 for the whole row
#   isolated: whether tokens attend only within their document
#   dropout_mask_LxL: keys x queries, which multiplies the probabilities of all rows and heads; or None
#   rotation: of queries and keys, before all else; or None
Attention = Callable[..., Array]

PADDING = ("none", "end", "any")  # where the rows of a data set may have it
# Queries that cuDNN computes at a time in layers with a window: a tile of its kernel. Not tuned on a device yet.
CUDNN_BLOCK = 128


def make_attention(
    name: str,
    config: PretrainedConfig,
    *,
    lengths: Collection[int],
    windows: Collection[int],
    mesh: Mesh,
    dtype: str,
    padding: str = "any",
) -> Attention:
    """Returns the attention of a model's layers, by the kernel `name`; auto takes the fastest for each length.

    Raises InputError if the kernel does not support rows of these lengths, or layers with these windows.
    """
    chosen = {
        (length, window): choose(name, config, length=length, window=window, mesh=mesh, dtype=dtype)
        for length in lengths
        for window in windows
    }

    def attend(
        q_BxLxH: Array,
        k_BxLxH: Array,
        v_BxLxH: Array,
        segments_BxL: Array,
        *,
        window: int,
        **settings: Any,
    ):
        kernel = KERNELS[chosen[q_BxLxH.shape[1], window]]
        settings |= {"mesh": mesh, "padding": padding}
        return kernel(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, window=window, **settings)

    return attend


def choose(
    name: str, config: PretrainedConfig, *, length: int, window: int, mesh: Mesh, dtype: str
) -> str:
    """Returns the kernel's name: `name` itself, or for "auto" the fastest one that supports the model."""
    reason_of = functools.partial(
        unsupported, config=config, length=length, window=window, mesh=mesh, dtype=dtype
    )
    if name == "auto":
        fastest = {"tpu": "fused", "gpu": "cudnn"}.get(mesh.devices.flat[0].platform, "xla")
        return "xla" if reason_of(fastest) else fastest
    if reason := reason_of(name):
        raise InputError(
            f"config.model.attention = {name}: the kernel does not support {reason}; use another, or auto."
        )
    return name


def dropout_rate(config: PretrainedConfig) -> float:
    """Returns the dropout rate of the attention's probabilities, by either of transformers' names."""
    return getattr(config, "attention_dropout", None) or getattr(
        config, "attention_probs_dropout_prob", 0.0
    )


def unsupported(
    name: str, config: PretrainedConfig, *, length: int, window: int, mesh: Mesh, dtype: str
) -> str | None:
    """Returns what the kernel does not support of this model on these devices, None if it supports it."""
    device = mesh.devices.flat[0]
    heads = config.num_attention_heads
    head_size = config.hidden_size // heads
    rate = dropout_rate(config)
    if name == "cudnn":
        if device.platform != "gpu":
            return f"a {device.platform.upper()}, only NVIDIA GPUs"
        if getattr(device, "compute_capability", "8")[0] in "67":
            return f"a {device.device_kind}, only GPUs since Ampere"
        if rate > 0:
            return f"dropout (model.attention_dropout = {rate})"
        if dtype != "bfloat16":
            return f"{dtype}, only bfloat16"
        if head_size % 8 or head_size > 128:
            return f"heads of {head_size}, only multiples of 8 up to 128"
        return f"rows of {length} tokens, only even numbers" if length % 2 else None
    if name != "fused":
        return None
    on_device = heads // mesh.shape["tensor"]
    if heads % mesh.shape["tensor"]:
        return f"{heads} heads over mesh.tensor = {mesh.shape['tensor']}, only whole heads"
    if device.platform == "gpu":
        return "a GPU, only TPUs"
    if device.platform == "tpu" and dtype != "bfloat16":
        return f"{dtype}, only bfloat16"
    from mlm.model import fused_attention  # Pallas takes a quarter of a second

    return fused_attention.unsupported(
        device.device_kind, length, window, rate, on_device, head_size
    )


# Plain jax -----------------------------------------------------------------------------------------------------------


def xla(
    q_BxLxH: Array,
    k_BxLxH: Array,
    v_BxLxH: Array,
    segments_BxL: Array,
    *,
    heads: int,
    window: int = 0,
    isolated: bool = False,
    dropout_mask_LxL: Array | None = None,
    rotation: Rotation | None = None,
    **_: Any,
) -> Array:
    """Attention in plain jax; with a window, in blocks where that spares work (Beltagy et al., 2020, Longformer)."""
    q_BxLxH, k_BxLxH = _rotated(q_BxLxH, k_BxLxH, rotation)
    weigh = functools.partial(_weigh, heads=heads)
    if 0 < 3 * window < q_BxLxH.shape[1]:
        return _in_blocks(
            weigh,
            q_BxLxH,
            k_BxLxH,
            v_BxLxH,
            segments_BxL,
            dropout_mask_LxL,
            window,
            window,
            isolated,
        )
    allowed = allowed_keys(segments_BxL, segments_BxL, isolated, window)
    return weigh(q_BxLxH, k_BxLxH, v_BxLxH, allowed, dropout_mask_LxL)


def allowed_keys(
    queries_BxQ: Array, keys_BxK: Array, isolated: bool, window: int = 0, first: int = 0
) -> Array:
    """Returns which keys each query attends to, bool, broadcastable to [B, 1, Q, K], given the segments of both.

    Key `first` is at query 0.
    """
    allowed = (keys_BxK > 0)[:, None, None, :]
    if isolated:
        allowed = allowed & (queries_BxQ[:, None, :, None] == keys_BxK[:, None, None, :])
    if window:
        query_Q = jnp.arange(queries_BxQ.shape[1], dtype=jnp.int32)
        key_K = jnp.arange(keys_BxK.shape[1], dtype=jnp.int32)
        allowed = allowed & (jnp.abs(query_Q[:, None] + first - key_K) <= window)
    return allowed


def _rotated(q_BxLxH: Array, k_BxLxH: Array, rotation: Rotation | None) -> tuple[Array, Array]:
    if rotation is None:
        return q_BxLxH, k_BxLxH
    return rotate(q_BxLxH, *rotation), rotate(k_BxLxH, *rotation)


def _weigh(q_BxQxH, k_BxKxH, v_BxKxH, allowed_Bx1xQxK, dropout_mask, *, heads: int) -> Array:
    """Attention to the allowed keys; `dropout_mask` is [K, Q], or [B, 1, K, Q], or None."""
    q, k, v = _split_heads(heads, q_BxQxH, k_BxKxH, v_BxKxH)
    bias = jnp.where(allowed_Bx1xQxK, 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    scores_BxNxQxK = jnp.einsum("bqnd,bknd->bnqk", q / math.sqrt(q.shape[-1]), k) + bias
    probs_BxNxQxK = jax.nn.softmax(scores_BxNxQxK)
    if dropout_mask is not None:
        probs_BxNxQxK = probs_BxNxQxK * dropout_mask.mT
    return jnp.einsum("bnqk,bknd->bqnd", probs_BxNxQxK, v).reshape(q_BxQxH.shape)


def _split_heads(heads: int, *arrays_BxLxH: Array) -> list[Array]:
    return [x.reshape(*x.shape[:2], heads, -1) for x in arrays_BxLxH]


def _in_blocks(
    weigh,
    q_BxLxH,
    k_BxLxH,
    v_BxLxH,
    segments_BxL,
    dropout_mask_LxL,
    window: int,
    block: int,
    isolated: bool,
) -> Array:
    """Local attention: each block of queries attends to its own keys and to `window` (at most `block`) on both sides.

    `weigh` is called once, with the blocks of all rows as its rows.
    """
    rows, length = segments_BxL.shape
    count = -(-length // block)
    rest = count * block - length

    def queries_of(x_BxL: Array) -> Array:
        """Returns each block's tokens, 0 beyond the row."""
        padded = jnp.pad(x_BxL, [(0, 0), (0, rest), *[(0, 0)] * (x_BxL.ndim - 2)])
        return padded.reshape(rows * count, block, *x_BxL.shape[2:])

    def keys_of(x_BxL: Array) -> Array:
        """Returns each block's tokens and those of the window on both sides, 0 beyond the row."""
        padded = jnp.pad(x_BxL, [(0, 0), (block, block + rest), *[(0, 0)] * (x_BxL.ndim - 2)])
        padded = padded.reshape(rows, count + 2, block, *x_BxL.shape[2:])
        before = padded[:, :count, block - window :]
        after = padded[:, 2:, :window]
        near = jnp.concatenate([before, padded[:, 1:-1], after], axis=2)
        return near.reshape(rows * count, block + 2 * window, *x_BxL.shape[2:])

    dropout_mask = None
    if dropout_mask_LxL is not None:
        padded = jnp.pad(dropout_mask_LxL, [(window, window + rest), (0, rest)])
        cut = jax.vmap(
            lambda start: jax.lax.dynamic_slice(padded, (start, start), (block + 2 * window, block))
        )
        dropout_mask = jnp.tile(cut(jnp.arange(0, length, block, dtype=jnp.int32)), (rows, 1, 1))[
            :, None
        ]
    allowed = allowed_keys(
        queries_of(segments_BxL), keys_of(segments_BxL), isolated, window, first=window
    )
    context = weigh(queries_of(q_BxLxH), keys_of(k_BxLxH), keys_of(v_BxLxH), allowed, dropout_mask)
    return context.reshape(rows, count * block, -1)[:, :length]


# GPU -----------------------------------------------------------------------------------------------------------------


def cudnn(
    q_BxLxH: Array,
    k_BxLxH: Array,
    v_BxLxH: Array,
    segments_BxL: Array,
    *,
    heads: int,
    window: int = 0,
    isolated: bool = False,
    rotation: Rotation | None = None,
    padding: str = "any",
    implementation: str = "cudnn",
    **_: Any,
) -> Array:
    """Attention by cuDNN, which turns a mask into a bias as large as the scores, so it gets one only where it must.

    Rows without padding need none, and rows that are padded at their end say how long they are. Isolated documents need
    a mask: `jax.nn.dot_product_attention` has no packed layout (jax 0.10 to 0.12), though cuDNN has. With a window, the
    kernel gets blocks of queries with the keys around them, and a mask of a block's size.
    """
    q_BxLxH, k_BxLxH = _rotated(q_BxLxH, k_BxLxH, rotation)
    if padding == "none" and not isolated:
        # known here, so nothing of the mask depends on the batch
        segments_BxL = jnp.ones_like(segments_BxL)

    def weigh(q_BxQxH, k_BxKxH, v_BxKxH, allowed_Bx1xQxK=None, _=None, lengths_B=None):
        if allowed_Bx1xQxK is not None:
            shape = (len(q_BxQxH), 1, q_BxQxH.shape[1], k_BxKxH.shape[1])
            # cuDNN broadcasts heads alone
            allowed_Bx1xQxK = jnp.broadcast_to(allowed_Bx1xQxK, shape)
        context = jax.nn.dot_product_attention(
            *_split_heads(heads, q_BxQxH, k_BxKxH, v_BxKxH),
            mask=allowed_Bx1xQxK,
            query_seq_lengths=lengths_B,
            key_value_seq_lengths=lengths_B,
            implementation=implementation,
        )
        return context.reshape(q_BxQxH.shape)

    block = max(CUDNN_BLOCK, window + window % 2)  # even, as cuDNN needs it with a mask
    if window and block + 2 * window < q_BxLxH.shape[1]:
        return _in_blocks(
            weigh, q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, None, window, block, isolated
        )
    if window or isolated or padding == "any":
        return weigh(
            q_BxLxH, k_BxLxH, v_BxLxH, allowed_keys(segments_BxL, segments_BxL, isolated, window)
        )
    if padding == "none":
        return weigh(q_BxLxH, k_BxLxH, v_BxLxH)
    # A row of padding alone, which fills up a batch, reads one token: it has no weight, but must stay finite.
    lengths_B = jnp.maximum(jnp.sum(segments_BxL > 0, axis=1, dtype=jnp.int32), 1)
    return weigh(q_BxLxH, k_BxLxH, v_BxLxH, lengths_B=lengths_B)


# TPU -----------------------------------------------------------------------------------------------------------------


def fused(
    q_BxLxH: Array,
    k_BxLxH: Array,
    v_BxLxH: Array,
    segments_BxL: Array,
    *,
    mesh: Mesh,
    heads: int,
    window: int = 0,
    isolated: bool = False,
    dropout_mask_LxL: Array | None = None,
    rotation: Rotation | None = None,
    **_: Any,
) -> Array:
    """Our Pallas kernel, split over rows and heads with shard_map, inside a caller's shard_map too."""
    from mlm.model import fused_attention

    on_device = heads // mesh.shape["tensor"]
    kind = mesh.devices.flat[0].device_kind

    def kernel(*arrays: Array | Rotation | None) -> Array:
        return fused_attention.attend(*arrays, on_device, isolated, window, kind)

    arrays = (q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation)
    outer = jax.sharding.get_abstract_mesh()
    # that no caller has split
    axes = [axis for axis in mesh.axis_names if axis not in outer.manual_axes]
    if not axes:
        return kernel(*arrays)
    row_axes = tuple(axis for axis in ("data", "fsdp") if axis in axes)
    rows = jax.P(row_axes, None, "tensor" if "tensor" in axes else None)
    angles = jax.P() if rotation is None or len(rotation[0]) == 1 else jax.P(row_axes)
    split = jax.shard_map(
        kernel,
        mesh=outer if outer.manual_axes else mesh,
        in_specs=(rows, rows, rows, jax.P(row_axes, None), jax.P(), angles),
        out_specs=rows,
        axis_names=set(axes),
        check_vma=False,
    )
    return split(*arrays)


KERNELS = {"xla": xla, "fused": fused, "cudnn": cudnn}
