"""The part "products" of `bench`: the matrix products of our update, each alone, beside the whole update.

The hardware has to do them whatever the rest of the program looks like: what an update takes beyond them is all that
faster code could still save. Products inside a Pallas kernel are not among them.
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
INTERVALS = 0.2  # of a timing, short because there are many


@dataclasses.dataclass(frozen=True)
class Product:
    """A `lax.dot_general`: the shapes and dtype of its operands, and its other arguments."""

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
        """Of one, with a multiply-add as two."""
        return 2 * math.prod(self.sizes)

    def __str__(self) -> str:
        batch, m, k, n = self.sizes
        return (f"{batch} x " if batch > 1 else "") + f"[{m}, {k}] @ [{k}, {n}]"


def compare_products(config: ConfigDict, seconds: float) -> dict[str, Any]:
    """Measures our update, and each of its products on one device, in the size of that device's share.

    Returns:
      "milliseconds" of an update, "products_milliseconds" of all its products, and "rows", the costliest first, of
      {"product", "count" in an update, "gflop" and "milliseconds" of all of them}.
    """
    task = Pretraining.without_data(config)
    mesh = task.mesh
    if mesh.size > mesh.shape["data"]:  # only the compiler knows the products of a share
        raise InputError("--parts products: config.mesh.fsdp and config.mesh.tensor must be 1 for it.")
    host = steps.random_rows(task)
    interleaved.say("products: compiling ours")
    _, step = steps.our_step(task, host)
    program = task.train_step.trace(task.shapes, sharding.put_batch(host, mesh, len(host["record_id"]))).jaxpr.jaxpr
    counts = collections.Counter(find(program, mesh.devices.flat[0].platform))
    candidates = {"mlm": steps.repeated(step)} | {product: steps.repeated(_alone(product)) for product in counts}
    rates = interleaved.measure("products", candidates, seconds, intervals=INTERVALS)
    found = interleaved.summary(rates, 1)
    rows = [
        {
            "product": str(product),
            "count": count,
            "gflop": count * product.flops / 1e9,
            "milliseconds": count * found[product]["milliseconds"],
        }
        for product, count in counts.items()
    ]
    rows.sort(key=lambda row: -row["milliseconds"])
    total = sum(row["milliseconds"] for row in rows)
    return {"milliseconds": found["mlm"]["milliseconds"], "products_milliseconds": total, "rows": rows}


def tables(found: dict[str, Any]) -> list[RenderableType]:
    """Returns the table of `compare_products`."""
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
    """Yields the products of a program, those of a scan's body as often as it runs, of a while loop's body once.

    Of the branches of a conditional it takes that of `platform`, else the one with the most FLOPs.
    """
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            left, right = (one.aval for one in equation.invars)
            keys = ("dimension_numbers", "precision", "preferred_element_type")
            yield Product(left.shape, right.shape, left.dtype, tuple((key, params[key]) for key in keys))
        elif name == "cond":
            branches = [list(find(branch.jaxpr, platform)) for branch in params["branches"]]
            if platforms := params.get("branches_platforms"):
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
    """Returns a call of the product on one device, which waits for the result."""
    function = jax.jit(functools.partial(lax.dot_general, **dict(product.settings)))
    numbers = np.random.default_rng(0).standard_normal(65_521)  # a prime: no two rows alike
    operands = [
        jax.device_put(np.resize(numbers, shape).astype(product.dtype)) for shape in (product.left, product.right)
    ]
    return lambda: jax.block_until_ready(function(*operands))
