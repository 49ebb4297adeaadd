"""Deal: blocks -> shards, in the order of their hashes."""

from collections import deque
from itertools import islice

import numpy as np

from mlm.data.order import hash_order


def deal(hashes_N: np.ndarray, copies_N: np.ndarray, *, count: int, seed: int) -> list[np.ndarray]:
    """Returns the indices of the blocks of each of `count` shards, in order; the shards are equal to one block.

    A block that comes several times goes to as many shards, if there are so many.

    Args:
      hashes_N: uint64, of N blocks.
      copies_N: how often each of them comes.
      seed: another one deals them otherwise.
    """
    blocks = np.repeat(np.arange(len(hashes_N)), copies_N)
    copy = np.concatenate([np.zeros(0, np.int64), *map(np.arange, copies_N)])
    waiting = deque(blocks[hash_order(seed, copy, hashes_N[blocks])].tolist())
    shards: list[list[int]] = [[] for _ in range(count)]
    held: list[set[int]] = [set() for _ in range(count)]  # blocks with copies
    number = 0
    while waiting:
        shard = number % count
        place = next((p for p, block in enumerate(islice(waiting, count)) if block not in held[shard]), 0)
        block = waiting[place]
        del waiting[place]
        shards[shard].append(block)
        if copies_N[block] > 1:
            held[shard].add(block)
        number += 1
    return [np.array(shard, np.int64) for shard in shards]


def copies(hashes_N: np.ndarray, weight: float) -> np.ndarray:
    """Returns how often each block of a source comes: 2.5 times is twice, and again for the half that its hash picks."""
    return int(weight) + (hashes_N % np.uint64(2**32) < np.uint64(round(weight % 1 * 2**32))).astype(np.int64)
