"""A program that ends with code 7 while it still has batches, and while threads of tf.data ask for the next shards."""

import sys
import time

from mlm.data.manifest import load_manifest
from mlm.data.order import Lane
from tests.data import rows

visits = Lane.visits


def slow_visits(lane, start):
    for visit in visits(lane, start):
        time.sleep(0.3)
        yield visit


Lane.visits = slow_visits
batches = rows.train(load_manifest(sys.argv[1]))
next(batches)
sys.exit(7)
