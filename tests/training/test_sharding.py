"""Shardings: a rule for every parameter, a parameter for every rule, and refusals that name what does not fit."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

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
def shapes_of(*overrides: str):
    return jax.eval_shape(lambda: module_of(*overrides).init_params(jax.random.key(0)))


def params_of(*overrides: str):
    """Returns the shapes of the parameters of a tiny model."""
    return dict(shapes_of(*overrides))


def rules_of(*overrides: str) -> PartitionRules:
    return module_of(*overrides).partition_rules()


def mesh_of(data: int, fsdp: int, tensor: int):
    return sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)


FAMILIES = ("roberta", "roberta_prelayernorm", "bert", "modernbert")
LAYER = "roberta/encoder/layer/1"
SPECS = {
    "roberta/embeddings/word_embeddings/embedding": P(("tensor", "fsdp"), None),
    f"{LAYER}/attention/self/key/kernel": P("fsdp", "tensor"),
    f"{LAYER}/attention/self/key/bias": P("tensor"),
    f"{LAYER}/attention/output/dense/kernel": P("tensor", "fsdp"),
    f"{LAYER}/intermediate/dense/kernel": P("fsdp", "tensor"),
    f"{LAYER}/output/dense/kernel": P("tensor", "fsdp"),
    f"{LAYER}/output/dense/bias": P(),
    f"{LAYER}/output/LayerNorm/scale": P(),
    "lm_head/layer_norm/scale": P(),
    "lm_head/bias": P("tensor"),
    "model/embeddings/tok_embeddings/embedding": P(("tensor", "fsdp"), None),
    "model/layers/1/attn/Wqkv/kernel": P("fsdp", None, "tensor"),
    "model/layers/1/attn/Wo/kernel": P("tensor", "fsdp"),
    "model/layers/1/mlp/Wi/kernel": P("fsdp", None, "tensor"),
    "model/layers/1/mlp/Wo/kernel": P("tensor", "fsdp"),
    "model/layers/1/attn_norm/scale": P(),
    "head/dense/kernel": P("fsdp", None),
    "decoder/bias": P("tensor"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_rule_and_every_rule_a_parameter(family):
    params = params_of(f"model.family={family}", "model.layers=2")
    specs = sharding.param_specs(params, mesh_of(2, 2, 2), rules_of(f"model.family={family}"))
    expected = {name: spec for name, spec in SPECS.items() if name in specs}
    assert len(expected) == {"roberta": 10, "modernbert": 8}.get(family, len(expected))
    assert {name: specs[name] for name in expected} == expected
    for name, leaf in sharding.named_leaves(params):
        if leaf.ndim > 1 and "position" not in name and "token_type" not in name:
            used = {
                axis
                for part in specs[name]
                if part
                for axis in ([part] if isinstance(part, str) else part)
            }
            assert "fsdp" in used, f"{name}: a matrix that fsdp does not split"


def test_a_rule_matches_whole_names_alone():
    params = params_of()
    params["pre_lm_head"] = {"bias": params["lm_head"]["bias"]}
    with pytest.raises(InputError, match=r"partition_rules\(\).* pre_lm_head/bias; add"):
        sharding.param_specs(params, mesh_of(8, 1, 1), rules_of())


@pytest.mark.parametrize(
    "spec",
    [P("model", None), P("fsdp", None, "tensor"), P("fsdp", "fsdp"), P(("tensor", "fsdp"), "fsdp")],
)
def test_a_rule_that_no_mesh_can_follow_is_refused(spec):
    rules = (
        (r"lm_head/dense/kernel", spec),
        *(rule for rule in rules_of() if rule[0] != r"lm_head/dense/kernel"),
    )
    with pytest.raises(
        InputError,
        match=r"partition_rules\(\) .*lm_head/dense/kernel.*(32, 32).*data, fsdp, tensor",
    ):
        sharding.param_specs(params_of(), mesh_of(8, 1, 1), rules)


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
    [
        ((8, 1, 1), (8, 1, 1)),
        ((-1, 1, 1), (8, 1, 1)),
        ((-1, 2, 2), (2, 2, 2)),
        ((2, -1, 1), (2, 4, 1)),
    ],
)
def test_mesh_takes_all_devices(axes, shape):
    mesh = mesh_of(*axes)
    assert tuple(mesh.shape.values()) == shape
    assert mesh.axis_names == ("data", "fsdp", "tensor")


@pytest.mark.parametrize(
    "axes", [(4, 1, 1), (3, 1, 1), (16, 1, 1), (-1, 3, 1), (-1, 16, 1), (2, 2, 1)]
)
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


def state_specs(name: str, *overrides: str, mesh=(2, 2, 2)):
    """Returns [(path, shape, spec)] of an optimizer's state, and {parameter: (shape, spec)}."""
    settings = {
        "name": name,
        "b1": 0.9,
        "b2": 0.98,
        "eps": 1e-6,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
    }
    settings["muon_iterations"] = 5
    tx = optimizer.make_optimizer(ConfigDict(settings), optax.constant_schedule(1e-3))
    params = params_of(*overrides)
    rules = rules_of(*overrides)
    state = jax.eval_shape(tx.init, params)
    mesh = mesh_of(*mesh)
    specs = sharding.tree_shardings(state, mesh, params, rules)
    leaves = [(n, leaf.shape) for n, leaf in sharding.named_leaves(state)]
    found = [leaf.spec for _, leaf in sharding.named_leaves(specs)]
    wanted = sharding.param_specs(params, mesh, rules)
    shapes = {n: (leaf.shape, wanted[n]) for n, leaf in sharding.named_leaves(params)}
    return [(n, shape, spec) for (n, shape), spec in zip(leaves, found, strict=True)], shapes


def owner(path: str, params: dict) -> str | None:
    """Returns the parameter that a leaf of the state belongs to."""
    return next((name for name in params if path.endswith("/" + name)), None)


@pytest.mark.parametrize(
    ("name", "moments"),
    [("adamw", 2), ("stable_adamw", 2), ("lamb", 2), ("lion", 1), ("adafactor", 2), ("muon", 1)],
)
def test_moments_live_where_their_parameters_do(name, moments):
    """At least so many leaves of the state have each parameter's shape: two moments, or muon's one."""
    leaves, params = state_specs(name)
    for param, (shape, spec) in params.items():
        own = [s for path, found, s in leaves if owner(path, params) == param and found == shape]
        assert len(own) >= moments, param
        assert all(s == spec for s in own), param
    assert all(spec == P() for path, _, spec in leaves if owner(path, params) is None)


def test_factored_moments_are_on_every_device():
    """At 256 x 128 adafactor keeps a row and a column, which have no rule; the momentum has its parameter's shape."""
    leaves, params = state_specs(
        "adafactor", "model.hidden_size=128", "model.intermediate_size=256"
    )
    name = "roberta/encoder/layer/0/intermediate/dense/kernel"
    own = {shape: spec for path, shape, spec in leaves if owner(path, params) == name}
    assert own == {(128,): P(), (256,): P(), (1,): P(), (128, 256): P("fsdp", "tensor")}
