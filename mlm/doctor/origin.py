"""Where the text of a record is from: its documents and parts of the corpus, by the tables beside the shards."""

import contextlib
import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mlm.data import mixture
from mlm.data.manifest import Manifest
from mlm.data.write_shard import PARTS, table_name
from mlm.errors import DamageError, InputError
from mlm.paths import UPath


class Found(NamedTuple):
    """A document of the corpus."""

    source: str
    part: str
    place: int  # in its part, from 0; empty ones don't count


def find_documents(manifest: Manifest, split: str, record: int) -> list[Found]:
    """Returns the documents whose tokens a record holds, in order; reads the table of its shard alone."""
    total = manifest.splits[split].records
    if not 0 <= record < total:
        raise InputError(f"record {record}: the {split} split has the records 0 to {total - 1}.")
    manifest, shard, row = mixture.locate(manifest, split, record)
    first = row * manifest.length
    with _readable(manifest):
        table, parts = _table(manifest, shard.file), _parts(manifest)
        begin, end = np.searchsorted(table["start"], [first, first + manifest.length - 1], side="right")
        return [Found(*map(str, parts[part]), place) for _, part, place in table[begin - 1 : end].tolist()]


def find_parts(manifest: Manifest, split: str) -> tuple[list[tuple[str, str]], np.ndarray]:
    """Returns (source, name) of all parts, and the part that the middle of each record of a split is from."""
    names, found = [], [np.zeros(0, np.uint32)]
    for _, _, folder in mixture.parts(manifest):
        with _readable(folder):
            for shard in folder.splits[split].shards:
                table, middles = _table(folder, shard.file), (np.arange(shard.records) + 0.5) * manifest.length
                found.append(len(names) + table["part"][np.searchsorted(table["start"], middles, side="right") - 1])
            names += [(str(source), str(name)) for source, name in _parts(folder)]
    return names, np.concatenate(found)


def _table(manifest: Manifest, shard: str) -> np.ndarray:
    with UPath(f"{manifest.folder}/{table_name(shard)}").open("rb") as file:
        return np.load(file, allow_pickle=False)


def _parts(manifest: Manifest) -> list[list[str]]:
    return json.loads((UPath(manifest.folder) / PARTS).read_text())


@contextlib.contextmanager
def _readable(manifest: Manifest) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{manifest.folder}: doesn't say where its records are from ({error.filename}).") from error
    except (ValueError, IndexError, KeyError, TypeError, EOFError) as error:
        raise DamageError(f"{manifest.folder}/documents: is not what was written; write the shards again.") from error
