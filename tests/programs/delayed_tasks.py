"""`python -m mlm` whose tasks on the hosts of a run take a moment longer: to be killed in.

MLM_TEST_DELAY is the moment, in seconds.
"""

import os
import sys
import time

from mlm import __main__
from mlm.engine import dask_engine

run_task = dask_engine.run_task


def delayed(expected: dict[str, str], task: bytes) -> object:
    time.sleep(float(os.environ.get("MLM_TEST_DELAY", "0.4")))
    return run_task(expected, task)


# which a thread of the host calls, before a process of its pool computes the task
dask_engine.run_task = delayed

if __name__ == "__main__":
    sys.exit(__main__.main(sys.argv[1:]))
