"""Attention is one call, `attend(q, k, v, segments, ...)`, which each layer makes; here are the kernels that answer it.

    xla     plain jax, on any device
    fused   our Pallas kernel for TPU: bfloat16, rows up to 8,192 tokens, with dropout up to 512
    cudnn   cuDNN's kernel for GPU: bfloat16, no dropout
    auto    fused on a TPU and cudnn on a GPU if they support the model, else xla (measured: mlm/bench/README.md)

To add one, write it as `xla`, list it in KERNELS, and say in `unsupported` what it does not support.

Dimensions: B rows, L tokens in a row, Q queries, K keys, H hidden size = N heads x head size.
"""

import itertools
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
    platform = mesh.devices.flat[0].platform
    fastest = {"tpu": "fused", "gpu": "cudnn"}.get(platform, "xla") if name == "auto" else name
    chosen = {}
    for length, window in itertools.product(lengths, windows):
        reason = unsupported(fastest, config, length=length, window=window, mesh=mesh, dtype=dtype)
        if reason and name != "auto":
            raise InputError(
                f"config.model.attention = {name}: the kernel does not support {reason}; use another, or auto."
            )
        chosen[length, window] = "xla" if reason else fastest

    def attend(q_BxLxH: Array, *arrays: Array, window: int, **settings: Any) -> Array:
        kernel = KERNELS[chosen[q_BxLxH.shape[1], window]]
        return kernel(q_BxLxH, *arrays, window=window, mesh=mesh, padding=padding, **settings)

    return attend


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
    window: int = 0,
    **settings: Any,
) -> Array:
    """Attention in plain jax."""
    arrays = (q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL)
    return _attend(_weigh, *arrays, window=window, block=window, **settings)


def _weigh(q, k, v, allowed_Bx1xQxK: Array, dropout_mask: Array | None) -> Array:
    bias = jnp.where(allowed_Bx1xQxK, 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    scores_BxNxQxK = jnp.einsum("bqnd,bknd->bnqk", q / math.sqrt(q.shape[-1]), k) + bias
    probs_BxNxQxK = jax.nn.softmax(scores_BxNxQxK)
    if dropout_mask is not None:
        probs_BxNxQxK = probs_BxNxQxK * dropout_mask.mT
    return jnp.einsum("bnqk,bknd->bqnd", probs_BxNxQxK, v)


def _attend(
    weigh: Callable[..., Array],
    q_BxLxH: Array,
    k_BxLxH: Array,
    v_BxLxH: Array,
    segments_BxL: Array,
    *,
    heads: int,
    window: int,
    block: int,
    isolated: bool = False,
    dropout_mask_LxL: Array | None = None,
    rotation: Rotation | None = None,
    **_: Any,
) -> Array:
    """Attention by `weigh(q, k, v, allowed, dropout_mask)`; with a window, in blocks where that spares work.

    `weigh` gets q, k and v as [B, L, heads, D]. Its masks are [B, 1, Q, K], and [K, Q] or [B, 1, K, Q] or None.
    """
    if rotation is not None:
        q_BxLxH = rotate(q_BxLxH, *rotation)
        k_BxLxH = rotate(k_BxLxH, *rotation)
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxLxH, k_BxLxH, v_BxLxH))
    if window and block + 2 * window < segments_BxL.shape[1]:
        return _attend_in_blocks(
            weigh,
            q,
            k,
            v,
            segments_BxL,
            window=window,
            block=block,
            isolated=isolated,
            dropout_mask_LxL=dropout_mask_LxL,
        )
    allowed = _allowed(segments_BxL, segments_BxL, isolated, window)
    return weigh(q, k, v, allowed, dropout_mask_LxL).reshape(q_BxLxH.shape)


def _attend_in_blocks(
    weigh: Callable[..., Array],
    q: Array,
    k: Array,
    v: Array,
    segments_BxL: Array,
    *,
    window: int,
    block: int,
    isolated: bool,
    dropout_mask_LxL: Array | None,
) -> Array:
    """Each block of queries attends to its own keys and to `window` (at most `block`) on both sides.

    As in Longformer (Beltagy et al., 2020). `weigh` is called once: the blocks of all rows are its rows.
    """
    rows, length = segments_BxL.shape
    count = -(-length // block)
    rest = count * block - length

    def blocks(x_BxL: Array, reach: int) -> Array:
        """Returns each block's tokens and `reach` on both sides, 0 beyond the row."""
        outside = block if reach else 0
        padding = [(0, 0), (outside, outside + rest), *[(0, 0)] * (x_BxL.ndim - 2)]
        padded = jnp.pad(x_BxL, padding).reshape(rows, -1, block, *x_BxL.shape[2:])
        if reach:
            before = padded[:, :-2, block - reach :]
            after = padded[:, 2:, :reach]
            padded = jnp.concatenate([before, padded[:, 1:-1], after], axis=2)
        return padded.reshape(rows * count, -1, *x_BxL.shape[2:])

    dropout_mask = None
    if dropout_mask_LxL is not None:
        padded = jnp.pad(dropout_mask_LxL, [(window, window + rest), (0, rest)])
        size = (block + 2 * window, block)
        cut = jax.vmap(lambda start: jax.lax.dynamic_slice(padded, (start, start), size))
        masks = cut(jnp.arange(0, length, block, dtype=jnp.int32))
        dropout_mask = jnp.tile(masks, (rows, 1, 1))[:, None]
    keys = blocks(segments_BxL, window)
    allowed = _allowed(blocks(segments_BxL, 0), keys, isolated, window, first=window)
    context = weigh(blocks(q, 0), blocks(k, window), blocks(v, window), allowed, dropout_mask)
    return context.reshape(rows, count * block, -1)[:, :length]


def _allowed(
    queries_BxQ: Array, keys_BxK: Array, isolated: bool, window: int, first: int = 0
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


# GPU -----------------------------------------------------------------------------------------------------------------


def cudnn(
    q_BxLxH: Array,
    k_BxLxH: Array,
    v_BxLxH: Array,
    segments_BxL: Array,
    *,
    window: int = 0,
    isolated: bool = False,
    padding: str = "any",
    implementation: str = "cudnn",
    **settings: Any,
) -> Array:
    """Attention by cuDNN, which turns a mask into a bias as large as the scores, so it gets one only where it must.

    Rows without padding need none, and rows that are padded at their end say how long they are. Isolated documents need
    a mask: `jax.nn.dot_product_attention` has no packed layout (jax 0.10 to 0.12), though cuDNN has. With a window, the
    kernel gets blocks of queries with the keys around them, and a mask of a block's size.
    """
    if padding == "none" and not isolated:
        # known here, so nothing of the mask depends on the batch
        segments_BxL = jnp.ones_like(segments_BxL)
    needs_mask = window or isolated or padding == "any"
    lengths_B = None
    if padding == "end" and not needs_mask:
        # A row of padding alone, which fills up a batch, reads one token: it has no weight, but must stay finite.
        lengths_B = jnp.maximum(jnp.sum(segments_BxL > 0, axis=1, dtype=jnp.int32), 1)

    def weigh(q, k, v, allowed_Bx1xQxK: Array, _: None) -> Array:
        # cuDNN broadcasts heads alone
        shape = (len(q), 1, q.shape[1], k.shape[1])
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=jnp.broadcast_to(allowed_Bx1xQxK, shape) if needs_mask else None,
            query_seq_lengths=lengths_B,
            key_value_seq_lengths=lengths_B,
            implementation=implementation,
        )

    # even, as cuDNN needs it with a mask
    block = max(CUDNN_BLOCK, window + window % 2)
    arrays = (q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL)
    return _attend(weigh, *arrays, window=window, block=block, isolated=isolated, **settings)


# TPU -----------------------------------------------------------------------------------------------------------------


def fused(
    *arrays: Array,
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

    kind = mesh.devices.flat[0].device_kind
    settings = fused_attention.Settings(heads // mesh.shape["tensor"], isolated, window, kind)
    outer = jax.sharding.get_abstract_mesh()
    # that no caller has split
    axes = set(mesh.axis_names).difference(outer.manual_axes)
    row_axes = tuple(axis for axis in ("data", "fsdp") if axis in axes)
    rows = jax.P(row_axes, None, "tensor" if "tensor" in axes else None)
    angles = jax.P() if rotation is None or len(rotation[0]) == 1 else jax.P(row_axes)

    def kernel(*arrays: Array | Rotation | None) -> Array:
        return fused_attention.attend(*arrays, settings)

    if axes:
        kernel = jax.shard_map(
            kernel,
            mesh=outer if outer.manual_axes else mesh,
            in_specs=(rows, rows, rows, jax.P(row_axes, None), jax.P(), angles),
            out_specs=rows,
            axis_names=axes,
            check_vma=False,
        )
    return kernel(*arrays, dropout_mask_LxL, rotation)


KERNELS = {"xla": xla, "fused": fused, "cudnn": cudnn}
