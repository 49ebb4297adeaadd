"""Attention through one seam: several kernels that compute what transformers' FlaxRobertaSelfAttention does.

A kernel takes q, k, v, the documents of the tokens and, with dropout on, one mask for all rows and heads of the layer
(as in flax, `broadcast_dropout`), and returns the context of every token:

    xla     as flax computes it, in the type of the model, on any device
    fused   our Pallas kernel for TPU, bfloat16, rows up to 512, with dropout
    splash  jax's Pallas kernel for TPU, long rows, without dropout
    cudnn   cuDNN's kernel for GPU, bfloat16, without dropout
    auto    fused on a TPU where it can, else splash where it can; xla elsewhere (no GPU has been measured)

All of them can keep the documents of a row apart (`isolated`).

Dimensions: B rows, L tokens, H hidden size = N heads x D head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mlm.errors import InputError
from mlm.model import fused_attention

# (q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL int32, keep_LxL or None: keys x queries) -> context_BxLxH
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


def choose(
    name: str,
    *,
    platform: str,
    kind: str,
    length: int,
    heads: int,
    hidden_size: int,
    tensor: int,
    dropout: float,
    dtype: str,
) -> str:
    """Returns the kernel's name: `name` itself if it can do the work, for "auto" the fastest that can.

    Args:
      name: a key of the table above.
      platform, kind: of the devices: cpu, gpu or tpu, and jax's device_kind. On a CPU the Pallas kernels run as plain
        jax, for tests.
      length, heads, hidden_size, dropout (of the probabilities), dtype: of the model and its rows.
      tensor: devices that the heads are split over.

    Raises:
      InputError: the kernel can't do it.
    """
    refusals = {
        "xla": None,
        "fused": _refuse_split(heads, tensor)
        or _refuse_fused(platform, kind, length, heads // tensor, hidden_size // heads, dtype),
        "splash": _refuse_split(heads, tensor) or _refuse_splash(platform, length, dropout),
        "cudnn": _refuse_cudnn(platform, dropout, dtype),
    }
    if name == "auto":
        candidates = ("fused", "splash", "xla") if platform == "tpu" else ("xla",)
        return next(each for each in candidates if refusals[each] is None)
    if refusals[name] is not None:
        raise InputError(f"config.model.attention = {name} can't do {refusals[name]}; take another kernel, or auto.")
    return name


def make(name: str, *, heads: int, mesh: Mesh | None = None, isolated: bool = False) -> Attention:
    """Returns the kernel `name`, of `choose`, split over the mesh: rows over data and fsdp, heads over tensor.

    Args:
      name: xla, fused, splash or cudnn.
      heads: N, over all devices.
      mesh: of mlm/training/sharding.py; None to leave the splitting to the compiler, which only xla can.
      isolated: a token attends to its own document only. Otherwise to all that is not padding (document 0).
    """
    if name == "xla":
        return functools.partial(_xla, heads=heads, isolated=isolated)
    if name == "cudnn":
        return functools.partial(_cudnn, heads=heads, isolated=isolated)
    kind = "cpu" if mesh is None else mesh.devices.flat[0].device_kind
    own = heads if mesh is None else heads // mesh.shape["tensor"]
    if name == "fused":
        kernel = functools.partial(_fused, heads=own, isolated=isolated, kind=kind)
    else:
        kernel = functools.partial(_splash, heads=own, isolated=isolated, interpret=not kind.startswith("TPU"))
    if mesh is None:
        return kernel
    return functools.partial(_split, kernel, mesh)


def _split(kernel: Attention, mesh: Mesh, *args: jax.Array | None) -> jax.Array:
    """Runs a kernel on each device's rows and heads; axes that the caller has split already are left to it."""
    around = jax.sharding.get_abstract_mesh()
    left = [axis for axis in mesh.axis_names if axis not in around.manual_axes]
    if not left:
        return kernel(*args)
    ways = tuple(axis for axis in ("data", "fsdp") if axis in left)
    rows, tokens = P(ways, None, "tensor" if "tensor" in left else None), P(ways, None)
    return jax.shard_map(
        kernel,
        mesh=around if around.manual_axes else mesh,
        in_specs=(rows,) * 3 + (tokens, P()),
        out_specs=rows,
        axis_names=set(left),
        check_vma=False,
    )(*args)


def _xla(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, keep_LxL, *, heads: int, isolated: bool):
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxLxH, k_BxLxH, v_BxLxH))
    allowed = _allowed(segments_BxL, isolated)
    bias = jnp.where(allowed, 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    scores_BxNxQxK = jnp.einsum("bqnd,bknd->bnqk", q / math.sqrt(q.shape[-1]), k) + bias
    shares_BxNxQxK = jax.nn.softmax(scores_BxNxQxK)
    if keep_LxL is not None:
        shares_BxNxQxK = shares_BxNxQxK * keep_LxL.T
    return jnp.einsum("bnqk,bknd->bqnd", shares_BxNxQxK, v).reshape(q_BxLxH.shape)


def _fused(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, keep_LxL, *, heads: int, isolated: bool, kind: str):
    return fused_attention.attend(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, keep_LxL, heads, isolated, kind)


def _splash(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, keep_LxL, *, heads: int, isolated: bool, interpret: bool):
    if keep_LxL is not None:
        raise ValueError("splash has no dropout")
    length = q_BxLxH.shape[1]
    block = math.gcd(length, 512)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        use_fused_bwd_kernel=True,
    )
    mask = splash.MultiHeadMask([splash.FullMask((length, length))] * heads)
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
    q, k, v = (jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1), 1, 2) for x in (q_BxLxH, k_BxLxH, v_BxLxH))
    # It compares documents of queries and keys. Where all documents are one, a padding query has nothing to attend to
    # but padding: what comes out there is used by nobody.
    documents_BxL = segments_BxL if isolated else jnp.minimum(segments_BxL, 1)
    context_BxNxLxD = jax.vmap(kernel)(
        q / math.sqrt(q.shape[-1]), k, v, splash.SegmentIds(documents_BxL, documents_BxL)
    )
    return jnp.moveaxis(context_BxNxLxD, 2, 1).reshape(q_BxLxH.shape)


def _cudnn(
    q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, keep_LxL, *, heads: int, isolated: bool, implementation: str = "cudnn"
):
    if keep_LxL is not None:
        raise ValueError("cudnn has no dropout here")
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxLxH, k_BxLxH, v_BxLxH))
    length = q.shape[1]
    mask_Bx1xQxK = jnp.broadcast_to(_allowed(segments_BxL, isolated), (q.shape[0], 1, length, length))
    context = jax.nn.dot_product_attention(q, k, v, mask=mask_Bx1xQxK, implementation=implementation)
    return context.reshape(q_BxLxH.shape)


def _allowed(segments_BxL: jax.Array, isolated: bool) -> jax.Array:
    """Returns booleans that broadcast to [B, 1, queries, keys]."""
    allowed = (segments_BxL > 0)[:, None, None, :]
    if isolated:
        allowed = allowed & (segments_BxL[:, None, :, None] == segments_BxL[:, None, None, :])
    return allowed


def _refuse_split(heads: int, tensor: int) -> str | None:
    return f"{heads} heads over mesh.tensor = {tensor}: it needs whole heads" if heads % tensor else None


def _refuse_fused(platform: str, kind: str, length: int, heads: int, head_size: int, dtype: str) -> str | None:
    if platform == "gpu":
        return "a GPU: it is written for TPU"
    if platform == "tpu" and dtype != "bfloat16":
        return f"{dtype}: it does bfloat16 alone"
    return fused_attention.refusal(kind=kind, length=length, heads=heads, head_size=head_size)


def _refuse_splash(platform: str, length: int, dropout: float) -> str | None:
    if platform == "gpu":
        return "a GPU: it is written for TPU"
    if dropout > 0:
        return f"dropout (model.attention_dropout = {dropout})"
    if length % 128:
        return f"rows of {length} tokens: it does multiples of 128"
    return None


def _refuse_cudnn(platform: str, dropout: float, dtype: str) -> str | None:
    if platform != "gpu":
        return f"a {platform.upper()}: it is written for NVIDIA GPUs"
    if dropout > 0:
        return f"dropout (model.attention_dropout = {dropout})"
    if dtype != "bfloat16":
        return f"{dtype}: it does bfloat16 alone"
    return None
