"""`python -m mlm` whose tasks on the hosts of a run take a moment longer: to be killed in.

MLM_TEST_DELAY is the moment, in seconds.
"""

import functools
import os
import sys
import time

from mlm import __main__
from mlm.cluster import dask_engine

run = dask_engine._run


@functools.wraps(run)
def slow_run(task: bytes) -> object:
    time.sleep(float(os.environ.get("MLM_TEST_DELAY", "0.4")))
    return run(task)


dask_engine._run = slow_run  # at the top: worker processes run this file too

if __name__ == "__main__":
    sys.exit(__main__.main(sys.argv[1:]))
