"""What a model and its training step need to know about the data: sizes and ids, no rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlm.data.manifest import Manifest


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Saved with every checkpoint; `special_ids` maps "pad", "mask", "cls", "sep" and "unk" to ids."""

    vocab_size: int
    special_ids: dict[str, int]
    all_special_ids: tuple[int, ...]
    length: int  # tokens in a row
    records: int  # rows of the training split

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> DatasetInfo:
        """Returns the info of written shards."""
        fields = ("vocab_size", "special_ids", "all_special_ids", "length")
        return cls(**{key: getattr(manifest, key) for key in fields}, records=manifest.splits["train"].records)

    @classmethod
    def synthetic(cls, *, vocab_size: int, length: int, records: int) -> DatasetInfo:
        """Returns the info of data that doesn't exist yet, for a step's speed and memory."""
        special = {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
        return cls(vocab_size, special, tuple(special.values()), length, records)
