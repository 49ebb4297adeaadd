"""`python -m mlm` with small blocks, and a moment after each block and each shard: to be killed at."""

import sys
import time

from mlm import __main__
from mlm.data import blocks, shards

cut, put = blocks._cut, shards.put_file


def slow_cut(documents):
    for block in cut(documents):
        time.sleep(0.1)
        yield block


def slow_put(file, target):
    put(file, target)
    time.sleep(0.1)


# At the top: worker processes run this file too.
blocks.BLOCK_DOCUMENTS, blocks._cut = 25, slow_cut
shards.OPEN_FILES, shards.put_file = 1, slow_put

if __name__ == "__main__":
    sys.exit(__main__.main(sys.argv[1:]))
