"""`python -m mlm train`, with a pause before every step: so that a test can kill it at a moment of its choice."""

import sys
import time

from mlm import __main__
from mlm.training import sharding

put_batch = sharding.put_batch


def delayed(*arguments, **keywords):
    time.sleep(0.1)
    return put_batch(*arguments, **keywords)


if __name__ == "__main__":
    sharding.put_batch = delayed
    sys.exit(__main__.main(sys.argv[1:]))
