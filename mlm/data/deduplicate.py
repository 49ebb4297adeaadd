"""Find documents that came before, in the order of parts and places, by ranges of their hashes.

{base}.duplicates  the DOCUMENTs to leave out, by part, see `results.save_cut`
{base}.dropped     DROPPED of each block that loses documents
"""

import itertools
from collections.abc import Sequence

import numpy as np

from mlm.data import results
from mlm.data.map_part import DOCUMENT, RANGES
from mlm.engine.engine import Engine
from mlm.paths import UPath

DOCUMENTS = 8 * 10**6  # of a task, which takes about 100 bytes for each
DROPPED = np.dtype([("part", "<u4"), ("block", "<u4"), ("documents", "<u4"), ("tokens", "<u8")])


def deduplicate(
    engine: Engine, maps: tuple[str, ...], *, documents: int, folder: UPath
) -> tuple[str, ...]:
    """Finds the duplicates among so many `documents`; returns how the names of the results begin."""
    count = min(-(-documents // DOCUMENTS) or 1, RANGES)
    cuts = [RANGES * number // count for number in range(count + 1)]
    items = ({"first": first, "stop": stop} for first, stop in itertools.pairwise(cuts))
    done = results.run(
        engine, find_duplicates, items, folder=folder, label="deduplicate", maps=maps
    )
    return tuple(base for base, _ in done)


def find_duplicates(base: str, first: int, stop: int, maps: tuple[str, ...]) -> None:
    """Writes the files of the ranges `first` up to `stop`; `maps` are the results of all parts, in order."""
    by_part = list(
        results.load_cuts(maps, "hashes", DOCUMENT, pieces=RANGES, first=first, stop=stop)
    )
    documents = np.concatenate(by_part)
    parts = np.repeat(np.arange(len(by_part)), list(map(len, by_part)))
    # Stable, so that of equal hashes the first in the order of parts and places comes first: it stays.
    order = np.argsort(documents["hash"], kind="stable")
    hashes = documents["hash"][order]
    again = order[1:][hashes[1:] == hashes[:-1]]
    again = again[np.lexsort((documents["row"][again], parts[again]))]
    documents = documents[again]
    parts = parts[again]
    results.save_cut(UPath(f"{base}.duplicates"), documents, parts, len(maps))
    blocks, block_of_document = np.unique(
        np.stack([parts, documents["block"]]), axis=1, return_inverse=True
    )
    dropped = np.zeros(blocks.shape[1], DROPPED)
    dropped["part"], dropped["block"] = blocks
    dropped["documents"] = np.bincount(block_of_document, minlength=len(dropped))
    dropped["tokens"] = np.bincount(block_of_document, documents["tokens"], len(dropped))
    results.save(UPath(f"{base}.dropped"), dropped)


def rows_to_leave_out(duplicates: Sequence[str], *, part: int, parts: int) -> np.ndarray:
    """Returns the rows of the duplicates in a part of so many."""
    documents = results.load_cuts(
        duplicates, "duplicates", DOCUMENT, pieces=parts, first=part, stop=part + 1
    )
    return np.concatenate(list(documents))["row"]
