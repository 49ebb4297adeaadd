"""Every attention kernel against flax's, outputs and gradients; Pallas kernels interpreted on the CPU."""

import dataclasses
import functools
import math
import re
import types

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax._src.cudnn import fused_attention_stablehlo
from transformers import RobertaConfig

from mlm.data.manifest import DatasetInfo, Manifest, Split, join_folders
from mlm.errors import InputError
from mlm.model import attention, fused_attention
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding, train
from tests.support.tiny import INFO, meshes_of, random_batch, slow, tiny_config, tiny_run


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel, and what it is given."""

    name: str
    window: int = 0
    length: int = 128
    chunk: int = 512  # tokens of the fused kernel's chunks, at most
    isolated: bool = True
    dropout: bool = False
    # "" for no rotation, "rows" if each row has its positions, "alike" if all share them
    rotated: str = ""
    rows: int = 2
    padding: str = "end"
    heads: int = 2
    size: int = 32

    @functools.cached_property
    def documents(self) -> np.ndarray:
        """Two documents in each row; padding at the end of the last one, or everywhere."""
        documents = np.ones((self.rows, self.length), np.int32)
        documents[:, self.length // 3 :] = 2
        if self.padding != "none":
            documents[-1, self.length - self.length // 5 :] = 0
        if self.padding == "any":
            documents[:, ::7] = 0
        return documents

    @functools.cached_property
    def arrays(self) -> list[jax.Array]:
        """Queries, keys, values, and the gradient of the context, which is 0 at padding."""
        shape = (self.rows, self.length, self.heads * self.size)
        *qkv, grad = (
            jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)
        )
        return [*qkv, grad * (self.documents > 0)[..., None]]

    @functools.cached_property
    def dropout_mask(self) -> np.ndarray | None:
        mask = np.random.default_rng(1).random((self.length, self.length)) > 0.1
        return np.float32(mask / 0.9) if self.dropout else None

    @functools.cached_property
    def angles(self) -> np.ndarray | None:
        places = (
            np.arange(self.length)
            + 50 * np.arange(self.rows if self.rotated == "rows" else 1)[:, None]
        )
        angles = places[..., None] / 100.0 ** (np.arange(self.size // 2) / (self.size // 2))
        return np.float32(angles) if self.rotated else None

    def attend(self, *qkv_BxLxH: jax.Array) -> jax.Array:
        """The kernel; cuDNN's call is done by XLA, since there is no cuDNN here."""
        return attention.KERNELS[self.name](
            *qkv_BxLxH,
            self.documents,
            mesh=sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
            heads=self.heads,
            window=self.window,
            isolated=self.isolated,
            dropout_mask_LxL=self.dropout_mask,
            rotation=None if self.angles is None else (jnp.cos(self.angles), jnp.sin(self.angles)),
            padding=self.padding,
            implementation="xla",
        )

    def flax(self, *qkv: jax.Array) -> jax.Array:
        """What FlaxRobertaSelfAttention calls; with ModernBERT's window, and rotations as in RoFormer."""
        q, k, v = (x.reshape(self.rows, self.length, self.heads, self.size) for x in qkv)
        if self.rotated:
            turn = jnp.exp(1j * self.angles)[:, :, None]
            complex_qk = (jax.lax.complex(*jnp.split(x, 2, axis=-1)) * turn for x in (q, k))
            q, k = (jnp.concatenate([x.real, x.imag], -1) for x in complex_qk)
        place = jnp.arange(self.length)
        queries = self.documents[:, None, :, None]
        keys = self.documents[:, None, None, :]
        allowed = keys > 0
        if self.isolated:
            allowed = allowed & (queries == keys)
        if self.window:
            allowed = allowed & (jnp.abs(place[:, None] - place) <= self.window)
        probs = flax.linen.dot_product_attention_weights(q, k, bias=jnp.where(allowed, 0.0, -1e10))
        if self.dropout:
            probs = probs * self.dropout_mask.T
        return jnp.einsum("bnqk,bknd->bqnd", probs, v).reshape(qkv[0].shape)

    def both_ways(self, attend, dtype=jnp.float32) -> list[jax.Array]:
        """Returns the context of real tokens, and the gradients of q, k and v."""

        def run(q_BxLxH, k_BxLxH, v_BxLxH, grad_BxLxH):
            context, pull = jax.vjp(attend, q_BxLxH, k_BxLxH, v_BxLxH)
            return [
                context * (self.documents > 0)[..., None],
                *pull(grad_BxLxH.astype(context.dtype)),
            ]

        return jax.jit(run)(*(array.astype(dtype) for array in self.arrays))


WHOLE_ROWS = {"isolated": False, "heads": 1, "size": 64, "length": 80}
CASES = [
    # All keys for all queries; blocks that leave a rest; a window that is most of the row.
    Case("xla", dropout=True, rotated="alike", length=80),
    Case("xla", window=24, dropout=True, rotated="rows", length=80),
    Case("xla", window=26, length=78, isolated=False),
    # Without a mask; with lengths; with a mask. Three blocks, four and a rest; a row that is shorter than a block.
    Case("cudnn", padding="none", rotated="alike", **WHOLE_ROWS),
    Case("cudnn", padding="end", **WHOLE_ROWS),
    Case("cudnn", padding="any", **WHOLE_ROWS),
    Case("cudnn", padding="none", isolated=False, window=8, length=96, rotated="rows"),
    Case("cudnn", padding="end", isolated=False, window=9, length=140, heads=1, size=64),
    Case("cudnn", padding="any", window=40, length=200),
    Case("cudnn", padding="none", isolated=False, window=8, length=24),
    # Both rows in a step of the grid, each one tile; tiles of a row; chunks with halos; keys one chunk after the other.
    Case("fused", dropout=True, rotated="rows"),
    Case("fused", window=24, length=256, rotated="alike"),
    Case("fused", window=24, length=384, chunk=128, isolated=False, rotated="rows"),
    slow(Case("fused", window=150, length=384, rotated="alike")),
    slow(Case("fused", length=1024, chunk=512, isolated=False, rotated="rows")),
]


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_flax_s(case, monkeypatch):
    monkeypatch.setattr(attention, "CUDNN_BLOCK", 32)
    monkeypatch.setattr(fused_attention, "chunk_tokens", lambda _: case.chunk)
    monkeypatch.setattr(
        fused_attention.pl,
        "pallas_call",
        functools.partial(within_bounds, fused_attention.pl.pallas_call),
    )
    for one, other in zip(case.both_ways(case.attend), case.both_ways(case.flax), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def within_bounds(pallas_call, kernel, *, grid, in_specs, out_specs, out_shape, **settings):
    """Asserts that no block of a kernel lies outside its array: the interpreter moves it inside, a TPU reads on."""

    def run(*arrays):
        for spec, array in zip(
            *map(jax.tree.leaves, ([in_specs, out_specs], [arrays, out_shape])), strict=True
        ):
            for point in np.ndindex(*grid):
                with jax.ensure_compile_time_eval():
                    index = [int(part) for part in spec.index_map(*point)]
                ends = [
                    (part + 1) * (size or 1)
                    for part, size in zip(index, spec.block_shape, strict=True)
                ]
                assert min(index) >= 0 and all(np.less_equal(ends, array.shape)), (
                    point,
                    index,
                    spec.block_shape,
                )
        return call(*arrays)

    call = pallas_call(
        kernel, grid=grid, in_specs=in_specs, out_specs=out_specs, out_shape=out_shape, **settings
    )
    return run


def test_split_over_a_mesh_it_is_the_same():
    """Inside a shard_map that has split the rows by then, too."""
    case = Case("fused", window=24, rotated="rows", rows=4, isolated=False, padding="none")
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)

    def attend(*arrays):
        *arrays, angles = arrays
        rotation = (jnp.cos(angles), jnp.sin(angles))
        return attention.fused(
            *arrays, heads=case.heads, window=case.window, rotation=rotation, mesh=mesh
        )

    rows = jax.P("data")
    within = jax.shard_map(
        attend, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False
    )
    for split in (attend, within):
        context = jax.jit(split)(*case.arrays[:3], case.documents, case.angles)
        np.testing.assert_allclose(context, case.flax(*case.arrays[:3]), atol=1e-5)


BFLOAT16 = [
    Case("cudnn", padding="none", isolated=False),
    Case("cudnn", padding="end", isolated=False),
    Case("cudnn", padding="none", isolated=False, window=8, length=96),
    slow(Case("fused", dropout=True)),
]


@pytest.mark.parametrize("case", BFLOAT16)
def test_in_bfloat16_a_kernel_is_as_near_to_float32_as_plain_jax(case, monkeypatch):
    monkeypatch.setattr(attention, "CUDNN_BLOCK", 32)
    plain = dataclasses.replace(case, name="xla")
    exact = case.both_ways(plain.attend)
    for one, other, right in zip(
        *(kernel.both_ways(kernel.attend, jnp.bfloat16) for kernel in (case, plain)),
        exact,
        strict=True,
    ):
        assert one.dtype == jnp.bfloat16
        error, allowed = (np.abs(x.astype(jnp.float32) - right).max() for x in (one, other))
        assert 0 < error < max(2 * allowed, 0.01 * np.abs(right).max())


@pytest.mark.parametrize(
    ("mesh", "padding", "isolated"),
    [
        slow((1, 1, 1), "none", False),
        ((2, 2, 2), "end", False),
        slow((2, 2, 2), "any", True),
    ],
)
def test_a_model_has_the_loss_and_gradients_of_plain_jax(mesh, padding, isolated, monkeypatch):
    """ModernBERT, global and local layers, in five blocks."""
    monkeypatch.setattr(attention, "CUDNN_BLOCK", 8)
    info = dataclasses.replace(INFO, length=34)
    with meshes_of(math.prod(mesh)):
        task = tiny_run(
            "model.family=modernbert",
            "model.layers=2",
            "model.local_attention=4",
            f"data.isolate_documents={isolated}",
            "shards.length=34",
            mesh=mesh,
            info=info,
        )
    batch = random_batch(16, 0, info)
    if padding == "none":
        batch["attention_mask"][:] = 1
    params = jax.jit(task.module.init_params)(jax.random.key(0))
    batch = sharding.put_batch(batch, task.mesh, 16)
    numbers = []
    for attend in (
        attention.xla,
        functools.partial(attention.cudnn, padding=padding, implementation="xla"),
    ):
        compute = dataclasses.replace(task.module.compute, attend=attend)
        task.module = task.module.clone(compute=compute)
        gradients, means = jax.jit(train.make_gradient(task))(params, batch, np.int32(0))
        numbers.append(flatten_dict(gradients) | {"loss": means["loss"].sum})
    for name, value in numbers[0].items():
        np.testing.assert_allclose(
            numbers[1][name], value, atol=1e-5 * max(1, np.abs(value).max()), err_msg=name
        )


# What cuDNN is given -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("padding", "settings", "mask"),
    [
        ("none", {}, None),
        ("end", {}, None),
        ("any", {}, "4x1x1024x1024"),
        ("none", {"isolated": True}, "4x1x1024x1024"),
        ("none", {"window": 64}, "32x1x128x256"),
        ("end", {"window": 64, "isolated": True}, "32x1x128x256"),
    ],
)
def test_the_program_for_cuda_has_a_mask_only_where_it_must(padding, settings, mask, monkeypatch):
    """As jax lowers it without a GPU: the names of cuDNN's calls, and the shape of their bias."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)

    def both_ways(q_BxLxH, k_BxLxH, v_BxLxH, segments_BxL, grad_BxLxH):
        def attend(*qkv):
            return attention.cudnn(*qkv, segments_BxL, heads=12, padding=padding, **settings)

        return jax.vjp(attend, q_BxLxH, k_BxLxH, v_BxLxH)[1](grad_BxLxH)

    x = jax.ShapeDtypeStruct((4, 1024, 768), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((4, 1024), jnp.int32)
    lowered = jax.jit(both_ways).trace(x, x, x, segments, x).lower(lowering_platforms=("cuda",))
    calls = re.findall(r"@(__cudnn\$\w+)\((.*)", lowered.as_text())
    kind = "Softmax" if mask is None else "ScaleBiasSoftmax"
    assert [name for name, _ in calls] == [f"__cudnn$fmha{kind}", f"__cudnn$fmha{kind}Backward"]
    for _, rest in calls:
        assert mask is None or f"tensor<{mask}xbf16>" in rest
        assert ("tensor<4xi32>" in rest) == (padding == "end" and mask is None), "the lengths"


def test_a_row_of_padding_alone_stays_finite():
    """It fills up a batch of evaluation: weight 0 times NaN would be NaN."""
    case = Case("cudnn", isolated=False)
    case.documents[-1] = 0
    assert all(np.isfinite(array).all() for array in case.both_ways(case.attend))


class OwnMasks(Pretraining):
    """It may take tokens out, so nothing is taken for granted of its rows."""

    def make_masking(self):
        return super().make_masking()


@pytest.mark.parametrize(("cls", "expected"), [(Pretraining, "end"), (OwnMasks, "any")])
def test_a_kernel_is_told_where_rows_may_have_padding(cls, expected, monkeypatch):
    task = cls.without_data(tiny_config(), info=dataclasses.replace(INFO, padding="end"))
    monkeypatch.setitem(attention.KERNELS, "xla", lambda *_, padding, **settings: padding)
    assert task.module.compute.attend(np.ones((2, 32, 32)), window=0) == expected


def test_the_shards_say_where_rows_may_have_padding():
    """All that a run reads: the folders of a mixture, and the sets that are scored."""
    splits = {"train": Split(())}
    full = Manifest(
        "", 32, 500, INFO.special_ids, (0, 1, 2, 3, 4), "", True, "", "", splits, rows="x"
    )
    lines = dataclasses.replace(full, full_rows=False)
    foreign = dataclasses.replace(lines, rows="")
    for manifest, padding in ((full, "none"), (lines, "end"), (foreign, "any")):
        scored = dataclasses.replace(full, sets={"s": manifest})
        mixed = join_folders([(0.5, full), (0.5, manifest)])
        for read in (manifest, scored, mixed):
            assert DatasetInfo.from_manifest(read).padding == padding


# Which kernel --------------------------------------------------------------------------------------------------------


TPU = {"platform": "tpu", "device_kind": "TPU v5 lite", "compute_capability": "10.0"}


def choose(
    name,
    tensor=2,
    heads=12,
    hidden_size=768,
    dropout=0.0,
    length=512,
    window=0,
    dtype="bfloat16",
    **device,
):
    """Returns the kernel that a model gets on a mesh of devices that need not exist."""
    config = RobertaConfig(
        num_attention_heads=heads, hidden_size=hidden_size, attention_probs_dropout_prob=dropout
    )
    devices = np.array([types.SimpleNamespace(**TPU | device)])
    mesh = types.SimpleNamespace(devices=devices, shape={"tensor": tensor})
    with pytest.MonkeyPatch.context() as patch:
        for kernel in attention.KERNELS:
            patch.setitem(attention.KERNELS, kernel, lambda *_, kernel=kernel, **settings: kernel)
        attend = attention.make_attention(
            name, config, lengths=[length], windows=[window], mesh=mesh, dtype=dtype
        )
        return attend(np.ones((1, length, 1)), window=window)


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        ({"platform": "cpu"}, "xla"),
        ({"platform": "gpu", "device_kind": "NVIDIA H200"}, "cudnn"),
        ({"platform": "gpu", "device_kind": "NVIDIA H200", "dropout": 0.1}, "xla"),
        ({"dtype": "float32"}, "xla"),
        ({"length": 8192}, "fused"),
        ({"device_kind": "TPU v3", "length": 1024, "window": 64}, "fused"),
    ],
)
def test_auto_takes_the_fastest_that_supports_the_model(model, chosen):
    assert choose("auto", **model) == chosen


@pytest.mark.parametrize(
    ("name", "model", "what"),
    [
        ("fused", {"platform": "gpu"}, "a GPU"),
        ("fused", {"length": 640, "dropout": 0.1}, "model.attention_dropout = 0.1.* 640"),
        ("fused", {"length": 8320}, "rows of 8320 tokens.* 8192"),
        ("fused", {"length": 640, "device_kind": "TPU v2"}, "rows of 640 tokens.* TPU v2.* 512"),
        ("fused", {"heads": 24, "device_kind": "TPU v3"}, "4 heads of 32.* TPU v3"),
        ("fused", {"heads": 3, "tensor": 1, "hidden_size": 192}, "3 heads of 64"),
        ("fused", {"tensor": 8}, "12 heads.* mesh.tensor = 8"),
        ("fused", {"length": 2048, "window": 129}, "129 tokens"),
        ("cudnn", {"platform": "gpu", "dropout": 0.1}, "model.attention_dropout = 0.1"),
        (
            "cudnn",
            {"platform": "gpu", "device_kind": "Tesla V100", "compute_capability": "7.0"},
            "Tesla V100",
        ),
        ("cudnn", {"platform": "gpu", "heads": 64}, "heads of 12"),
        ("cudnn", {"platform": "gpu", "length": 511}, "rows of 511 tokens"),
    ],
)
def test_what_a_kernel_does_not_support_is_named(name, model, what):
    with pytest.raises(InputError, match=rf"config\.model\.attention = {name}.*{what}"):
        choose(name, **model)
