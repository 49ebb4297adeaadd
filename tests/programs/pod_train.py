"""`python -m mlm` in one of several processes, for tests: $MLM_TEST_PAUSE seconds before every step, and a fault.

$MLM_TEST_FAULT is "hang:STEP" (the input of that step never comes) or "block:STEP" (the same, and no other thread runs
either). With $MLM_TEST_RANDOM the rows are random ones, which need no TensorFlow. Where $JAX_FORCE_TPU_INIT is set, jax
takes the machine for a TPU's, whose metadata server may be asked.
"""

import ctypes
import os
import sys
import time
import types

from mlm import __main__


def keep_programs() -> None:
    """On CPU each process compiles a program of its own, and jax keeps those of process 0 alone."""
    from jax._src import compiler

    first = types.SimpleNamespace(process_id=0, client=None)
    write = compiler._cache_write

    def as_first(*arguments) -> None:
        real = compiler.distributed
        compiler.distributed = types.SimpleNamespace(global_state=first)
        try:
            write(*arguments)
        finally:
            compiler.distributed = real

    compiler._cache_write = as_first


def random_rows(config, manifest, mesh, stages, *, start):
    from mlm.training import sharding
    from tests.support.tiny import random_batch

    rows = slice(*sharding.local_rows(mesh, config.data.global_batch))
    for step in range(start, stages.steps):
        yield {
            name: column[rows]
            for name, column in random_batch(config.data.global_batch, seed=step).items()
        }


def prepare() -> None:
    from mlm.tasks import pretraining

    keep_programs()
    batches = random_rows if os.environ.get("MLM_TEST_RANDOM") else pretraining.train_batches
    pause = float(os.environ.get("MLM_TEST_PAUSE", "0"))
    kind, _, at = os.environ.get("MLM_TEST_FAULT", "").partition(":")

    def train_batches(*arguments, start):
        for step, batch in enumerate(batches(*arguments, start=start), start + 1):
            time.sleep(pause)
            if kind == "hang" and step == int(at):
                time.sleep(3600)
            if kind == "block" and step == int(at):
                ctypes.PyDLL(None).sleep(3600)  # and keeps the lock of Python
            yield batch

    pretraining.train_batches = train_batches


if __name__ == "__main__":
    import jax  # noqa: F401  # which sets this where it sees no chip, as GKE does

    if "TPU_WORKER_HOSTNAMES" not in os.environ:
        os.environ.pop("TPU_SKIP_MDS_QUERY", None)
    from mlm.cluster import distributed

    initialize = distributed.initialize

    def joined(*arguments, **keywords):
        prepare()
        return initialize(*arguments, **keywords)

    distributed.initialize = joined
    sys.exit(__main__.main(sys.argv[1:]))
