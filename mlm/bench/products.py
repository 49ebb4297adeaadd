"""The part "products" of `bench`: the matrix products of our step, each alone, beside the whole step.

The hardware has to do them in any case: what the step takes beyond them is all that faster code could still save.
Products inside a Pallas kernel are not among them.
"""

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

from mlm.bench import interleaved, steps
from mlm.errors import InputError
from mlm.tasks.pretraining import Pretraining

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
        """A multiply-add counts as two."""
        return 2 * math.prod(self.sizes)

    def __str__(self) -> str:
        batch, m, k, n = self.sizes
        return (f"{batch} x " if batch > 1 else "") + f"[{m}, {k}] @ [{k}, {n}]"


def compare_products(config: ConfigDict, seconds: float) -> dict[str, Any]:
    """Measures our step, and each of its products on one device, in the size that it has there.

    Returns "milliseconds" of a step, "products_milliseconds" of all its products, and "rows", the costliest first:
    {"product", "count" in a step, "gflop" and "milliseconds" of all of them}.
    """
    task = Pretraining.without_data(config)
    if task.mesh.size > task.mesh.shape["data"]:  # only the compiler knows the products of split parameters
        raise InputError("--parts products: config.mesh.fsdp and config.mesh.tensor must be 1 for it.")
    host = steps.random_rows(task)
    interleaved.say("products: compiling ours")
    _, step = steps.our_step(task, host)
    program = task.train_step.trace(task.shapes, host).jaxpr.jaxpr
    counts = collections.Counter(find(program, task.mesh.devices.flat[0].platform))
    candidates = {"mlm": steps.repeated(step)} | {product: steps.repeated(_alone(product)) for product in counts}
    rates = interleaved.measure("products", candidates, seconds, intervals=INTERVALS)
    taken = {name: row["milliseconds"] for name, row in interleaved.summary(rates, 1).items() if name != "ratios"}
    rows = [
        {"product": str(each), "count": count, "gflop": count * each.flops / 1e9, "milliseconds": count * taken[each]}
        for each, count in counts.items()
    ]
    rows.sort(key=lambda row: -row["milliseconds"])
    total = sum(row["milliseconds"] for row in rows)
    return {"milliseconds": taken["mlm"], "products_milliseconds": total, "rows": rows}


def find(jaxpr: Jaxpr, platform: str) -> Iterator[Product]:
    """Yields the products of a program, those of a scan's body as often as it runs, of a while loop's body once.

    Of the branches of a conditional it takes that of `platform`, else the one with the most FLOPs.
    """
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            left, right = (one.aval for one in equation.invars)
            settings = [(key, params[key]) for key in ("dimension_numbers", "precision", "preferred_element_type")]
            yield Product(left.shape, right.shape, left.dtype, tuple(settings))
        elif name == "cond":
            branches = [list(find(branch.jaxpr, platform)) for branch in params["branches"]]
            if platforms := params.get("branches_platforms"):
                fitting = (i for i, names in enumerate(platforms) if names is None or platform in names)
                yield from branches[next(fitting)]
            else:
                yield from max(branches, key=lambda products: sum(product.flops for product in products))
        elif name != "pallas_call":
            called = (getattr(value, "jaxpr", value) for value in jax.tree.leaves(list(params.values())))
            inner = [product for each in called if hasattr(each, "eqns") for product in find(each, platform)]
            yield from inner * (params["length"] if name == "scan" else 1)


def _alone(product: Product) -> steps.Step:
    """Returns a function that computes the product on one device and waits for it."""
    function = jax.jit(functools.partial(lax.dot_general, **dict(product.settings)))
    numbers = np.random.default_rng(0).standard_normal(65_521)  # a prime: no two rows alike
    left, right = (jax.device_put(np.resize(numbers, x).astype(product.dtype)) for x in (product.left, product.right))
    return lambda: jax.block_until_ready(function(left, right))
