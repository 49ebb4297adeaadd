"""What a model and its training step need to know of the data: sizes and ids, no rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlm.data.manifest import Manifest


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Saved with every checkpoint.

    Attributes:
      vocab_size: entries of the tokenizer.
      special_ids: {"pad", "mask", "cls", "sep", "unk"} -> id.
      all_special_ids: every id that is a special token.
      length: tokens in a row.
      records: rows of the training split.
    """

    vocab_size: int
    special_ids: dict[str, int]
    all_special_ids: tuple[int, ...]
    length: int
    records: int

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> DatasetInfo:
        """Returns that of written shards."""
        return cls(
            vocab_size=manifest.vocab_size,
            special_ids=dict(manifest.special_ids),
            all_special_ids=tuple(manifest.all_special_ids),
            length=manifest.length,
            records=manifest.splits["train"].records,
        )

    @classmethod
    def synthetic(cls, *, vocab_size: int, length: int, records: int) -> DatasetInfo:
        """Returns that of data that doesn't exist yet: enough for the step, its speed and its memory."""
        special = {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
        return cls(vocab_size, special, tuple(special.values()), length, records)
