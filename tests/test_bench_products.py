"""bench --parts products: every matrix product of the update is found, as often as it runs, and measured."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mlm import __main__
from mlm.bench import interleaved, products, steps
from mlm.errors import InputError
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from tests.fixtures import TINY, tiny_config
from tests.test_bench import measured


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(interleaved, "INTERVAL", 0.01)


def test_loops_branches_and_platforms():
    def program(x):
        for_tpu = lax.platform_dependent(x, tpu=lambda x: x @ x @ x @ x, default=lambda x: x @ x)
        some = lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x)
        looped, _ = lax.scan(lambda carry, _: (jax.checkpoint(jnp.dot)(carry, carry), None), x, length=5)
        return for_tpu + some + looped

    jaxpr = jax.make_jaxpr(program)(jnp.ones((4, 4))).jaxpr
    assert len(list(products.find(jaxpr, "cpu"))) == 1 + 2 + 5
    assert len(list(products.find(jaxpr, "tpu"))) == 3 + 2 + 5


def test_sizes():
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.einsum("bqnd,bknd->bnqk", x, y))(
        jnp.ones((2, 8, 3, 5)), jnp.ones((2, 7, 3, 5))
    )
    (product,) = products.find(jaxpr.jaxpr, "cpu")
    batch, m, k, n = product.sizes
    assert (batch, k, {m, n}) == (6, 5, {7, 8}) and product.flops == 2 * 6 * 5 * 7 * 8
    assert str(product).startswith("6 x [") and " @ [5, " in str(product)


def test_all_of_a_step(capsys):
    """As many as the compiler is given; as much work on eight devices as the useful FLOPs by hand, three passes."""
    config = tiny_config("tokenizer.vocab_size=500", "data.global_batch=64", "masking.rate=0.25")  # 8 of 32 tokens
    found = measured(config, ["products"])["products"]
    run = Pretraining.without_data(config)
    assert run.mesh.size == 8
    batch = sharding.put_batch(steps.random_rows(run), run.mesh, 64)
    given = run.train_step.lower(run.shapes, batch).as_text().count("stablehlo.dot_general")
    assert sum(row["count"] for row in found["rows"]) == given > 20
    useful = run.flops_per_token(1) * 64 * run.info.length / 1e9
    assert 8 * sum(row["gflop"] for row in found["rows"]) == pytest.approx(useful, rel=0.01)
    taken = [row["milliseconds"] for row in found["rows"]]
    assert min(taken) > 0 and taken == sorted(taken, reverse=True)
    assert found["products_milliseconds"] == pytest.approx(sum(taken)) and found["milliseconds"] > 0
    printed = capsys.readouterr().out
    assert found["rows"][0]["product"] in printed and "others" in printed
    share = found["products_milliseconds"] / found["milliseconds"]
    assert f"its products alone are {share:.0%} of that" in printed


def test_json_without_a_workdir(capsys):
    arguments = [f"--config.{text}" for text in (*TINY, "tokenizer.vocab_size=500")]
    command = ["bench", "--config=configs/base.py", "--parts", "products", "--seconds=0.1", "--json", *arguments]
    assert __main__.main(command) == 0
    assert set(json.loads(capsys.readouterr().out)["products"]) == {"milliseconds", "products_milliseconds", "rows"}


def test_split_parameters_are_refused():
    with pytest.raises(InputError, match=r"--parts products: config\.mesh\.fsdp and config\.mesh\.tensor must be 1"):
        measured(tiny_config("mesh.fsdp=2", "mesh.data=4"), ["products"])
