"""Deal: blocks -> shards, in the order of their hashes."""

import heapq

import numpy as np

from mlm.data.order import hash_order


def deal(
    hashes_N: np.ndarray, copies_N: np.ndarray, tokens_N: np.ndarray, *, count: int
) -> list[np.ndarray]:
    """Returns the indices of the blocks of each of `count` shards, in order; shards differ by one block at most.

    Each of the N blocks goes to the shard that has the fewest tokens so far; its copies go to others, if there are any.
    """
    blocks = np.repeat(np.arange(len(hashes_N)), copies_N)
    copy = np.concatenate([np.zeros(0, np.int64), *map(np.arange, copies_N)])
    shards: list[list[int]] = [[] for _ in range(count)]
    holders: dict[int, set[int]] = {}  # of blocks with copies
    heap = [(0, shard) for shard in range(count)]
    for block in blocks[hash_order(0, copy, hashes_N[blocks])].tolist():
        holding = holders.setdefault(block, set()) if copies_N[block] > 1 else set()
        passed = []  # shards that have a copy
        while heap[0][1] in holding and len(heap) > 1:
            passed.append(heapq.heappop(heap))
        tokens, shard = heap[0]
        heapq.heapreplace(heap, (tokens + int(tokens_N[block]), shard))
        for tokens_and_shard in passed:
            heapq.heappush(heap, tokens_and_shard)
        shards[shard].append(block)
        holding.add(shard)
    return [np.array(shard, np.int64) for shard in shards]


def copies(hashes_N: np.ndarray, weights_N: np.ndarray | float) -> np.ndarray:
    """Returns how often each block comes: with weight 2.5 twice, and once more for the half that its hash picks."""
    more_N = hashes_N % np.uint64(2**32) < np.round(weights_N % 1 * 2**32).astype(np.uint64)
    return np.floor(weights_N).astype(np.int64) + more_N
