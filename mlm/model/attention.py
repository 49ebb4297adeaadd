"""Attention kernels behind one signature, each of which computes what transformers' models do.

    xla     plain jax, as flax computes it, on any device
    fused   our Pallas kernel for TPU: bfloat16, rows up to 8,192 tokens, with dropout up to 512
    cudnn   cuDNN's kernel for GPU: bfloat16, no dropout
    auto    fused on a TPU and cudnn on a GPU if they support the model, else xla (measured: mlm/bench/README.md)

To add one, write a function like `_xla`, add it to `KERNELS`, and say in `unsupported` what it does not support.

Each attends to the whole row, or only to a window around each token (Beltagy et al., 2020, Longformer, 3.1). With a
window, fused computes little more than that; so does xla if a row is longer than three times `window` (tokens to each
side); cudnn computes the whole row.

Dimensions: B rows, L tokens, H hidden size = N heads x head size D, Q queries, K keys.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from transformers import PretrainedConfig

from mlm.errors import InputError

Rotation = tuple[Array, Array]  # cosine and sine of the angles, [B or 1, L, D / 2]

# (q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL or None, rotation or None) -> context_BxLxH. Segments are
# int32: the document of each token, 0 for padding. The probabilities of all rows and heads are multiplied by one mask,
# keys x queries. Queries and keys are rotated first.
Attention = Callable[[Array, Array, Array, Array, Array | None, Rotation | None], Array]


def make_attention(
    name: str, config: PretrainedConfig, *, length: int, mesh: Mesh, dtype: str, isolated: bool = False, window: int = 0
) -> Attention:
    """Returns the attention for rows of `length` tokens; raises InputError if the kernel does not support them."""
    name = choose(name, config, length=length, mesh=mesh, dtype=dtype, window=window)
    return make_kernel(name, heads=config.num_attention_heads, mesh=mesh, isolated=isolated, window=window)


def dropout_rate(config: PretrainedConfig) -> float:
    """Returns the dropout rate of the attention's probabilities, by either of transformers' names."""
    return getattr(config, "attention_dropout", None) or getattr(config, "attention_probs_dropout_prob", 0.0)


def choose(name: str, config: PretrainedConfig, *, length: int, mesh: Mesh, dtype: str, window: int = 0) -> str:
    """Returns the kernel's name: `name` itself, or for "auto" the fastest one that supports the model."""
    reason_of = functools.partial(unsupported, config=config, length=length, mesh=mesh, dtype=dtype, window=window)
    if name == "auto":
        fastest = {"tpu": "fused", "gpu": "cudnn"}.get(mesh.devices.flat[0].platform, "xla")
        return "xla" if reason_of(fastest) else fastest
    if reason := reason_of(name):
        raise InputError(
            f"config.model.attention = {name}: the kernel does not support {reason}; use another, or auto."
        )
    return name


def unsupported(name: str, config: PretrainedConfig, length: int, mesh: Mesh, dtype: str, window: int) -> str | None:
    """Returns what the kernel does not support of this model on these devices, None if it supports it."""
    device, tensor = mesh.devices.flat[0], mesh.shape["tensor"]
    heads, dropout, head_size = (
        config.num_attention_heads,
        dropout_rate(config),
        config.hidden_size // config.num_attention_heads,
    )
    platform, is_fused, is_cudnn = device.platform, name == "fused", name == "cudnn"
    needs_bfloat16 = (is_fused and platform == "tpu") or (is_cudnn and platform == "gpu")
    reasons = {
        f"{heads} heads over mesh.tensor = {tensor}, only whole heads": is_fused and heads % tensor,
        "a GPU, only TPUs": is_fused and platform == "gpu",
        f"a {platform.upper()}, only NVIDIA GPUs": is_cudnn and platform != "gpu",
        f"dropout (model.attention_dropout = {dropout})": is_cudnn and dropout > 0,
        f"{dtype}, only bfloat16": needs_bfloat16 and dtype != "bfloat16",
        f"a {device.device_kind}, only GPUs since Ampere": is_cudnn
        and getattr(device, "compute_capability", "8")[0] in "67",
        f"heads of {head_size}, only multiples of 8 up to 128": is_cudnn and (head_size % 8 or head_size > 128),
        f"rows of {length} tokens, only even numbers": is_cudnn and length % 2,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    if not is_fused:
        return None
    from mlm.model import fused_attention  # Pallas takes a quarter of a second

    return fused_attention.unsupported(
        device.device_kind, length, window, dropout, heads=heads // tensor, head_size=config.hidden_size // heads
    )


def make_kernel(
    name: str, *, heads: int, mesh: Mesh | None = None, isolated: bool = False, window: int = 0
) -> Attention:
    """Returns the kernel `name` for `heads` heads in all, split over the mesh.

    With `isolated`, tokens attend only within their document; `window` is in tokens to each side, 0 for the whole row.
    """
    if name != "fused":  # the compiler splits it
        kernel = functools.partial(KERNELS[name], heads=heads, isolated=isolated, window=window)
        return functools.partial(_rotated, kernel)
    from mlm.model import fused_attention

    attend = functools.partial(fused_attention.attend, isolated=isolated, window=window)
    if mesh is None:
        return functools.partial(attend, heads=heads, kind="cpu")
    kind = mesh.devices.flat[0].device_kind
    return functools.partial(_split, functools.partial(attend, heads=heads // mesh.shape["tensor"], kind=kind), mesh)


def _rotated(kernel, q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, rotation, **kwargs):
    """Rotates queries and keys, then calls a kernel that does not."""
    if rotation is not None:
        q_BxLxH, k_BxLxH = (rotate(x, *rotation) for x in (q_BxLxH, k_BxLxH))
    return kernel(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, **kwargs)


def rotate(x_BxLxH: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions (Su et al., 2021, RoFormer): a head's first and second half are the planes' two coordinates."""
    rows, length, _ = x_BxLxH.shape
    halves = x_BxLxH.astype(jnp.float32).reshape(rows, length, -1, 2, cos.shape[-1])
    first, second = halves[..., 0, :], halves[..., 1, :]
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return rotated.reshape(x_BxLxH.shape).astype(x_BxLxH.dtype)


def _split(kernel: Attention, mesh: Mesh, *args: Array | Rotation | None) -> Array:
    """Splits a kernel over rows and heads with shard_map, inside a caller's shard_map too."""
    outer = jax.sharding.get_abstract_mesh()
    axes = [axis for axis in mesh.axis_names if axis not in outer.manual_axes]  # that no caller has split
    if not axes:
        return kernel(*args)
    row_axes = tuple(axis for axis in ("data", "fsdp") if axis in axes)
    rows = jax.P(row_axes, None, "tensor" if "tensor" in axes else None)
    angles = jax.P() if args[-1] is None or len(args[-1][0]) == 1 else jax.P(row_axes)
    split = jax.shard_map(
        kernel,
        mesh=outer if outer.manual_axes else mesh,
        in_specs=(rows, rows, rows, jax.P(row_axes, None), jax.P(), angles),
        out_specs=rows,
        axis_names=set(axes),
        check_vma=False,
    )
    return split(*args)


def _xla(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, *, heads, isolated, window):
    if window and 3 * window < segments_BxL.shape[1]:
        return _blocks(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, heads, isolated, window)
    allowed = _allowed(segments_BxL, segments_BxL, isolated, window)
    return _weigh(q_BxLxH, k_BxLxH, v_BxLxH, allowed, dropout_mask_LxL, heads)


def _weigh(q_BxQxH, k_BxKxH, v_BxKxH, allowed_Bx1xQxK, dropout_mask, heads):
    """Attention to the allowed keys; `dropout_mask` is [K, Q], or [B, 1, K, Q], or None."""
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxQxH, k_BxKxH, v_BxKxH))
    bias = jnp.where(allowed_Bx1xQxK, 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    scores_BxNxQxK = jnp.einsum("bqnd,bknd->bnqk", q / math.sqrt(q.shape[-1]), k) + bias
    probs_BxNxQxK = jax.nn.softmax(scores_BxNxQxK)
    if dropout_mask is not None:
        probs_BxNxQxK = probs_BxNxQxK * dropout_mask.mT
    return jnp.einsum("bnqk,bknd->bqnd", probs_BxNxQxK, v).reshape(q_BxQxH.shape)


def _blocks(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, dropout_mask_LxL, heads, isolated, window):
    """Local attention: a block of `window` queries attends to the keys of that block and of both adjacent ones."""
    rows, length = segments_BxL.shape
    count = -(-length // window)

    def blocks(x_BxL: Array, beside: int) -> Array:
        """Returns each block's tokens and those of `beside` blocks on both sides, 0 beyond the row."""
        ends = (beside * window, (beside + count) * window - length)
        padded = jnp.pad(x_BxL, [(0, 0), ends, *[(0, 0)] * (x_BxL.ndim - 2)])
        padded = padded.reshape(rows, count + 2 * beside, window, *x_BxL.shape[2:])
        near = jnp.concatenate([padded[:, i : i + count] for i in range(2 * beside + 1)], axis=2)
        return near.reshape(rows * count, -1, *x_BxL.shape[2:])

    dropout_mask = None
    if dropout_mask_LxL is not None:
        rest = count * window - length
        padded = jnp.pad(dropout_mask_LxL, [(window, window + rest), (0, rest)])
        cut = jax.vmap(lambda start: jax.lax.dynamic_slice(padded, (start, start), (3 * window, window)))
        dropout_mask = jnp.tile(cut(jnp.arange(0, length, window)), (rows, 1, 1))[:, None]
    allowed = _allowed(blocks(segments_BxL, 0), blocks(segments_BxL, 1), isolated, window, first=window)
    context = _weigh(blocks(q_BxLxH, 0), blocks(k_BxLxH, 1), blocks(v_BxLxH, 1), allowed, dropout_mask, heads)
    return context.reshape(rows, count * window, -1)[:, :length]


def _cudnn(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, _, *, heads, isolated, window, implementation="cudnn"):
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxLxH, k_BxLxH, v_BxLxH))
    allowed = _allowed(segments_BxL, segments_BxL, isolated, window)
    mask_Bx1xQxK = jnp.broadcast_to(allowed, (len(q), 1, q.shape[1], q.shape[1]))
    context = jax.nn.dot_product_attention(q, k, v, mask=mask_Bx1xQxK, implementation=implementation)
    return context.reshape(q_BxLxH.shape)


KERNELS = {"xla": _xla, "cudnn": _cudnn}


def _allowed(queries_BxQ: Array, keys_BxK: Array, isolated: bool, window: int, first: int = 0) -> Array:
    """Returns which keys each query attends to, bool, broadcastable to [B, 1, Q, K]; key `first` is at query 0."""
    allowed = (keys_BxK > 0)[:, None, None, :]
    if isolated:
        allowed = allowed & (queries_BxQ[:, None, :, None] == keys_BxK[:, None, None, :])
    if window:
        query_Q, key_K = (jnp.arange(segments.shape[1]) for segments in (queries_BxQ, keys_BxK))
        allowed = allowed & (jnp.abs(query_Q[:, None] + first - key_K) <= window)
    return allowed
