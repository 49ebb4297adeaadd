"""A corpus -> TFRecord shards, as tasks: {folder}/{split}/dataset-{shard}-{records}.tfrecord, and manifest.json.

Map (map_part.py) each part, deduplicate by ranges of the hash, deal the blocks to shards (deal.py), and reduce
(write_shard.py) each shard. The bytes depend on the corpus, the tokenizer and the settings, never on the workers.

What the tasks leave for one another is in {folder}.tmp, which all workers share:

    tasks/     results of the tasks, by their keys: a restart does what is missing
    texts/     the text of sources that are slow to read, for the tokenizer and the shards
    {inputs}/  the shards, renamed to {folder} at the end. In a bucket they are put in place one by one, and the
               manifest last
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mlm.config_rules import CONCATENATED, LINES
from mlm.data import deal, deduplicate, keep_out, results, tokenizer
from mlm.data.corpus import Corpus, Part
from mlm.data.manifest import NAME, SPLITS, Manifest, Split, check_rows, load_manifest
from mlm.data.map_part import BLOCK, MapTask, map_part
from mlm.data.write_shard import PARTS, ShardTask, summarize, table_name, write_shard
from mlm.engine.engine import Engine
from mlm.errors import InputError
from mlm.paths import UPath, canonical, children, is_remote, remove, sizes
from mlm.text import printable
from mlm.workdir import lock, work_folder

BLOCK_BYTES = (2**12, 2**22)  # of text, in a block: the least and the most
BLOCKS = 64  # of a shard, between those two
UNKNOWN_BYTES = 2**20  # of a block, where the size of a source is not known
DOCUMENT_BYTES = 500  # about
LISTED = 12  # groups in a message


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
    source: str,
    engine: Engine,
) -> Manifest:
    """Writes the shards of all splits, unless the same ones are there; returns when they are complete.

    The tokens of the documents, <s> ... </s> each, become rows as in rows.py; concatenated, as in transformers' TF-TPU
    example. `source` describes the corpus, and changes when it does.
    """
    vocabulary = tokenizer.manifest_fields(tokenizer_folder)
    # As when the deal had a seed, and before there were other rows.
    decisive = (
        settings.length,
        settings.counts,
        0,
        *([] if settings.rows == CONCATENATED else [settings.rows]),
    )
    inputs = results.key(source, vocabulary["tokenizer_fingerprint"], decisive)
    if not _is_done(folder, inputs, settings.rows):
        job = _Job(corpus, settings, tokenizer_folder, vocabulary, UPath(folder), inputs, engine)
        with lock(job.root):  # a run of another workdir may have the same shards.dir
            if not _is_done(folder, inputs, settings.rows):
                job.write(source)
    remove(work_folder(folder))  # here, for a start after a kill in the middle of it
    return load_manifest(folder)


def _is_done(folder: str, inputs: str, rows: str) -> bool:
    """Returns whether the shards are in place; raises InputError if something else is there."""
    target = UPath(folder)
    if not (target.is_file() or children(target)):
        return False
    if (target / NAME).is_file():
        if (manifest := load_manifest(folder)).inputs == inputs:
            return True
        check_rows(manifest, rows)
    elif is_remote(folder) and (work_folder(folder) / inputs).is_file():
        return False  # begun, and not finished
    fix = "use another --workdir or shards.dir, or restore the config"
    raise InputError(f"{folder}: holds shards of another corpus, tokenizer or setting; {fix}.")


@dataclasses.dataclass
class _Job:
    corpus: Corpus
    settings: Settings
    tokenizer_folder: str
    vocabulary: dict[str, Any]
    folder: UPath
    inputs: str
    engine: Engine

    def __post_init__(self):
        self.root = work_folder(str(self.folder))
        self.tasks = self.root / "tasks"
        self.shards = self.folder if is_remote(self.folder) else self.root / self.inputs

    def write(self, source: str) -> None:
        """Writes the shards and the manifest, which says that they are of `source`."""
        if is_remote(self.folder):
            results.save(self.root / self.inputs)  # shows that these shards are begun
        else:
            for file in self.tasks.glob(".*.tmp"):  # that killed tasks left incomplete
                with contextlib.suppress(OSError):  # such as another user's
                    file.unlink()
        self._map()
        # before the longest stage: only now are the sizes of the splits known
        self._check_fractions()
        rows, duplicates = self._deduplicate()
        names = [printable(f"{part.source}, {part.name}, document") for part in self.parts]
        manifest = Manifest(
            folder=str(self.folder),
            length=self.settings.length,
            full_rows=self.settings.rows == CONCATENATED,
            rows=self.settings.rows,
            inputs=self.inputs,
            source=source,
            splits=self._reduce(rows, duplicates),
            left_out=keep_out.list_documents(self.kept_out, names),
            **self.vocabulary,
        )
        with results.written(self.shards / NAME) as file:
            file.write_text(manifest.to_json() + "\n")
        if not is_remote(self.folder):
            self.shards.rename(canonical(str(self.folder)))

    def _do(self, function: Any, tasks: list, *, label: str, last: str) -> None:
        """Runs the tasks whose last file is not there."""
        files = sizes(self.tasks)
        for _ in self.engine.each(
            function, [task for task in tasks if f"{task.key}{last}" not in files], label=label
        ):
            pass  # a task's result is its files

    def _map(self) -> None:
        parts = self.corpus.parts()
        texts = str(self.root / "texts")
        self.splits = (
            SPLITS if any("test" in (part.split, *part.cut) for part in parts) else SPLITS[:2]
        )
        banned = keep_out.hash_parts(self._do, self.corpus.kept_out(), str(self.tasks))
        block_bytes = self._block_bytes(parts)
        decisive = (
            "field",
            "group",
            "validation_fraction",
            "validation_groups",
            "test_fraction",
            "test_groups",
        )
        corpus = {name: getattr(self.corpus, name) for name in decisive}
        fingerprint = self.vocabulary["tokenizer_fingerprint"]
        tasks = []
        for part, limit in self.corpus.limited(parts, texts=texts):
            task = MapTask(
                part=part,
                corpus=self.corpus,
                limit=limit,
                tokenizer_folder=self.tokenizer_folder,
                fingerprint=fingerprint,
                block_bytes=block_bytes,
                keep_out=banned,
                texts=texts,
                folder=str(self.tasks),
                key=results.key(part, limit, corpus, block_bytes, banned, fingerprint),
            )
            tasks.append(task)
        self._do(map_part, tasks, label="tokenize", last=".blocks")
        self.parts = [task.part for task in tasks]
        self.maps = [task.key for task in tasks]
        tables = list(self._load_each(self.maps, "blocks", BLOCK))
        self.kept_out = list(self._load_each(self.maps, "kept_out", np.uint32))
        self.blocks = np.concatenate(tables)
        self.part_of_block = np.repeat(
            np.arange(len(tables), dtype=np.uint32), list(map(len, tables))
        )
        self.tokens = self.blocks["tokens"].copy()  # of each block, without what is left out
        self.documents = self.blocks["documents"].copy()
        results_of_parts = zip(self.parts, tables, self.kept_out, strict=True)
        with_text = {
            part.source for part, blocks, places in results_of_parts if len(blocks) or len(places)
        }
        if empty := [part.source for part in self.parts if part.source not in with_text]:
            raise self.corpus.without_text(empty[0])

    def _block_bytes(self, parts: list[Part]) -> int:
        """Returns the bytes of text in a block, so that a shard has about BLOCKS."""
        # which changes nothing in the other splits
        parts = [part for part in parts if part.split != "test"]
        total = sum(part.bytes for part in parts) if all(part.bytes for part in parts) else 0
        if self.corpus.max_documents:
            limit = (
                DOCUMENT_BYTES
                * self.corpus.max_documents
                * len({(part.source, part.split) for part in parts})
            )
            total = min(total, limit) if total else limit
        if not total:
            return UNKNOWN_BYTES
        return min(
            max(total // (BLOCKS * self.settings.counts["train"]), BLOCK_BYTES[0]), BLOCK_BYTES[1]
        )

    def _load_each(
        self, keys: Iterable[str], kind: str, dtype: np.dtype | type
    ) -> Iterator[np.ndarray]:
        return results.at_once(lambda key: results.load(self.tasks / f"{key}.{kind}", dtype), keys)

    def _deduplicate(self) -> tuple[dict[int, str], np.ndarray]:
        """Returns the files of rows to leave out by part, and how many documents of each split are duplicates."""
        documents = int(self.blocks["documents"].sum())
        tasks = deduplicate.deduplicate(
            self._do, tuple(self.maps), documents=documents, folder=str(self.tasks)
        )
        keys = [task.key for task in tasks]
        dropped = np.concatenate([*self._load_each(keys, "dropped", deduplicate.DROPPED)])
        blocks = np.searchsorted(self.part_of_block, dropped["part"]) + dropped["block"]
        np.subtract.at(self.tokens, blocks, dropped["tokens"])
        np.subtract.at(self.documents, blocks, dropped["documents"])
        duplicates = np.bincount(self.blocks["split"][blocks], dropped["documents"], len(SPLITS))
        parts = set(dropped["part"].tolist())
        rows = {
            part: task.rows(part)
            for task in tasks
            for part in range(task.first, task.stop)
            if part in parts
        }
        return rows, duplicates

    def _check_fractions(self) -> None:
        """Raises InputError if whole groups make a held-out split of another size than its fraction in the config."""
        for split in self.splits[1:]:
            asked = getattr(self.corpus, f"{split}_fraction")
            groups = set(getattr(self.corpus, f"{split}_groups"))
            is_cut = np.array([split in part.cut for part in self.parts], bool)[self.part_of_block]
            sizes = np.bincount(
                self.blocks["split"][is_cut], self.blocks["bytes"][is_cut], len(SPLITS)
            )
            fraction = sizes[SPLITS.index(split)] / max(1, sizes.sum())
            fits = (
                not sizes.any()
                or asked / 2 <= fraction <= 2 * asked
                or (split == "test" and not asked)
            )
            if fits and not groups:
                continue
            size_of_group = Counter()
            files = (self.tasks / f"{key}.groups" for key in self.maps)
            for sizes_in_part in results.at_once(results.load_json, files):
                size_of_group.update(sizes_in_part)
            largest = ", ".join(
                f"{group} {size / 1e6:.2f} MB" for group, size in size_of_group.most_common(LISTED)
            )
            if missing := sorted(groups - size_of_group.keys()) if largest else []:
                raise InputError(
                    f"config.corpus.{split}_groups: the corpus has no group {missing[0]!r}; name others, or set it to "
                    f"() to choose them by hash. The largest: {largest}."
                )
            if largest and not fits:
                raise InputError(
                    f"config.corpus.{split}_fraction = {asked:g}: whole groups (corpus.group) make it {fraction:.4f}; "
                    f"name groups in corpus.{split}_groups that hold between half and twice that fraction of the text. "
                    f"The largest: {largest}."
                )

    def _deal(self, split: str) -> list[np.ndarray]:
        """Returns the indices of the blocks of each shard of a split, at least a row in each.

        A small held-out split gets fewer shards than the config says.
        """
        blocks = np.flatnonzero(self.blocks["split"] == SPLITS.index(split))
        hashes = self.blocks["hash"][blocks]
        copies = np.ones(len(blocks), np.int64)
        length = self.settings.length
        # which give shards the same number of rows, about
        sizes = self.tokens[blocks].astype(np.int64)
        row = length
        if self.settings.rows == LINES:
            sizes = self.documents[blocks].astype(np.int64)
            row = 1
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
        rows = int((sizes * copies).sum()) // row
        while True:
            places_of_shards = deal.deal(hashes, copies, sizes, count=count)
            if all(sizes[places].sum() >= needed for places in places_of_shards):
                return [blocks[places] for places in places_of_shards]
            if split == "train":
                few = f"{copies.sum()} blocks hold only {rows} rows of {length} tokens"
                raise InputError(f"config.shards.count = {count}: {few}; lower it.")
            if count == 1:
                fix = f"raise corpus.{split}_fraction, or give more text"
                fix += ", or name the splits to read without it (#SPLIT)" if split == "test" else ""
                raise InputError(
                    f"the {split} split is shorter than a row of {length} tokens: {fix}."
                )
            # A held-out split may be too small for so many shards: an eighth fewer each time, until each holds a row.
            count = min(count - 1 - count // 8, max(1, rows))

    def _reduce(self, rows: dict[int, str], duplicates: np.ndarray) -> dict[str, Split]:
        """Writes the shards; returns what the manifest says of them."""
        tasks = {split: self._shard_tasks(split, rows) for split in self.splits}
        self._do(
            write_shard,
            [task for split in self.splits for task in tasks[split]],
            label="write",
            last=".json",
        )
        results.save_json(self.shards / PARTS, [[part.source, part.name] for part in self.parts])
        splits = {}
        for split in self.splits:
            kept_out = sum(map(len, self.kept_out)) if split == "train" else 0
            count = int(duplicates[SPLITS.index(split)])
            splits[split] = summarize(
                tasks[split], self.vocabulary, duplicates=count, kept_out=kept_out
            )
        self._remove_others({shard.file for split in splits.values() for shard in split.shards})
        return splits

    def _shard_tasks(self, split: str, rows: dict[int, str]) -> list[ShardTask]:
        tasks = []
        for number, blocks in enumerate(self._deal(split)):
            parts = np.unique(self.part_of_block[blocks]).tolist()
            task = ShardTask(
                name=f"{split}/dataset-{number}",
                blocks=self.blocks[blocks].tobytes(),
                parts=tuple(self.part_of_block[blocks].tolist()),
                maps={part: self.maps[part] for part in parts},
                sources={part: printable(self.parts[part].source) for part in parts},
                left_out={part: rows[part] for part in parts if part in rows},
                tokens=int(self.tokens[blocks].sum()),
                length=self.settings.length,
                rows=self.settings.rows,
                pad_id=self.vocabulary["special_ids"]["pad"],
                vocab_size=self.vocabulary["vocab_size"],
                folder=str(self.tasks),
                shards=str(self.shards),
            )
            tasks.append(task._replace(key=results.key([*map(str, task[:-3]), self.inputs])))
        return tasks

    def _remove_others(self, names: set[str]) -> None:
        """Removes files beside the shards that killed tasks left, or a start with another text."""
        names = names | {table_name(name) for name in names} | {PARTS}
        for folder in (*SPLITS, "documents"):
            for name in sizes(self.shards / folder):
                if f"{folder}/{name}" not in names:
                    (self.shards / folder / name).unlink(missing_ok=True)
