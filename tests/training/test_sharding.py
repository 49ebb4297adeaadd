"""Shardings: a rule for every parameter, a parameter for every rule, and refusals that name what does not fit."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from mlm.errors import InputError
from mlm.model import families
from mlm.model.module import Model
from mlm.model.partition_rules import PartitionRules
from mlm.training import optimizer, sharding
from tests.support.tiny import INFO, tiny_config


@functools.cache
def module_of(*overrides: str) -> Model:
    return families.make_module(tiny_config(*overrides).model, INFO)


@functools.cache
def params_of(*overrides: str):
    """Returns the shapes of the parameters of a tiny model."""
    return jax.eval_shape(lambda: module_of(*overrides).init_params(jax.random.key(0)))


def rules_of(*overrides: str) -> PartitionRules:
    return module_of(*overrides).partition_rules()


def mesh_of(data: int, fsdp: int, tensor: int):
    return sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)


@pytest.mark.parametrize("family", ["roberta", "roberta_prelayernorm", "bert", "modernbert"])
def test_every_parameter_has_a_rule_and_every_rule_a_parameter(family):
    """Matrices of layers are split over both axes, all others but small tables over fsdp."""
    overrides = (f"model.family={family}", "model.layers=2")
    params = params_of(*overrides)
    specs = sharding.param_specs(params, mesh_of(2, 2, 2), rules_of(*overrides))
    for name, leaf in sharding.named_leaves(params):
        if leaf.ndim > 1 and "position" not in name and "token_type" not in name:
            assert "fsdp" in str(specs[name]), f"{name}: a matrix that fsdp does not split"
            assert "/layer" not in name or "tensor" in str(specs[name]), name


def test_an_unmatched_parameter_and_an_unused_rule_are_refused():
    mesh = mesh_of(8, 1, 1)
    params = params_of()
    rules = rules_of()
    adapter = {"adapter": {"kernel": jax.ShapeDtypeStruct((32, 32), "float32")}}
    with pytest.raises(InputError, match=r"partition_rules\(\).* adapter/kernel;"):
        sharding.param_specs(params | adapter, mesh, rules)
    more = (*rules, (r"adapter/.*", P()))
    with pytest.raises(InputError, match=r"partition_rules\(\).* adapter/\.\*"):
        sharding.param_specs(params, mesh, more)
    assert sharding.param_specs(params | adapter, mesh, more)["adapter/kernel"] == P()
    more = params | {"pre_lm_head": {"bias": params["lm_head"]["bias"]}}
    with pytest.raises(InputError, match=r"pre_lm_head/bias; add"):  # rules match whole names
        sharding.param_specs(more, mesh, rules)


@pytest.mark.parametrize(("mesh", "axis"), [((4, 2, 1), "fsdp = 2"), ((4, 1, 2), "tensor = 2")])
def test_a_model_without_rules_is_on_every_device(mesh, axis):
    rules = ((".*", P()),)
    assert set(sharding.param_specs(params_of(), mesh_of(8, 1, 1), rules).values()) == {P()}
    with pytest.raises(InputError, match=f"config.mesh.{axis}: .* partition rules"):
        sharding.param_specs(params_of(), mesh_of(*mesh), rules)


@pytest.mark.parametrize(
    ("override", "mesh", "sentence"),
    [
        (
            "model.intermediate_size=36",
            (1, 1, 8),
            "config.mesh.tensor = 8 does not divide the 36 of roberta/encoder/",
        ),
        ("model.hidden_size=36", (1, 8, 1), "config.mesh.fsdp = 8 does not divide the 36 of "),
    ],
)
def test_a_parameter_that_the_mesh_cannot_split_is_refused(override, mesh, sentence):
    with pytest.raises(InputError) as caught:
        sharding.param_specs(params_of(override), mesh_of(*mesh), rules_of(override))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [((8, 1, 1), (8, 1, 1)), ((-1, 2, 2), (2, 2, 2)), ((2, -1, 1), (2, 4, 1))],
)
def test_mesh_takes_all_devices(axes, shape):
    mesh = mesh_of(*axes)
    assert tuple(mesh.shape.values()) == shape
    assert mesh.axis_names == ("data", "fsdp", "tensor")


@pytest.mark.parametrize("axes", [(4, 1, 1), (-1, 3, 1), (-1, 16, 1)])
def test_mesh_of_another_number_of_devices_is_refused(axes):
    with pytest.raises(
        InputError, match=rf"config.mesh = data {axes[0]} x fsdp {axes[1]} x tensor .* 8 devices"
    ):
        mesh_of(*axes)


def test_a_batch_that_the_mesh_cannot_split_is_refused():
    mesh = mesh_of(2, 2, 2)
    sharding.check_batch(mesh, rows=12, key="evaluate.batch")
    with pytest.raises(
        InputError, match=r"config.evaluate.batch: 10 rows can't be split over 4 devices"
    ):
        sharding.check_batch(mesh, rows=10, key="evaluate.batch")
    batches = ("data.batch_stages=((8, 2), (16, 2))", "data.global_batch=32", "data.lanes=4")
    sharding.check_batches(mesh, tiny_config(*batches, "train.accumulate=2"))
    with pytest.raises(
        InputError, match=r"data.batch_stages / train.accumulate: 2 rows .* 4 devices"
    ):
        sharding.check_batches(mesh, tiny_config(*batches, "train.accumulate=4"))
    with pytest.raises(
        InputError, match=r"data.global_batch / train.accumulate: 4 rows .* 8 devices"
    ):
        sharding.check_batches(mesh_of(8, 1, 1), tiny_config("train.accumulate=4"))


def test_a_batch_is_split_over_data_and_fsdp_and_copied_over_tensor():
    mesh = mesh_of(2, 2, 2)
    rows = np.arange(16, dtype=np.int32)[:, None] * np.ones(3, np.int32)
    put = sharding.put_batch({"input_ids": rows}, mesh, 16)
    assert np.array_equal(put["input_ids"], rows) and np.array_equal(
        put["row"], np.arange(16, dtype=np.uint32)
    )
    held = sorted(tuple(shard.data[:, 0].tolist()) for shard in put["input_ids"].addressable_shards)
    assert held == sorted([(4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3) for i in range(4)] * 2)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_moments_live_where_their_parameters_do(name):
    """Those of a parameter's shape; Adafactor's rows and columns of larger ones are on every device."""
    sizes = ("model.hidden_size=128", "model.intermediate_size=256")
    settings = tiny_config(f"optimizer.name={name}").optimizer
    params = params_of(*sizes)
    tx = optimizer.make_optimizer(settings, optax.constant_schedule(1e-3))
    state = jax.eval_shape(tx.init, params)
    mesh = mesh_of(2, 2, 2)
    wanted = sharding.param_specs(params, mesh, rules_of(*sizes))
    shapes = {param: leaf.shape for param, leaf in sharding.named_leaves(params)}
    specs = sharding.tree_shardings(state, mesh, params, rules_of(*sizes))
    of_params = 0
    for (path, leaf), sharded in zip(
        sharding.named_leaves(state), jax.tree.leaves(specs), strict=True
    ):
        param = next((param for param in shapes if path.endswith(f"/{param}")), "")
        is_moment = leaf.shape == shapes.get(param)
        assert sharded.spec == (wanted[param] if is_moment else P()), path
        of_params += is_moment
    assert of_params >= len(shapes)
