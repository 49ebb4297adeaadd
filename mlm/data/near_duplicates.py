"""Near duplicates: documents similar to an earlier one, by Jaccard over stretches of 5 words.

MinHash (Broder, 1997) by rensa, cut into bands (Leskovec et al., Mining of Massive Datasets, section 3.4): a share
s^ROWS of the bands of two documents of similarity s is the same. An earlier document counts even if it is left out
itself: of a chain only the first stays.

Dimensions: N documents, B bands of each, R slots in a band, E bands of all documents.
"""

from collections.abc import Sequence

import numpy as np
from rensa import RMinHash

from mlm.data.keep_out import FACTOR, stretches

WORDS = 5
BANDS, ROWS = 42, 6
EARLIEST = 16  # documents of a bucket that its others are compared to; a larger number finds more pairs
BAND = np.dtype([("hash", "<u8"), ("place", "<u4"), ("row", "<u4")])  # of a document of a part
PAIR = np.dtype([(name, "<u4") for name in ("part", "place", "row", "first_part", "first_place", "bands")])


def bands(texts: Sequence[str], places_N: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
    """Returns the bands of documents, as BAND [E]; documents of less than 5 words have none."""
    hashes, numbers = stretches(texts, WORDS)
    used, starts = np.unique(numbers, return_index=True)
    offsets = np.append(starts, len(hashes)).astype(np.uint64)
    minima = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, num_perm=BANDS * ROWS, seed=1)
    minima_NxBxR = np.array(minima.to_rows(), np.uint64).reshape(-1, BANDS, ROWS)
    hashes_NxB = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), (len(used), BANDS))
    for place in range(ROWS):
        hashes_NxB = (hashes_NxB ^ minima_NxBxR[..., place]) * FACTOR
        hashes_NxB ^= hashes_NxB >> np.uint64(32)
    bands_NxB = np.zeros((len(used), BANDS), BAND)
    bands_NxB["hash"], bands_NxB["place"], bands_NxB["row"] = hashes_NxB, places_N[used, None], rows_N[used, None]
    return bands_NxB.ravel()


def join(bands_E: np.ndarray, parts_E: np.ndarray) -> np.ndarray:
    """Returns the PAIRs of documents that share bands, in order; all bands with the same hash must be there."""
    order = np.lexsort((bands_E["place"], parts_E, bands_E["hash"]))
    bands_E, parts_E, hashes = bands_E[order], parts_E[order], bands_E["hash"][order]
    _, starts, bucket_E = np.unique(hashes, return_index=True, return_inverse=True)
    first = starts[bucket_E]
    place = np.arange(len(hashes)) - first
    pairs_by_number = [np.zeros(0, PAIR)]
    for number in range(EARLIEST):
        later = np.flatnonzero(place > number)
        other = first[later] + number
        pairs = np.ones(len(later), PAIR)
        pairs["part"], pairs["place"], pairs["row"] = parts_E[later], bands_E["place"][later], bands_E["row"][later]
        pairs["first_part"], pairs["first_place"] = parts_E[other], bands_E["place"][other]
        pairs_by_number.append(pairs)
    return total(np.concatenate(pairs_by_number))


def total(pairs: np.ndarray) -> np.ndarray:
    """Returns each pair once, with all of its bands, in order."""
    pairs = pairs[np.lexsort([pairs[name] for name in reversed(PAIR.names[:-1])])]
    is_new = np.append(True, np.any([np.diff(pairs[name]) for name in PAIR.names[:-1]], axis=0))[: len(pairs)]
    summed = pairs[is_new]
    summed["bands"] = np.add.reduceat(pairs["bands"], np.flatnonzero(is_new)) if len(pairs) else 0
    return summed


def similarity(pairs: np.ndarray) -> np.ndarray:
    """Returns the estimated Jaccard similarity of PAIRs whose bands have all been counted."""
    return (pairs["bands"] / BANDS) ** (1 / ROWS)


def most_similar(pairs: np.ndarray, threshold: float) -> np.ndarray:
    """Returns the PAIR of each document of a part with the earlier one most similar to it, above a threshold."""
    pairs = total(pairs)
    pairs = pairs[similarity(pairs) > threshold]
    pairs = pairs[np.argsort(-pairs["bands"].astype(int), kind="stable")]
    return pairs[np.unique(pairs["row"], return_index=True)[1]]
