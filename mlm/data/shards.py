"""A corpus -> TFRecord shards, as tasks: {folder}/{split}/dataset-{shard}-{records}.tfrecord, and manifest.json.

Map (map_part.py) each part, deduplicate by ranges of the hash, deal the blocks to shards (deal.py), and reduce
(write_shard.py) each shard. The bytes depend on the corpus, the tokenizer and the settings, never on the workers.

What the tasks leave for one another is in {folder}.tmp, which all workers share:

    tasks/     results of the tasks, by hashes of what they were made from: a restart does what is missing
    texts/     the text of sources that are slow to read, for the tokenizer and the shards
    {inputs}/  the shards, renamed to {folder} at the end. In a bucket they are put in place one by one, the manifest
               last, and a file of that name shows that they are begun
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mlm import config as configs
from mlm.config_rules import CONCATENATED, LINES
from mlm.data import deal, deduplicate, keep_out, results, tokenizer
from mlm.data.corpus import Corpus, Part
from mlm.data.manifest import NAME, SPLITS, Manifest, Split, load_manifest
from mlm.data.map_part import BLOCK, map_part
from mlm.data.write_shard import PARTS, summarize, table_name, write_shard
from mlm.engine.engine import Engine
from mlm.errors import InputError
from mlm.paths import UPath, canonical, children, is_remote, remove, sizes
from mlm.workdir import lock, work_folder

BLOCK_BYTES = (2**12, 2**22)  # of text, in a block: the least and the most
BLOCKS = 64  # of a shard, between those two
UNKNOWN_BYTES = 2**20  # of a block, where the size of a source is not known
DOCUMENT_BYTES = 500  # about


class Settings(NamedTuple):
    """What decides the rows besides the corpus and the tokenizer."""

    length: int  # tokens in a row
    # shards of training and of the held-out splits ("validation"); small ones get fewer
    counts: dict[str, int]
    rows: str = CONCATENATED  # or another of config.shards.rows


def write(
    corpus: Corpus,
    settings: Settings,
    *,
    tokenizer_folder: str,
    folder: str,
    source: Mapping[str, Any],
    engine: Engine,
) -> Manifest:
    """Writes the shards of all splits, unless the same ones are there; returns when they are complete.

    The tokens of the documents, <s> ... </s> each, become rows as in rows.py; concatenated, as in transformers' TF-TPU
    example. `source` has the keys of config.corpus.
    """
    job = _Job(corpus, settings, tokenizer_folder, UPath(folder), dict(source), engine)
    if not job.is_done():
        with lock(job.root):  # a run of another workdir may have the same shards.dir
            job.write()
    remove(job.root)  # here, for a start after a kill in the middle of it
    return load_manifest(folder)


@dataclasses.dataclass
class _Job:
    corpus: Corpus
    settings: Settings
    tokenizer_folder: str
    folder: UPath
    source: dict[str, Any]
    engine: Engine

    def __post_init__(self):
        self.vocabulary = tokenizer.manifest_fields(self.tokenizer_folder)
        self.fingerprint = self.vocabulary["tokenizer_fingerprint"]
        # 0: as when the deal had a seed; and without rows: as before there were others
        decisive = [self.settings.length, self.settings.counts, 0]
        if self.settings.rows != CONCATENATED:
            decisive.append(self.settings.rows)
        source = json.dumps(self.source, sort_keys=True)
        self.inputs = results.key(source, self.fingerprint, decisive)
        self.root = work_folder(str(self.folder))
        self.tasks = self.root / "tasks"
        self.shards = self.folder if is_remote(self.folder) else self.root / self.inputs

    def is_done(self) -> bool:
        """Returns whether the shards are in place; raises InputError, with what differs, if others are."""
        if (self.folder / NAME).is_file():
            manifest = load_manifest(str(self.folder))
            if manifest.inputs == self.inputs:
                return True
            what = f"shards of another {self._difference(manifest)}"
        elif not (self.folder.is_file() or children(self.folder)):
            return False
        elif is_remote(self.folder) and (self.root / self.inputs).is_file():
            return False  # begun, and not finished
        else:
            what = f"something else, or shards without {NAME}"
        raise InputError(
            f"{self.folder}: holds {what}; restore that, or use another --workdir or shards.dir."
        )

    def _difference(self, manifest: Manifest) -> str:
        """Returns what differs from the shards that are there, by its keys or its file."""
        settings = self.settings
        train = len(manifest.splits["train"].shards)
        shards = {
            "length": (manifest.length, settings.length),
            "rows": (manifest.rows, settings.rows),
            "count": (train, settings.counts["train"]),
        }
        old, new = ({key: pair[index] for key, pair in shards.items()} for index in range(2))
        try:
            corpus = json.loads(manifest.source)
        except ValueError:  # of another program
            return "config.corpus"
        changed = configs.changed_keys(
            {"corpus": corpus, "shards": old},
            {"corpus": self.source, "shards": new},
        )
        if manifest.tokenizer_fingerprint != self.fingerprint:
            file = f"tokenizer (not {self.tokenizer_folder}/tokenizer.json)"
            changed = f"{file}, {changed}".removesuffix(", ")
        # small held-out splits have fewer shards than it says
        return changed or "config.shards.validation_count"

    def write(self) -> None:
        """Writes the shards and the manifest."""
        if is_remote(self.folder):
            results.save(self.root / self.inputs)
        self._map()
        # before the longest stage: only now are the sizes of the splits known
        self._check_fractions()
        self._deduplicate()
        manifest = Manifest(
            folder=str(self.folder),
            length=self.settings.length,
            full_rows=self.settings.rows == CONCATENATED,
            rows=self.settings.rows,
            inputs=self.inputs,
            source=json.dumps(self.source, sort_keys=True),
            splits=self._reduce(),
            **self.vocabulary,
        )
        with results.written(self.shards / NAME) as file:
            file.write_text(manifest.to_json() + "\n")
        if not is_remote(self.folder):
            for file in self.shards.glob(results.TEMPORARY):  # of starts that were killed
                file.unlink()
            self.shards.rename(canonical(str(self.folder)))

    def _map(self) -> None:
        parts = self.corpus.parts()
        texts = str(self.root / "texts")
        has_test = any("test" in (part.split, *part.cut) for part in parts)
        self.splits = SPLITS if has_test else SPLITS[:2]
        limited = self.corpus.limited(parts, texts=texts)
        done = results.run(
            self.engine,
            map_part,
            ({"part": part, "limit": limit} for part, limit in limited),
            folder=self.tasks,
            label="tokenize",
            corpus=self.corpus,
            tokenizer_folder=self.tokenizer_folder,
            fingerprint=self.fingerprint,
            block_bytes=self._block_bytes(parts),
            banned=keep_out.hash_parts(self.engine, self.corpus.kept_out(), self.tasks),
            texts=texts,
        )
        self.parts = [part for part, _ in limited]
        self.maps = tuple(base for base, _ in done)
        self.notes = [note for _, note in done]
        counts = [len(note["blocks"]) for note in self.notes]
        self.blocks = np.array([tuple(row) for note in self.notes for row in note["blocks"]], BLOCK)
        self.part_of_block = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        # of each block, without what is left out
        self.tokens = self.blocks["tokens"].astype(np.int64)
        self.documents = self.blocks["documents"].astype(np.int64)

    def _block_bytes(self, parts: list[Part]) -> int:
        """Returns the bytes of text in a block, so that a shard has about BLOCKS."""
        # which changes nothing in the other splits
        parts = [part for part in parts if part.split != "test"]
        total = sum(part.bytes for part in parts) if all(part.bytes for part in parts) else 0
        if self.corpus.max_documents:
            splits = {(part.source, part.split) for part in parts}
            limit = DOCUMENT_BYTES * self.corpus.max_documents * len(splits)
            total = min(total, limit) if total else limit
        if not total:
            return UNKNOWN_BYTES
        lower, upper = BLOCK_BYTES
        return min(max(total // (BLOCKS * self.settings.counts["train"]), lower), upper)

    def _deduplicate(self) -> None:
        """Finds the documents to leave out, and takes them off the counts of their blocks."""
        self.duplicates = deduplicate.deduplicate(
            self.engine,
            self.maps,
            documents=int(self.documents.sum()),
            folder=self.tasks,
        )
        dropped = np.concatenate(
            [*results.load_each(self.duplicates, "dropped", deduplicate.DROPPED)]
        )
        blocks = np.searchsorted(self.part_of_block, dropped["part"]) + dropped["block"]
        np.subtract.at(self.tokens, blocks, dropped["tokens"].astype(np.int64))
        np.subtract.at(self.documents, blocks, dropped["documents"])
        self.repeated = tuple(np.unique(dropped["part"]).tolist())

    def _check_fractions(self) -> None:
        """Raises InputError if whole groups make a held-out split of another size than its fraction in the config."""
        if not any(note["has_groups"] for note in self.notes):
            return
        groups = {group for note in self.notes for group in note["named_groups"]}
        for split in self.splits[1:]:
            key = f"config.corpus.{split}"
            asked = getattr(self.corpus, f"{split}_fraction")
            if missing := set(getattr(self.corpus, f"{split}_groups")) - groups:
                raise InputError(
                    f"{key}_groups: the corpus has no group {min(missing)!r}; name others, or set it to () to choose "
                    "them by hash."
                )
            is_cut = np.array([split in part.cut for part in self.parts])[self.part_of_block]
            is_held_out = is_cut & (self.blocks["split"] == SPLITS.index(split))
            sizes = self.blocks["bytes"]
            fraction = sizes[is_held_out].sum() / max(1, sizes[is_cut].sum())
            # which a test split of named groups alone need not have
            is_asked = is_cut.any() and (asked or split != "test")
            if is_asked and not asked / 2 <= fraction <= 2 * asked:
                raise InputError(
                    f"{key}_fraction = {asked:g}: whole groups (corpus.group) make it {fraction:.4f}; name groups in "
                    f"corpus.{split}_groups that hold between half and twice that fraction of the text."
                )

    def _deal(self, split: str) -> list[np.ndarray]:
        """Returns the indices of the blocks of each shard of a split, at least a row in each.

        A small held-out split gets fewer shards than the config says.
        """
        blocks = np.flatnonzero(self.blocks["split"] == SPLITS.index(split))
        hashes = self.blocks["hash"][blocks]
        copies = np.ones(len(blocks), np.int64)
        length = self.settings.length
        # sizes that give shards the same number of rows, about
        is_lines = self.settings.rows == LINES
        sizes = (self.documents if is_lines else self.tokens)[blocks]
        needed = length if self.settings.rows == CONCATENATED else 1
        if split == "train":
            weights = dict(zip(self.corpus.sources, self.corpus.weights, strict=True))
            weight_of_part = np.array([weights[part.source] for part in self.parts])
            copies = deal.copies(hashes, weight_of_part[self.part_of_block[blocks]])
            if not copies.sum():
                raise InputError(
                    "the train split holds no text: lower corpus.validation_fraction, or give more text."
                )
        count = self.settings.counts["train" if split == "train" else "validation"]
        rows = int((sizes * copies).sum()) // (1 if is_lines else length)
        while True:
            places_of_shards = deal.deal(hashes, copies, sizes, count=count)
            if all(sizes[places].sum() >= needed for places in places_of_shards):
                return [blocks[places] for places in places_of_shards]
            if split == "train":
                few = f"{copies.sum()} blocks hold only {rows} rows of {length} tokens"
                raise InputError(f"config.shards.count = {count}: {few}; lower it.")
            if count == 1:
                raise InputError(
                    f"the {split} split is shorter than a row of {length} tokens: raise corpus.{split}_fraction, give "
                    "more text, or name the splits to read without it (#SPLIT)."
                )
            # A held-out split may be too small for so many shards: an eighth fewer each time, until each holds a row.
            count = min(count - 1 - count // 8, max(1, rows))

    def _reduce(self) -> dict[str, Split]:
        """Writes the shards; returns what the manifest says of them."""
        # all are dealt, and refused if there is too little text, before the first is written
        dealt = {split: self._deal(split) for split in self.splits}
        splits = {}
        for split, blocks_of_shards in dealt.items():
            items = (
                {
                    "name": f"{split}/dataset-{number}",
                    "blocks": self.blocks[blocks].tobytes(),
                    "parts": tuple(self.part_of_block[blocks].tolist()),
                }
                for number, blocks in enumerate(blocks_of_shards)
            )
            done = results.run(
                self.engine,
                write_shard,
                items,
                folder=self.root / f"written-{self.inputs}",
                label=f"write {split}",
                maps=self.maps,
                duplicates=self.duplicates,
                repeated=self.repeated,
                length=self.settings.length,
                kind=self.settings.rows,
                pad_id=self.vocabulary["special_ids"]["pad"],
                vocab_size=self.vocabulary["vocab_size"],
                shards=str(self.shards),
            )
            is_in_split = self.blocks["split"] == SPLITS.index(split)
            documents = self.blocks["documents"][is_in_split].sum()
            kept_out = sum(note["kept_out"] for note in self.notes) if split == "train" else 0
            splits[split] = summarize(
                done,
                self.vocabulary,
                duplicates=int(documents - self.documents[is_in_split].sum()),
                kept_out=kept_out,
            )
        results.save_json(self.shards / PARTS, [[part.source, part.name] for part in self.parts])
        self._remove_others({shard.file for split in splits.values() for shard in split.shards})
        return splits

    def _remove_others(self, files: set[str]) -> None:
        """Removes what killed tasks left beside the shards, or a start with another text."""
        files = {*files, *map(table_name, files), PARTS}
        for folder in (*SPLITS, "documents"):
            for name in sizes(self.shards / folder):
                if f"{folder}/{name}" not in files:
                    (self.shards / folder / name).unlink(missing_ok=True)
