"""`python -m mlm` in one of several processes, for tests: $MLM_TEST_PAUSE seconds before every step, and a fault.

$MLM_TEST_FAULT is "hang:STEP" (the input of that step never comes), "block:STEP" (the same, and no other thread runs
either) or "raise:STEP".
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
        real, compiler.distributed = compiler.distributed, types.SimpleNamespace(global_state=first)
        try:
            write(*arguments)
        finally:
            compiler.distributed = real

    compiler._cache_write = as_first


def fault(kind: str) -> None:
    if kind == "hang":
        time.sleep(3600)
    if kind == "block":
        ctypes.PyDLL(None).sleep(3600)  # and keeps the lock of Python
    raise ValueError("the test breaks it")


def prepare() -> None:
    from mlm.tasks import pretraining

    keep_programs()
    batches, pause = pretraining.train_batches, float(os.environ.get("MLM_TEST_PAUSE", "0"))
    kind, _, at = os.environ.get("MLM_TEST_FAULT", "").partition(":")

    def train_batches(*arguments, start):
        for step, batch in enumerate(batches(*arguments, start=start), start + 1):
            time.sleep(pause)
            if kind and step == int(at):
                fault(kind)
            yield batch

    pretraining.train_batches = train_batches


if __name__ == "__main__":
    from mlm.cluster import distributed

    initialize = distributed.initialize

    def joined(*arguments, **keywords):
        prepare()
        return initialize(*arguments, **keywords)

    distributed.initialize = joined
    sys.exit(__main__.main(sys.argv[1:]))
