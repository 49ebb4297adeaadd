"""`python -m mlm`, in which the clock of process 1 is a minute fast, and its rows lie in another order.

Its first step takes it longer to compile than process 0 would wait in a collective (30 s on CPUs).
"""

import sys
import time

import numpy as np
from jax._src import compiler

from mlm.__main__ import main
from mlm.training import sharding

if "--process-id=1" in sys.argv:
    clock, put_batch = time.time, sharding.put_batch
    time.time = lambda: clock() + 60
    sharding.put_batch = lambda batch, mesh, rows: put_batch(
        {name: np.roll(column, mesh.size > 1, 0) for name, column in batch.items()}, mesh, rows
    )
    compile_program, late = compiler.backend_compile_and_load, [35.0]

    def compile_late(backend, module, *args, **kwargs):
        if late and module.operation.attributes["sym_name"].value == "jit_step":
            time.sleep(late.pop())
        return compile_program(backend, module, *args, **kwargs)

    compiler.backend_compile_and_load = compile_late

if __name__ == "__main__":
    sys.exit(main())
