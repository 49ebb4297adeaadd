"""`python -m mlm`, in which the rows of process 1 lie in another order."""

import sys

import numpy as np

from mlm.__main__ import main
from mlm.training import sharding

if "--process-id=1" in sys.argv:
    put_batch = sharding.put_batch
    sharding.put_batch = lambda batch, mesh, rows: put_batch(
        {name: np.roll(column, mesh.size > 1, 0) for name, column in batch.items()}, mesh, rows
    )

if __name__ == "__main__":
    sys.exit(main())
