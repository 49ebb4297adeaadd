"""What the step computes: its metrics in several dtypes and on several meshes, and what it reads on every host.

It is the run's step but for its size: at most a few layers and rows, so that the host's CPU can follow.
"""

import importlib.util
import time
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mlm import config as configs
from mlm.bench.steps import put
from mlm.cluster import distributed
from mlm.data import mixture, order
from mlm.data.stages import make_stages
from mlm.model import layers
from mlm.tasks.pretraining import Pretraining
from mlm.tasks.pretraining_data import train_batches
from mlm.training import sharding
from mlm.verify.kernels import roundoff
from mlm.verify.session import Result, Session, Values, made_up_rows, one_device

LAYERS, LAYERS_QUICK = 4, 2  # at most; both hold local and global layers of ModernBERT
ROWS, BATCHES = 8, 2  # at least, if the config has so many; batches of the shards
CLOCKS = 5.0  # seconds: a lease that is not renewed for 45 s counts as left behind (mlm/workdir.py)


def check_step(session: Session) -> Iterator[Result]:
    """The devices in the run's dtype, again, in float32, one of them alone, and the host's CPU in float32."""
    changes, dtype, device = _small(session), session.config.model.dtype, jax.local_devices()[0]
    task, exact = session.task(changes), changes | {"model.dtype": "float32", "model.attention": "xla"}
    batch, count = made_up_rows(task), task.config.model.layers
    of = f"{count} of {session.config.model.layers} layers, {task.config.data.global_batch} rows"
    of += ", without dropout" if "model.hidden_dropout" in changes else ""
    (state, here), (again, second) = _step(task, batch), _step(task, batch)
    repeats: bool | None = bool(is_same((state, here), (again, second)))
    measured = f"the same {len(jax.tree.leaves(state))} arrays" if repeats else "other numbers"
    if not repeats and device.platform == "gpu":  # how they differ is in the lines below
        why = "on a GPU, XLA adds in no fixed order"
        repeats, measured = None, f"other last bits: {why} without XLA_FLAGS=--xla_gpu_deterministic_ops=true"
    yield Result(f"{dtype} twice, {of}", measured, "the same to the bit", repeats)
    # 12 roundings a layer and 10 around them add up as a random walk; a product of so many float32 terms is one, too.
    walk, sums = (12 * count + 10) ** 0.5, session.config.model.intermediate_size**0.5 * 2.0**-24
    with jax.default_matmul_precision("highest"):
        float32 = _step(session.task(exact), batch)[1]
        with jax.default_device(host := jax.local_devices(backend="cpu")[0]):
            there = _step(session.task(exact, one_device(host)), batch)[1]
    limit = walk * (roundoff(dtype, device) + sums)
    yield _compare(f"{dtype} and float32 here, {of}", here, float32, limit)
    yield _compare(f"float32 here and on the host's CPU, {of}", float32, there, walk * (2.0**-24 + sums))
    if jax.device_count() > 1:
        alone = _step(session.task(changes, one_device(device)), batch)[1]
        yield _compare(f"{dtype} on all {jax.device_count()} devices and on one, {of}", here, alone, limit)


@jax.jit
def is_same(one: Any, other: Any) -> jax.Array:
    """Returns whether two trees of arrays are equal, NaN to NaN."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jnp.stack([jnp.array_equal(a, b, equal_nan=True) for a, b in pairs]).all()


def _small(session: Session) -> Values:
    """Returns the changes of the config: few layers, a few rows on each device, no dropout that depends on the mesh."""
    task = session.task()
    model, shards = task.config.model, task.mesh.shape["data"] * task.mesh.shape["fsdp"]
    count = min(model.layers, LAYERS_QUICK if session.quick else LAYERS)
    rows = min(task.config.data.global_batch, shards * -(-ROWS // shards))
    changes = {"model.layers": count, "model.remat_feed_forward": min(model.remat_feed_forward, count)}
    if model.implementation == "transformers" and task.mesh.shape["data"] > 1:  # its dropout depends on the mesh
        changes |= {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
    return changes | {"data.global_batch": rows}


def _step(task: Pretraining, batch: Any) -> tuple[Any, dict[str, float]]:
    """Returns the state and the metrics after the first step."""
    state, rows = task.init(), put(task, batch)
    distributed.compile_together(task.train_step, state, rows)
    state, metrics = task.train_step(state, rows)
    return state, {name: float(metrics[name]) for name in ("loss", "accuracy", "grad_norm") if name in metrics}


def _compare(what: str, metrics: dict[str, float], expected: dict[str, float], limit: float) -> Result:
    """Compares the gradient's norm relatively, the others as they are: a new model's logits differ by a nat."""
    scales = {name: expected[name] if name == "grad_norm" else 1.0 for name in metrics}
    is_right = all(abs(metrics[name] - expected[name]) <= limit * scales[name] for name in metrics)  # false for NaN
    measured = ", ".join(f"{name} {metrics[name]:.6g} and {expected[name]:.6g}" for name in metrics)
    values = {"metrics": metrics, "expected": expected, "limit": limit}
    return Result(what, measured, f"at most {limit:.2g} apart", is_right, values)


def check_rows(session: Session) -> Iterator[Result]:
    """Rows against the order contract, masks and dropout against the host's CPU, one clock against another."""
    changes, host = _small(session), jax.local_devices(backend="cpu")[0]
    task = session.task(changes)
    batch, rows_B = made_up_rows(task), sharding.logical_rows(task.mesh, task.config.data.global_batch)
    here = _read(task, batch)
    with jax.default_device(host):
        there = jax.tree.map(
            lambda column: np.asarray(column)[rows_B], _read(session.task(changes, one_device(host)), batch)
        )
    for what, one, other in zip(("rows of a batch", "masks", "dropout's bits"), here, there, strict=True):
        yield _checksum(what, one, other)
    what, data = f"order of the shards' rows, {BATCHES} batches", session.config.data
    if reason := without_shards(session):
        yield Result(what, reason)
    else:
        stream, rows = open_batches(session)
        columns = [next(stream) for _ in range(BATCHES)]
        read = [np.stack([column[name] for column in columns]) for name in ("record_id", "epoch")]
        lanes = mixture.lanes(session.manifest, "train", seed=data.seed, lanes=data.lanes)
        expected = order.batch_rows(lanes, rows_before=0, rows=data.global_batch, count=BATCHES)
        yield _checksum(what, read, [column[:, rows].astype(np.uint32) for column in expected])
    clocks_P = _gather(divmod(round(1e3 * time.time()), 2**20)) @ np.array([2**20 / 1e3, 1e-3])
    apart, ends = float(np.ptp(clocks_P)), f", host {clocks_P.argmax()} ahead of host {clocks_P.argmin()}"
    measured = f"{apart:.1f} s apart{ends if apart > CLOCKS else ''}"
    expected = f"at most {CLOCKS:g} s: leases and train.hours read them"
    yield Result("clocks of the hosts", measured, expected, apart <= CLOCKS, {"clocks": clocks_P.tolist()})


def _read(task: Pretraining, batch: Any) -> tuple[Any, Any, Any]:
    """Returns the batch on the devices of a task, the masked batch, and bits of dropout for its rows."""
    rows, shape = put(task, batch), (len(batch["record_id"]), task.info.length, 8)
    bits = jax.jit(lambda rows_B: layers.random_bits(jnp.uint32(7), shape, rows_B))(rows["record_id"])
    return rows, jax.jit(lambda rows: task.inputs(rows, jnp.int32(0)))(rows), bits


def without_shards(session: Session) -> str:
    """Returns why the workdir's shards can't be read, "" if they can."""
    if session.manifest is None:
        return "no shards in the workdir"
    return "" if importlib.util.find_spec("tensorflow") else "TensorFlow, which reads shards, is not installed"


def open_batches(session: Session) -> tuple[Iterator[dict[str, np.ndarray]], slice]:
    """Returns this host's rows of the run's batches, all of data.global_batch rows, and where they lie in a batch."""
    config = configs.replace(session.config, {"data.batch_stages": (), "data.skip_batches": ()})
    mesh, stages = sharding.mesh_of(config.mesh), make_stages(config, session.manifest.splits["train"].records)
    stream = train_batches(config, session.manifest, mesh, stages, start=0)
    return stream, slice(*sharding.local_rows(mesh, config.data.global_batch))


def _checksum(what: str, arrays: Any, expected: Any) -> Result:
    """Compares what the devices of every host hold of arrays, or its numpy arrays; names the hosts that differ."""
    sums = [0, 0]
    for leaf, right in zip(jax.tree.leaves(arrays), jax.tree.leaves(expected), strict=True):
        shards = [(shard.data, right[shard.index]) for shard in getattr(leaf, "addressable_shards", ())]
        for pair in shards or [(leaf, right)]:
            sums = [zlib.crc32(np.ascontiguousarray(x).tobytes(), crc) for x, crc in zip(pair, sums, strict=True)]
    gathered = _gather([*divmod(sums[0], 2**16), sums[0] != sums[1]])
    checksums, wrong = [f"{high:04x}{low:04x}" for high, low, _ in gathered], np.flatnonzero(gathered[:, 2])
    hosts = ", ".join(f"host {number}" for number in wrong[:8])
    measured = f"not those on {hosts}" if hosts else f"checksum {checksums[0]} on host 0"
    return Result(what, measured, "on every host those of its CPU", not hosts, {"checksums": checksums})


def _gather(values: Any) -> np.ndarray:
    """Returns small whole numbers of every host, int64 [P, N]."""
    gathered = multihost_utils.process_allgather(np.array(values, np.int32))
    return np.asarray(gathered, np.int64).reshape(jax.process_count(), -1)
