"""`python -m mlm`, in which the clock of process 1 is a minute fast, and its rows lie in another order."""

import sys
import time

import numpy as np

from mlm.__main__ import main
from mlm.training import sharding

if "--process-id=1" in sys.argv:
    clock, put_batch = time.time, sharding.put_batch
    time.time = lambda: clock() + 60
    sharding.put_batch = lambda batch, mesh, rows: put_batch(
        {name: np.roll(column, mesh.size > 1, 0) for name, column in batch.items()}, mesh, rows
    )

if __name__ == "__main__":
    sys.exit(main())
