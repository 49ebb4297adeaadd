"""The part "products" of `bench`: the matrix products of our update, each alone, beside the whole update.

They are what the hardware has to do whatever the rest of the program looks like: what an update takes beyond them is
all that faster code of ours could still save. Products inside a Pallas kernel are not among them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr
from ml_collections import ConfigDict
from rich.console import RenderableType

from mlm.bench import interleaved, steps
from mlm.errors import InputError
from mlm.tasks.pretraining import Pretraining
from mlm.text import table
from mlm.training import sharding

SHOWN = 12  # lines of the table, at most
TURN = 0.2  # of a product, in interleaved.TURNs: there are many


@dataclasses.dataclass(frozen=True)
class Product:
    """A `lax.dot_general`.

    Attributes:
      left, right: shapes.
      dtype: of both.
      settings: dimension_numbers, precision and preferred_element_type, as `lax.dot_general` takes them.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    dtype: np.dtype
    settings: tuple[tuple[str, Any], ...]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(batch, M, K, N) of `batch` products of [M, K] and [K, N]."""
        (contracted, _), (batched, others) = dict(self.settings)["dimension_numbers"]
        batch, k = (math.prod(self.left[axis] for axis in axes) for axes in (batched, contracted))
        n = math.prod(self.right) // (math.prod(self.right[axis] for axis in others) * k)
        return batch, math.prod(self.left) // (batch * k), k, n

    @property
    def flops(self) -> int:
        """Of one, a multiplication and an addition counted as two."""
        return 2 * math.prod(self.sizes)

    def __str__(self) -> str:
        batch, m, k, n = self.sizes
        return (f"{batch} x " if batch > 1 else "") + f"[{m}, {k}] @ [{k}, {n}]"


def compare_products(config: ConfigDict, mesh: jax.sharding.Mesh, seconds: float) -> dict[str, Any]:
    """Measures our update, and each of its products as often as it occurs.

    Args:
      config: of the run.
      mesh: of all devices; a product is measured on one, in the size of its share.
      seconds: to measure for.

    Returns:
      "milliseconds" of an update, "products_milliseconds" of all its products, and "rows", the costliest first, of
      {"product", "count" in an update, "gflop" and "milliseconds" of all of them}.

    Raises:
      InputError: the mesh splits the parameters, so that a share's products are known to the compiler alone.
    """
    if mesh.size > mesh.shape["data"]:
        raise InputError("--parts products: config.mesh.fsdp and config.mesh.tensor must be 1 for it.")
    task = Pretraining.without_data(config, mesh)
    host = steps.random_rows(config, task.info)
    interleaved.say("products: compiling ours")
    _, step = steps.our_step(task, host, mesh)
    program = task.train_step.trace(task.shapes, sharding.put_batch(host, mesh, len(host["record_id"]))).jaxpr.jaxpr
    counts = collections.Counter(find(program, mesh.devices.flat[0].platform))
    columns = {"mlm": steps.waited(step)} | {product: steps.waited(_alone(product)) for product in counts}
    rates = interleaved.measure("products", columns, seconds, length=TURN)
    spent = {name: row["milliseconds"] for name, row in interleaved.summary(rates, 1).items() if name != "ratios"}
    rows = [
        {
            "product": str(product),
            "count": count,
            "gflop": count * product.flops / 1e9,
            "milliseconds": count * spent[product],
        }
        for product, count in counts.items()
    ]
    rows.sort(key=lambda row: -row["milliseconds"])
    total = sum(row["milliseconds"] for row in rows)
    return {"milliseconds": spent["mlm"], "products_milliseconds": total, "rows": rows}


def tables(found: dict[str, Any]) -> list[RenderableType]:
    """Returns what `compare_products` returns for `show`."""
    rest = found["rows"][SHOWN:]
    shown = found["rows"][:SHOWN] + ([_sum(f"{len(rest)} others", rest)] if rest else []) + [_sum("all", found["rows"])]
    rows = []
    for row in shown:
        gflop, milliseconds = row["gflop"], row["milliseconds"]
        figures = f"{gflop:.2f}", f"{milliseconds:.1f}", f"{gflop / milliseconds * 1e3:,.0f}"
        rows.append((row["product"], str(row["count"]), *figures))
    whole, share = found["milliseconds"], found["products_milliseconds"] / found["milliseconds"]
    return [
        table("products", ">count", ">GFLOP", ">ms", ">GFLOP/s", rows=rows),
        f"An update takes {whole:.1f} ms: its products alone are {share:.0%} of that.",
    ]


def _sum(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"product": name} | {key: sum(row[key] for row in rows) for key in ("count", "gflop", "milliseconds")}


def find(jaxpr: Jaxpr, platform: str) -> Iterator[Product]:
    """Yields the products of a program, those of a loop's body as often as it runs.

    Of the branches for several platforms it takes that of `platform`, of others the one with the most work. A loop
    whose trips nobody knows before it runs counts once.
    """
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            left, right = (one.aval for one in equation.invars)
            keys = ("dimension_numbers", "precision", "preferred_element_type")
            yield Product(left.shape, right.shape, left.dtype, tuple((key, params[key]) for key in keys))
        elif name == "cond":
            branches = [list(find(branch.jaxpr, platform)) for branch in params["branches"]]
            platforms = params.get("branches_platforms")
            if platforms:
                fitting = (i for i, names in enumerate(platforms) if names is None or platform in names)
                yield from branches[next(fitting)]
            else:
                yield from max(branches, key=lambda products: sum(product.flops for product in products))
        elif name != "pallas_call":
            inner = [product for each in _inner(params) for product in find(each, platform)]
            yield from inner * (params["length"] if name == "scan" else 1)


def _inner(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """Yields the programs that an equation calls."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            closed = getattr(each, "jaxpr", each)
            if hasattr(closed, "eqns"):
                yield closed


def _alone(product: Product) -> steps.Step:
    """Returns the product of made-up numbers, compiled for one device, and waited for each time."""
    function = jax.jit(functools.partial(lax.dot_general, **dict(product.settings)))
    numbers = np.random.default_rng(0).standard_normal(65_521)  # a prime: no two rows alike
    operands = [
        jax.device_put(np.resize(numbers, shape).astype(product.dtype)) for shape in (product.left, product.right)
    ]
    return lambda: jax.block_until_ready(function(*operands))
