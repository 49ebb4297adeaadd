"""Attention kernels behind one signature, each of which computes what `module.xla` does, and which one a model gets.

    xla     plain jax, on any device
    fused   our Pallas kernel for TPU: bfloat16, rows up to 8,192 tokens, with dropout up to 512
    cudnn   cuDNN's kernel for GPU: bfloat16, no dropout, the whole row whatever the window
    auto    fused on a TPU and cudnn on a GPU if they support the model, else xla (measured: mlm/bench/README.md)

To add one, return it from `make_kernel`, and say in `unsupported` what it does not support.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from transformers import PretrainedConfig

from mlm.errors import InputError
from mlm.model import local_attention, module
from mlm.model.module import Attention, attention_dropout
from mlm.model.rotary import Rotation


def make_attention(
    name: str, config: PretrainedConfig, length: int, window: int = 0, *, mesh: Mesh, dtype: str, isolated: bool = False
) -> Attention:
    """Returns the attention for rows of `length` tokens; raises InputError if the kernel does not support them."""
    name = choose(name, config, length=length, mesh=mesh, dtype=dtype, window=window)
    return make_kernel(name, heads=config.num_attention_heads, mesh=mesh, isolated=isolated, window=window)


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
        attention_dropout(config),
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
    if name == "xla":  # the compiler splits it, as cudnn
        if not window:
            return functools.partial(module.xla, heads=heads, isolated=isolated)
        return local_attention.xla(heads=heads, isolated=isolated, window=window)
    if name == "cudnn":
        kernel = functools.partial(_cudnn, heads=heads, isolated=isolated, window=window)
        return functools.partial(local_attention.rotated, kernel)
    from mlm.model import fused_attention

    attend = functools.partial(fused_attention.attend, isolated=isolated, window=window)
    if mesh is None:
        return functools.partial(attend, heads=heads, kind="cpu")
    kind = mesh.devices.flat[0].device_kind
    return functools.partial(_split, functools.partial(attend, heads=heads // mesh.shape["tensor"], kind=kind), mesh)


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


def _cudnn(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, _, *, heads, isolated, window, implementation="cudnn"):
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BxLxH, k_BxLxH, v_BxLxH))
    allowed = local_attention.near_keys(segments_BxL, segments_BxL, isolated, window)
    mask_Bx1xQxK = jnp.broadcast_to(allowed, (len(q), 1, q.shape[1], q.shape[1]))
    context = jax.nn.dot_product_attention(q, k, v, mask=mask_Bx1xQxK, implementation=implementation)
    return context.reshape(q_BxLxH.shape)
