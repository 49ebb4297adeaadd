"""A corpus -> TFRecord shards, as tasks on an engine: {folder}/{split}/dataset-{shard}-{records}.tfrecord, manifest.json.

Map (map_part.py) each part, deduplicate by ranges of the hash, deal the blocks to shards (deal.py), and reduce
(write_shard.py) each shard. So the text is read once, by no process all of it, and this process handles the blocks'
numbers alone. The bytes depend on the corpus, the tokenizer and the settings, never on the workers.

What the tasks leave for one another is in {folder}.tmp, which all workers share:

    map/, deduplicate/, reduce/   results of tasks, by their keys: a restart does what is missing
    texts/                        the text of sources that are slow to read, for the tokenizer and the shards
    shards-{inputs}/              the shards, renamed to {folder} at the end. In a bucket they are put in place one by
                                  one, and the manifest last
"""

import dataclasses
import json
from typing import Any

import numpy as np

from mlm.cluster.engine import Engine
from mlm.data import deal, deduplicate, results, tokenizer
from mlm.data.corpus import Corpus, Part
from mlm.data.manifest import NAME, SPLITS, Manifest, Shard, Split, load_manifest, work_folder
from mlm.data.map_part import BLOCK, Map, map_part
from mlm.data.write_shard import WriteShard, write_shard
from mlm.errors import InputError
from mlm.paths import UPath, children, is_remote, remove, write_text

BLOCK_BYTES = (2**14, 2**22)  # of text: the least and the most
BLOCKS = 32  # of a shard, between those two
LISTED = 12  # groups in a message


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the rows besides the corpus and the tokenizer."""

    length: int  # tokens in a row
    counts: dict[str, int]  # shards of each split; a small validation split gets fewer
    seed: int = 0  # of the deal


def write(corpus: Corpus, settings: Settings, *, tokenizer_folder: str, folder: str, source: str, engine: Engine) -> Manifest:
    """Writes the shards of both splits, unless the same ones are there; returns when they are complete.

    The tokens of the documents, <s> ... </s> each, are concatenated and cut into rows, as in transformers' TF-TPU
    example. What looks like a special token in a text stays text.

    Args:
      tokenizer_folder, folder: local or gs://; `folder` appears, or its manifest does, when all is written.
      source: describes the corpus, and changes when it does.
    """
    vocabulary = tokenizer.manifest_fields(tokenizer_folder)
    inputs = results.key(source, vocabulary["tokenizer_fingerprint"], dataclasses.asdict(settings))
    work = work_folder(folder)
    ...
