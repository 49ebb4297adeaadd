"""Blocks dealt to shards: evenly, copies apart."""

from collections import Counter

import numpy as np
import pytest

from mlm.data.deal import copies, deal


def blocks(count: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.integers(0, 2**64, count, np.uint64), draw.integers(0, 1000, count)


def dealt(hashes_N, tokens_N, copies_N) -> list[list[int]]:
    return [shard.tolist() for shard in deal(hashes_N, copies_N, tokens_N, count=7)]


def test_the_order_is_that_of_the_hashes_and_not_that_of_the_blocks():
    hashes, tokens = blocks(500)
    once = np.ones(500, np.int64)
    found = dealt(hashes, tokens, once)
    order = np.random.default_rng(1).permutation(500)
    again = dealt(hashes[order], tokens[order], once)
    assert [order[shard].tolist() for shard in again] == found
    assert found[0][:3] == [67, 351, 399], "another order would change all shards"


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.25, 3.0])
def test_a_weight_is_copies_in_other_shards(weight):
    hashes, tokens = blocks(2000)
    wanted = copies(hashes, weight)
    found = dealt(hashes, tokens, wanted)
    held = Counter(block for shard in found for block in shard)
    assert [held[block] for block in range(2000)] == wanted.tolist()
    assert set(wanted.tolist()) <= {int(weight), int(weight) + 1}
    part = weight % 1
    assert abs(wanted.mean() - weight) <= 4 * (part * (1 - part) / 2000) ** 0.5
    assert all(len(set(shard)) == len(shard) for shard in found), "a shard holds a block once"
    sums = [int(tokens[shard].sum()) for shard in found]
    assert max(sums) - min(sums) <= 2 * tokens.max()
    # what one weight keeps a larger one keeps
    assert (wanted <= copies(hashes, weight + 0.3)).all()
