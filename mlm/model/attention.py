"""Attention kernels behind one signature, each of which computes what transformers' FlaxRobertaSelfAttention does.

    xla     plain jax, as flax computes it, on any device
    fused   our Pallas kernel for TPU: bfloat16, rows up to 512 tokens, with dropout
    tiled   our Pallas kernel for TPU: bfloat16, long rows and windows, rotary positions, no dropout
    splash  jax's Pallas kernel for TPU: long rows, no dropout
    cudnn   cuDNN's kernel for GPU: bfloat16, no dropout
    auto    on a TPU the first of fused, tiled, splash and xla that supports the model, with windows or rotary positions
            tiled before fused, as it costs less; xla elsewhere (no GPU was measured)

To add one, write a function like `_xla`, add it to `KERNELS`, and say in `_unsupported` what it does not support.

Each attends to the whole row, or to a window around each token (Beltagy et al., 2020, Longformer, 3.1): xla, tiled and
splash then compute little more than the window, fused and cudnn the whole row.

Dimensions: B rows, L tokens, H hidden size = N heads x D head size D, C tokens in a block.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh
from transformers import PretrainedConfig

from mlm.errors import InputError
from mlm.model import fused_attention, tiled_attention

Rotation = tuple[Array, Array]  # cosine and sine of the angles, [B or 1, L, D / 2]

# (q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL or None, rotation or None) -> context_BxLxH. Segments are
# int32: the document of each token, 0 for padding. The probabilities of all rows and heads are multiplied by one mask,
# keys x queries. Queries and keys are rotated first.
Attention = Callable[[Array, Array, Array, Array, Array | None, Rotation | None], Array]


def make_attention(
    name: str,
    config: PretrainedConfig,
    *,
    length: int,
    mesh: Mesh,
    dtype: str,
    isolated: bool = False,
    window: int = 0,
) -> Attention:
    """Returns the attention for rows of `length` tokens; raises InputError if the kernel does not support them."""
    name = choose(name, config, length=length, mesh=mesh, dtype=dtype, window=window)
    return make_kernel(name, heads=config.num_attention_heads, mesh=mesh, isolated=isolated, window=window)


def dropout_rate(config: PretrainedConfig) -> float:
    """Returns the dropout rate of the attention's probabilities, by either of transformers' names."""
    return getattr(config, "attention_dropout", None) or getattr(config, "attention_probs_dropout_prob", 0.0)


def choose(name: str, config: PretrainedConfig, *, length: int, mesh: Mesh, dtype: str, window: int = 0) -> str:
    """Returns the kernel's name: `name` itself, or for "auto" the fastest one that supports the model."""
    unsupported = functools.partial(_unsupported, config=config, length=length, mesh=mesh, dtype=dtype, window=window)
    if name == "auto":
        is_rotated = hasattr(config, "global_rope_theta")
        ours = ("tiled", "fused") if window or is_rotated else ("fused", "tiled")
        candidates = (*ours, "splash") if mesh.devices.flat[0].platform == "tpu" else ()
        return next((each for each in candidates if not unsupported(each)), "xla")
    if what := unsupported(name):
        raise InputError(f"config.model.attention = {name}: the kernel does not support {what}; use another, or auto.")
    return name


def _unsupported(name: str, config: PretrainedConfig, length: int, mesh: Mesh, dtype: str, window: int) -> str | None:
    """Returns what the kernel does not support of this model on these devices, None if it supports it."""
    device, tensor = mesh.devices.flat[0], mesh.shape["tensor"]
    heads, dropout = config.num_attention_heads, dropout_rate(config)
    platform, is_pallas = device.platform, name in PALLAS
    reasons = {
        f"{heads} heads over mesh.tensor = {tensor}, only whole heads": is_pallas and heads % tensor,
        "a GPU, only TPUs": is_pallas and platform == "gpu",
        f"a {platform.upper()}, only NVIDIA GPUs": name == "cudnn" and platform != "gpu",
        f"dropout (model.attention_dropout = {dropout})": name in ("tiled", "splash", "cudnn") and dropout > 0,
        f"rows of {length} tokens, only multiples of 128": name == "splash" and length % 128,
        f"{dtype}, only bfloat16": dtype != "bfloat16" and (name, platform) in BFLOAT16,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    shard = heads // tensor, config.hidden_size // heads
    if name == "tiled":
        return tiled_attention.unsupported(device.device_kind, length, window, *shard)
    return fused_attention.unsupported(device.device_kind, length, *shard) if name == "fused" else None


def make_kernel(
    name: str, *, heads: int, mesh: Mesh | None = None, isolated: bool = False, window: int = 0
) -> Attention:
    """Returns the kernel `name`, `heads` in all split over the mesh.

    `isolated` is to attend within documents alone, `window` to so many tokens to each side; 0 for the whole row.
    """
    settings = {"isolated": isolated, "window": window}
    if name not in PALLAS:  # the compiler splits it
        return functools.partial(_rotated, functools.partial(KERNELS[name], heads=heads, **settings))
    num_shards, kind = (1, "cpu") if mesh is None else (mesh.shape["tensor"], mesh.devices.flat[0].device_kind)
    kernel = functools.partial(KERNELS[name], heads=heads // num_shards, kind=kind, **settings)
    kernel = kernel if name == "tiled" else functools.partial(_rotated, kernel)
    return kernel if mesh is None else functools.partial(_split, kernel, mesh)


def _rotated(kernel: Callable[..., Array], *args: Array | None, **settings: str) -> Array:
    """Calls a kernel that does not rotate."""
    q_BxLxH, k_BxLxH, *rest, rotation = args
    if rotation is not None:
        q_BxLxH, k_BxLxH = (rotate(x, *rotation) for x in (q_BxLxH, k_BxLxH))
    return kernel(q_BxLxH, k_BxLxH, *rest, **settings)


def rotate(x_BxLxH: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions (Su et al., 2021, RoFormer): a head's first and second half are the planes' two coordinates."""
    rows, length, _ = x_BxLxH.shape
    halves = x_BxLxH.astype(jnp.float32).reshape(rows, length, -1, 2, cos.shape[-1])
    first, second = halves[..., 0, :], halves[..., 1, :]
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return rotated.reshape(x_BxLxH.shape).astype(x_BxLxH.dtype)


def _split(kernel: Attention, mesh: Mesh, *args: Array | Rotation | None) -> Array:
    """Runs a kernel on each device's rows and heads, inside a caller's shard_map too."""
    outer = jax.sharding.get_abstract_mesh()
    axes = [axis for axis in mesh.axis_names if axis not in outer.manual_axes]  # that no caller has split
    if not axes:
        return kernel(*args)
    row_axes = tuple(axis for axis in ("data", "fsdp") if axis in axes)
    rows = jax.P(row_axes, None, "tensor" if "tensor" in axes else None)
    angles = jax.P() if args[-1] is None or len(args[-1][0]) == 1 else jax.P(row_axes)
    specs = {"in_specs": (rows, rows, rows, jax.P(row_axes, None), jax.P(), angles), "out_specs": rows}
    mesh = outer if outer.manual_axes else mesh
    return jax.shard_map(kernel, mesh=mesh, axis_names=set(axes), check_vma=False, **specs)(*args)


def _xla(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, *, heads, isolated, window):
    length = q_BxLxH.shape[1]
    if window and 3 * window < length:
        attend = functools.partial(_blocks, heads=heads, isolated=isolated, window=window)
        return attend(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL)
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxLxH, k_BxLxH, v_BxLxH))
    bias = jnp.where(_allowed(segments_BxL, isolated, window), 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    scores_BxNxQxK = jnp.einsum("bqnd,bknd->bnqk", q / math.sqrt(q.shape[-1]), k) + bias
    probs_BxNxQxK = jax.nn.softmax(scores_BxNxQxK)
    if dropout_mask_LxL is not None:
        probs_BxNxQxK = probs_BxNxQxK * dropout_mask_LxL.T
    return jnp.einsum("bnqk,bknd->bqnd", probs_BxNxQxK, v).reshape(q_BxLxH.shape)


def _blocks(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, *, heads, isolated, window):
    """Each block of `window` queries reads its own keys and those of the two blocks beside it: one of S blocks of C."""
    rows, length, _ = q_BxLxH.shape
    count = -(-length // window)
    shape = (rows, count, window, heads, -1)
    end = [(0, count * window - length)]
    q = jnp.pad(q_BxLxH, [(0, 0), *end, (0, 0)]).reshape(shape)

    def neighbours(x_BxL: Array, axis: int = 1) -> Array:
        """Returns [..., S, 3C, ...]: what each block reads, 0 beyond the row."""
        padding = [(0, 0)] * x_BxL.ndim
        padding[axis] = (window, window + end[0][1])
        padded = jnp.pad(x_BxL, padding)
        parts = [jax.lax.slice_in_dim(padded, i * window, (i + count) * window, axis=axis) for i in range(3)]
        split = (*x_BxL.shape[:axis], count, window, *x_BxL.shape[axis + 1 :])
        return jnp.concatenate([part.reshape(split) for part in parts], axis=axis + 1)

    k, v = (neighbours(x).reshape(rows, count, 3 * window, heads, -1) for x in (k_BxLxH, v_BxLxH))
    keys_BxSxK = neighbours(segments_BxL)
    near_CxK = jnp.abs(jnp.arange(window)[:, None] + window - jnp.arange(3 * window)) <= window
    allowed_BxSxQxK = (keys_BxSxK > 0)[:, :, None] & near_CxK
    if isolated:
        queries_BxSxQ = jnp.pad(segments_BxL, [(0, 0), *end]).reshape(rows, count, window)
        allowed_BxSxQxK &= queries_BxSxQ[..., None] == keys_BxSxK[:, :, None]
    bias = jnp.where(allowed_BxSxQxK, 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    probs = jax.nn.softmax(jnp.einsum("bsqnd,bsknd->bsnqk", q / math.sqrt(q.shape[-1]), k) + bias[:, :, None])
    if dropout_mask_LxL is not None:  # keys x queries
        own = jnp.pad(dropout_mask_LxL, [(0, 0), *end]).reshape(length, count, window).swapaxes(0, 1)
        by_block = neighbours(own, axis=1)[jnp.arange(count), jnp.arange(count)]
        probs = probs * by_block.swapaxes(1, 2)[:, None]
    context = jnp.einsum("bsnqk,bsknd->bsqnd", probs, v)
    return context.reshape(rows, count * window, -1)[:, :length]


def _splash(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, *, heads, isolated, window, kind):
    length = q_BxLxH.shape[1]
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = splash.BlockSizes(**dict.fromkeys(names, math.gcd(length, 512)), use_fused_bwd_kernel=True)
    near = splash.LocalMask((length, length), (window, window), offset=0) if window else splash.FullMask((length,) * 2)
    mask = splash.MultiHeadMask([near] * heads)
    interpret = not kind.startswith("TPU")
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
    q, k, v = (jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1), 1, 2) for x in (q_BxLxH, k_BxLxH, v_BxLxH))
    # It attends within a document: all tokens become one, padding another one, whose context nothing reads.
    documents_BxL = segments_BxL if isolated else jnp.minimum(segments_BxL, 1)
    segment_ids = splash.SegmentIds(q=documents_BxL, kv=documents_BxL)
    context_BxNxLxD = jax.vmap(kernel)(q / math.sqrt(q.shape[-1]), k, v, segment_ids)
    return jnp.moveaxis(context_BxNxLxD, 2, 1).reshape(q_BxLxH.shape)


def _cudnn(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, _, *, heads, isolated, window, implementation="cudnn"):
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxLxH, k_BxLxH, v_BxLxH))
    mask_Bx1xQxK = jnp.broadcast_to(_allowed(segments_BxL, isolated, window), (len(q), 1, q.shape[1], q.shape[1]))
    context = jax.nn.dot_product_attention(q, k, v, mask=mask_Bx1xQxK, implementation=implementation)
    return context.reshape(q_BxLxH.shape)


KERNELS = {"xla": _xla, "fused": fused_attention.attend, "tiled": tiled_attention.attend}
KERNELS |= {"splash": _splash, "cudnn": _cudnn}
PALLAS = ("fused", "tiled", "splash")
BFLOAT16 = (("cudnn", "gpu"), ("fused", "tpu"), ("tiled", "tpu"))  # (kernel, platform) that have nothing else


def _allowed(segments_BxL: Array, isolated: bool, window: int) -> Array:
    """Returns which keys each query attends to, bool, broadcastable to [B, 1, queries, keys]."""
    allowed = (segments_BxL > 0)[:, None, None, :]
    if isolated:
        allowed = allowed & (segments_BxL[:, None, :, None] == segments_BxL[:, None, None, :])
    if window:
        place_L = jnp.arange(segments_BxL.shape[1])
        allowed = allowed & (jnp.abs(place_L[:, None] - place_L) <= window)
    return allowed
