"""Near duplicates: documents similar to an earlier one, by Jaccard over stretches of 5 words.

MinHash (Broder, 1997) by rensa, cut into bands (Leskovec et al., Mining of Massive Datasets, section 3.4): a share
s^ROWS of the bands of two documents of similarity s is the same, from which s is estimated. An earlier document counts
even if it is left out itself: of a chain only the first stays, and no decision waits for another.

Dimensions: N documents, B bands, E entries.
"""

from collections.abc import Sequence

import numpy as np
from rensa import RMinHash

from mlm.data.keep_out import FACTOR, stretches

WORDS = 5
BANDS, ROWS = 42, 6
EARLIEST = 16  # documents of a bucket that its others are compared to: more pairs are found as the number grows
ENTRY = np.dtype([("hash", "<u8"), ("part", "<u4"), ("row", "<u4")])  # a band of a document
PAIR = np.dtype([("part", "<u4"), ("row", "<u4"), ("first_part", "<u4"), ("first_row", "<u4"), ("bands", "<u4")])


def entries(texts: Sequence[str], *, part: int = 0, row: int = 0) -> np.ndarray:
    """Returns the bands of documents in consecutive rows, as ENTRY [E]; documents of less than 5 words have none."""
    hashes, numbers = stretches(texts, WORDS)
    used, starts = np.unique(numbers, return_index=True)
    offsets = np.append(starts, len(hashes)).astype(np.uint64)
    minima = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, num_perm=BANDS * ROWS, seed=1)
    minima_NxBxR = np.array(minima.to_rows(), np.uint64).reshape(-1, BANDS, ROWS)
    hashes_NxB = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), (len(used), BANDS))
    for place in range(ROWS):
        hashes_NxB = (hashes_NxB ^ minima_NxBxR[..., place]) * FACTOR
        hashes_NxB ^= hashes_NxB >> np.uint64(32)
    found = np.zeros((len(used), BANDS), ENTRY)
    found["hash"], found["part"], found["row"] = hashes_NxB, part, row + used[:, None]
    return found.ravel()


def join(entries_E: np.ndarray) -> np.ndarray:
    """Returns PAIRs of documents with bands in common, a later one and an earlier one, and how many, in order.

    All entries with the same hash must be there. Of many documents in a bucket, the EARLIEST are the earlier ones.
    """
    order = np.lexsort((entries_E["row"], entries_E["part"], entries_E["hash"]))
    hashes = entries_E["hash"][order]
    starts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)])
    first = np.repeat(starts, np.diff(starts, append=len(hashes)))
    place = np.arange(len(hashes)) - first
    found = [np.zeros(0, PAIR)]
    for number in range(EARLIEST):
        later = np.flatnonzero(place > number)
        own, other = entries_E[order[later]], entries_E[order[first[later] + number]]
        pairs = np.ones(len(later), PAIR)
        pairs["part"], pairs["row"] = own["part"], own["row"]
        pairs["first_part"], pairs["first_row"] = other["part"], other["row"]
        found.append(pairs)
    return total(np.concatenate(found))


def total(pairs: np.ndarray) -> np.ndarray:
    """Returns each pair once, with all of its bands, in order."""
    names = [name for name in PAIR.names if name != "bands"]
    unique, index = np.unique(pairs[names], return_inverse=True)
    summed = np.zeros(len(unique), PAIR)
    for name in names:
        summed[name] = unique[name]
    summed["bands"] = np.bincount(index, weights=pairs["bands"], minlength=len(unique))
    return summed


def similarity(pairs: np.ndarray) -> np.ndarray:
    """Returns the estimated Jaccard similarity of PAIRs whose bands have all been counted."""
    return (pairs["bands"] / BANDS) ** (1 / ROWS)
