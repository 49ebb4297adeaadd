"""Which rows, masks and dropout bits the devices of every host hold, and the hosts' clocks."""

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
from mlm.data import mixture, order
from mlm.data.stages import make_stages
from mlm.model import layers
from mlm.tasks.pretraining_data import train_batches
from mlm.training import data_parallel, sharding
from mlm.verify.session import Columns, Result, Session, cpu, made_up_rows, one_device, put
from mlm.verify.step import small

CLOCKS = 5.0  # seconds: a lease that is not renewed for 45 s counts as left behind (mlm/workdir.py)
BATCHES = 2


def check(session: Session) -> Iterator[Result]:
    """Rows against the order contract, masks and dropout against the host's CPU, one clock against another."""
    changes = small(session)
    task, host, count = session.task(changes), cpu(), changes["data.global_batch"]
    batch, rows_B = made_up_rows(task), data_parallel.logical_rows(task.mesh, count)  # in the order of the array
    on_devices = put(batch, task)
    yield _compare("rows of a batch", on_devices, {name: column[rows_B] for name, column in batch.items()})
    if host is None:
        yield Result("masks and dropout's bits", "JAX_PLATFORMS leaves the CPU out: add ,cpu to it")
    else:
        here = _masks_and_bits(task, on_devices)
        with jax.default_device(host):
            alone = session.task(changes, one_device(host))
            there = _masks_and_bits(alone, put(batch, alone))
        for what, one, other in zip(("masks", "dropout's bits"), here, there, strict=True):
            yield _compare(what, one, jax.tree.map(lambda column: np.asarray(column)[rows_B], other))
    what, reason = f"order of the shards' rows, {BATCHES} batches", without_shards(session)
    yield Result(what, reason) if reason else _compare(what, *_orders(session))
    clocks_P = _gather(divmod(round(1e3 * time.time()), 2**20)) @ np.array([2**20 / 1e3, 1e-3])
    apart, furthest = float(np.ptp(clocks_P)), int(abs(clocks_P - np.median(clocks_P)).argmax())
    measured = f"{apart:.1f} s apart" + (f", host {furthest} the furthest" if apart > CLOCKS else "")
    expected = f"at most {CLOCKS:g} s: leases and train.hours read them"
    yield Result("clocks of the hosts", measured, expected, apart <= CLOCKS, {"clocks": clocks_P.tolist()})


def _masks_and_bits(task: Any, batch: Any) -> Any:
    """Returns the masked batch, and bits of dropout for its rows."""
    shape = (len(batch["record_id"]), task.info.length, 8)
    bits = jax.jit(lambda rows_B: layers.random_bits(jnp.uint32(7), shape, rows_B))(batch["record_id"])
    return jax.jit(lambda batch: task.inputs(batch, jnp.int32(0)))(batch), bits


def without_shards(session: Session) -> str:
    """Returns why the workdir's shards can't be read, "" if they can."""
    if session.manifest is None:
        return "no shards in the workdir"
    return "" if importlib.util.find_spec("tensorflow") else "TensorFlow, which reads shards, is not installed"


def open_batches(session: Session) -> tuple[Iterator[Columns], slice]:
    """Returns this host's rows of the run's batches, all of data.global_batch rows, and where they lie in a batch."""
    config = configs.replace(session.config, {"data.batch_stages": (), "data.skip_batches": ()})
    mesh, stages = sharding.mesh_of(config.mesh), make_stages(config, session.manifest.splits["train"].records)
    stream = train_batches(config, session.manifest, mesh, stages, start=0)
    return stream, slice(*sharding.local_rows(mesh, config.data.global_batch))


def _orders(session: Session) -> tuple[Any, Any]:
    """Returns records and epochs of this host's first batches, as they are read, and by arithmetic on the manifest."""
    (stream, rows), data = open_batches(session), session.config.data
    read = [next(stream) for _ in range(BATCHES)]
    lanes = mixture.lanes(session.manifest, "train", seed=data.seed, lanes=data.lanes)
    columns = order.batch_rows(lanes, rows_before=0, rows=data.global_batch, count=BATCHES)
    expected = [column[:, rows].astype(np.uint32) for column in columns]
    return [np.stack([columns[name] for columns in read]) for name in ("record_id", "epoch")], expected


def _compare(what: str, arrays: Any, expected: Any) -> Result:
    """Compares checksums of what this host holds of arrays, or of its numpy arrays; names the hosts that differ."""
    sums = [0, 0]
    for leaf, right in zip(jax.tree.leaves(arrays), jax.tree.leaves(expected), strict=True):
        shards = [(shard.data, right[shard.index]) for shard in getattr(leaf, "addressable_shards", ())]
        for pair in shards or [(leaf, right)]:
            sums = [zlib.crc32(np.ascontiguousarray(x).tobytes(), crc) for x, crc in zip(pair, sums, strict=True)]
    halves_Px4 = _gather([half for crc in sums for half in divmod(crc, 2**16)])
    sums_Px2 = halves_Px4[:, ::2] * 2**16 + halves_Px4[:, 1::2]
    wrong = [f"host {number}" for number, (one, other) in enumerate(sums_Px2) if one != other]
    measured = f"not those on {', '.join(wrong[:8])}" if wrong else f"checksum {sums_Px2[0, 0]:08x} on host 0"
    return Result(what, measured, "on every host those of its CPU", not wrong, {"checksums": sums_Px2.tolist()})


def _gather(values: Any) -> np.ndarray:
    """Returns small whole numbers of every host, int64 [P, N]."""
    gathered = multihost_utils.process_allgather(np.array(values, np.int32))
    return np.asarray(gathered, np.int64).reshape(jax.process_count(), -1)
