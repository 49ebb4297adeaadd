"""From which groups of the corpus the overlapping rows of a held-out split are, and what to do about it."""

import re
from collections import Counter

from ml_collections import ConfigDict

from mlm.data.data_sets import role_of
from mlm.data.manifest import Manifest
from mlm.data.sources import DOCUMENT
from mlm.data.write_shard import find_documents
from mlm.doctor.scan import Overlap
from mlm.errors import InputError

LISTED = 5  # groups
DOCSTRINGS = "docstrings"


def by_group(manifest: Manifest, split: str, overlap: Overlap) -> list[tuple[str, str, int, int]]:
    """Returns (source, group, overlapping rows, rows compared), most overlapping rows first; [] if it isn't known.

    The group is a package, a file or a split of a data set: that of the document in the middle of a row.
    """
    group_of_record = {}
    try:
        for record in overlap.rows.tolist():
            documents = find_documents(manifest, split, record)
            source, part, _ = documents[len(documents) // 2]
            name = re.sub(r"(\[\d*:\d*\]|, shard \d+)$", "", part)
            group_of_record[record] = source, name.rpartition(" ")[0] if source == DOCSTRINGS else name
    except InputError:  # shards made elsewhere don't say where their rows are from
        return []
    totals = Counter(group_of_record.values())
    counts = Counter(group_of_record[record] for record in overlap.overlapping.tolist())
    return [(*group, count, totals[group]) for group, count in counts.most_common()]


def describe(groups: list[tuple[str, str, int, int]]) -> str:
    """Returns the groups with the most overlapping rows."""
    names = (name if source == DOCSTRINGS else f"{source}, {name}" for source, name, *_ in groups)
    listed = [f"{count:,} of {total:,} rows of {name}" for name, (*_, count, total) in zip(names, groups, strict=True)]
    return f"; most from {', '.join(listed[:LISTED])}" if listed else ""


def advice(corpus: ConfigDict, split: str, groups: list[tuple[str, str, int, int]]) -> str:
    """Returns which key of the config to change."""
    source, name = groups[0][:2] if groups else (corpus.sources[0], "")
    if source.startswith(("hf:", "tfds:")) and role_of(name) == split:
        own_split = source if f"#{name}" in source else f"{source}#{name}"
        return f"name {own_split} in corpus.keep_out, so that no training document holds text of it"
    if source == DOCSTRINGS and corpus.group == DOCUMENT:
        return "set corpus.group to '', so that a package is in one split as a whole"
    if source != DOCSTRINGS and corpus.group in ("", DOCUMENT):
        return "set corpus.group to file, or to a field that documents with the same text share"
    key = f"corpus.{split}_groups"
    if any(name == group or name.endswith(f"/{group}") for group in corpus[f"{split}_groups"]):
        return f"name another group in place of {name} in {key}"
    return f"name groups that share little text with the others in {key}"
