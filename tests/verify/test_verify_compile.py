"""verify's programs compile for TPUs that are not attached, by libtpu."""

import jax
import jax.numpy as jnp
import pytest

from mlm.data.manifest import DatasetInfo
from mlm.model import attention, layers
from mlm.plan import compile as compiling
from mlm.plan import topology
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.verify import kernels
from tests.support.tiny import tiny_config

SIZES = (
    "model.hidden_size=128",
    "model.intermediate_size=256",
    "model.layers=2",
    "shards.length=512",
    "model.positions=512",
    "model.dtype=bfloat16",
    "data.global_batch=64",
    "data.isolate_documents=true",
)
CASES = {"v3:2x2": "modernbert", "v5e:2x4": "roberta"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), CASES.items())
def test_programs_compile(name, family, monkeypatch):
    """Every kernel that the device supports, the step, masks and dropout's bits."""
    dropout = 0.1 if family == "roberta" else 0.0
    config = tiny_config(*SIZES, f"model.family={family}", f"model.attention_dropout={dropout}")
    place = topology.find(name)
    mesh = sharding.mesh_of(config.mesh, place.devices)
    monkeypatch.setattr(kernels, "one_device", lambda device: one)
    one = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=place.devices[:1])
    info = DatasetInfo.synthetic(vocab_size=500, length=512, records=64)
    task = Pretraining.without_data(config, mesh, info)

    def on(mesh, tree, spec):
        place = jax.NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree
        )

    compiled = []
    with compiling.no_cache():
        for window in dict.fromkeys(task.module.windows()):
            arrays = on(one, kernels._arrays(task, window), jax.P())
            for kernel in attention.KERNELS:
                settings = {"length": 512, "window": window, "mesh": mesh, "dtype": "bfloat16"}
                if not attention.unsupported(kernel, task.module.config, **settings):
                    kernels._both_ways(task, kernel, window).lower(*arrays).compile()
                    compiled.append(kernel)
        batch = on(mesh, task.batch_shapes(64), sharding.BATCH)
        compiling.compile_step(task, place)
        jax.jit(lambda batch: task.inputs(batch, jnp.int32(0))).lower(batch).compile()
        bits = jax.jit(lambda rows_B: layers.random_bits(jnp.uint32(7), (64, 512, 8), rows_B))
        bits.lower(batch["record_id"]).compile()
    assert compiled.count("xla") == compiled.count("fused") == len(set(task.module.windows()))
