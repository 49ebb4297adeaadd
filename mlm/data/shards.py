"""A corpus -> TFRecord shards, as tasks: {folder}/{split}/dataset-{shard}-{records}.tfrecord, and manifest.json.

Map (map_part.py) each part, deduplicate by ranges of the hash, deal the blocks to shards (deal.py), and reduce
(write_shard.py) each shard. The bytes depend on the corpus, the tokenizer and the settings, never on the workers.

What the tasks leave for one another is in {folder}.tmp, which all workers share:

    tasks/     results of the tasks, by their keys: a restart does what is missing
    texts/     the text of sources that are slow to read, for the tokenizer and the shards
    {inputs}/  the shards, renamed to {folder} at the end. In a bucket they are put in place one by one, and the
               manifest last
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlm.cluster.engine import Engine
from mlm.data import deal, deduplicate, keep_out, results, tokenizer
from mlm.data.corpus import Corpus, Part
from mlm.data.manifest import NAME, SPLITS, Manifest, Shard, Split, load_manifest
from mlm.data.map_part import BLOCK, Map, map_part
from mlm.data.write_shard import PARTS, WriteShard, table_name, write_shard
from mlm.errors import InputError
from mlm.paths import UPath, canonical, children, is_remote, remove, sizes
from mlm.workdir import work_folder

BLOCK_BYTES = (2**12, 2**22)  # of text, in a block: the least and the most
BLOCKS = 64  # of a shard, between those two
UNKNOWN_BYTES = 2**20  # of a block, where the size of a source is not known
DOCUMENT_BYTES = 500  # about
LISTED = 12  # groups in a message


class Settings(NamedTuple):
    """What decides the rows besides the corpus and the tokenizer."""

    length: int  # tokens in a row
    counts: dict[str, int]  # shards of training and of the held-out splits ("validation"); small ones get fewer
    seed: int = 0  # of the deal


def write(
    corpus: Corpus, settings: Settings, *, tokenizer_folder: str, folder: str, source: str, engine: Engine
) -> Manifest:
    """Writes the shards of all splits, unless the same ones are there; returns when they are complete.

    The tokens of the documents, <s> ... </s> each, are concatenated and cut into rows, as in transformers' TF-TPU
    example. `source` describes the corpus, and changes when it does.
    """
    vocabulary = tokenizer.manifest_fields(tokenizer_folder)
    inputs = results.key(source, vocabulary["tokenizer_fingerprint"], settings)
    if not _is_done(folder, inputs):
        job = _Job(corpus, settings, tokenizer_folder, vocabulary, UPath(folder), inputs, engine)
        splits, left_out = job.run()
        fields = {"folder": folder, "length": settings.length, **vocabulary, "inputs": inputs, "source": source}
        manifest = Manifest(**fields, full_rows=True, splits=splits, left_out=left_out)
        with results.written(job.shards / NAME) as file:
            file.write_text(manifest.to_json() + "\n")
        if not is_remote(folder):
            job.shards.rename(canonical(folder))
        remove(job.root)
    return load_manifest(folder)


def _is_done(folder: str, inputs: str) -> bool:
    """Returns whether the shards are in place; raises InputError if something else is there."""
    target = UPath(folder)
    if not (target.is_file() or children(target)):
        return False
    if (target / NAME).is_file():
        if load_manifest(folder).inputs == inputs:
            return True
    elif is_remote(folder) and (work_folder(folder) / inputs).is_file():
        return False  # begun, and not finished
    raise InputError(
        f"{folder}: holds shards of another corpus, tokenizer or setting; use another --workdir or shards.dir, or "
        "restore the config."
    )


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
        self.tables: dict[str, np.ndarray] = {}  # BLOCK of the parts that are mapped, by their keys
        self.kept_out: dict[str, np.ndarray] = {}  # places of what holds text to keep out

    def run(self) -> tuple[dict[str, Split], dict[str, str]]:
        """Returns what the manifest says of the splits, and of documents left out."""
        if is_remote(self.folder):
            results.save(self.root / self.inputs)  # shows that these shards are begun
        else:
            results.remove_leftovers(Path(str(self.tasks)))
        self._map()
        self._check_share()
        rows, counts, left_out = self._leave_out()
        return self._reduce(rows, counts), left_out

    def _do(self, function: Any, tasks: list, *, label: str, last: str) -> None:
        """Runs the tasks whose last file is not there."""
        there = sizes(self.tasks)
        for _ in self.engine.each(function, [task for task in tasks if f"{task.key}{last}" not in there], label=label):
            pass

    def _map(self) -> None:
        parts, most = self.corpus.parts(), self.corpus.max_documents
        has_test = any(part.split == "test" or "test" in part.cut for part in parts)
        self.splits = SPLITS if has_test else SPLITS[:2]
        sized = [part for part in parts if part.split != "test"]  # which changes nothing in the other splits
        total = sum(part.bytes for part in sized) if all(part.bytes for part in sized) else 0
        if most:
            splits = {(part.source, part.split) for part in sized}
            total = min(total, DOCUMENT_BYTES * most * len(splits)) if total else DOCUMENT_BYTES * most * len(splits)
        size = total // (BLOCKS * self.settings.counts["train"])
        size = min(max(size, BLOCK_BYTES[0]), BLOCK_BYTES[1]) if total else UNKNOWN_BYTES
        tasks, held_out = {}, keep_out.run(self._do, self.corpus.kept_out(), str(self.tasks))
        decisive = ("field", "group", "validation_fraction", "validation_groups", "test_fraction", "test_groups")
        corpus = {name: getattr(self.corpus, name) for name in decisive}
        near, fingerprint = self.corpus.near_duplicates > 0, self.vocabulary["tokenizer_fingerprint"]
        folders = str(self.root / "texts"), str(self.tasks)

        def read(limited: list[tuple[Part, int]]) -> list[int]:
            for part, most in limited:
                key = results.key(part, most, corpus, size, held_out, near, fingerprint)
                task = Map(part, self.corpus, most, self.tokenizer_folder, fingerprint, size, held_out, *folders, key)
                tasks[part, most] = task
            own = [tasks[each] for each in limited]
            self._do(map_part, own, label="tokenize", last=".blocks")
            new = [task.key for task in own if task.key not in self.tables]
            self.tables |= zip(new, self._load_each(new, "blocks", BLOCK), strict=True)
            kept_out = self._load_each(new if held_out else [], "kept_out", np.uint32)
            self.kept_out |= zip(new, kept_out, strict=False)
            return [sum(self.tables[t.key]["documents"].tolist()) + len(self.kept_out.get(t.key, ())) for t in own]

        limited = self.corpus.limited(parts, read, wave=self.engine.workers)
        self.parts, self.maps = [part for part, _ in limited], [tasks[each].key for each in limited]
        tables = [self.tables.pop(name) for name in self.maps]
        self.blocks = np.concatenate(tables)
        self.part_of_block = np.repeat(np.arange(len(tables), dtype=np.uint32), [len(table) for table in tables])
        self.tokens = self.blocks["tokens"].copy()  # of each block, without what is left out

    def _load_each(self, keys: Iterable[str], kind: str, dtype: np.dtype | type) -> Iterator[np.ndarray]:
        return results.at_once(lambda key: results.load(self.tasks / f"{key}.{kind}", dtype), keys)

    def _leave_out(self) -> tuple[dict[int, str], dict[str, dict[str, int]], dict[str, str]]:
        """Returns the files of rows to leave out by part, the counts of each split, and what the manifest lists."""
        blocks, near, folder = self.blocks, self.corpus.near_duplicates, str(self.tasks)
        names = [f"{part.source}, {part.name}, document" for part in self.parts]
        count = int(blocks["documents"].sum())
        tasks = deduplicate.run(self._do, tuple(self.maps), documents=count, near=near, folder=folder)
        lost = np.concatenate([*self._load_each([task.key for task in tasks], "dropped", deduplicate.DROPPED)])
        places = np.searchsorted(self.part_of_block, lost["part"]) + lost["block"]
        np.subtract.at(self.tokens, places, lost["tokens"])
        sums = np.zeros((len(SPLITS), len(deduplicate.WHY)), np.int64)
        np.add.at(sums, (blocks["split"][places], lost["why"]), lost["documents"])
        kept_out = [self.kept_out.get(key, ()) for key in self.maps]
        counts = {split: {"kept_out": sum(map(len, kept_out)) * (split == "train")} for split in SPLITS}
        for split, own in zip(SPLITS, sums.tolist(), strict=True):
            counts[split] |= zip(deduplicate.WHY, own, strict=True)
        losing = set(lost["part"].tolist())
        rows = {part: task.rows(part) for task in tasks for part in range(task.first, task.stop) if part in losing}
        return rows, counts, keep_out.listed(kept_out, names) | deduplicate.listed(tasks, names)

    def _check_share(self) -> None:
        """Raises InputError if whole groups make a held-out split of another size than its fraction in the config."""
        for split in self.splits[1:]:
            divided = np.array([split in part.cut for part in self.parts], bool)[self.part_of_block]
            sizes = np.bincount(self.blocks["split"][divided], self.blocks["bytes"][divided], len(SPLITS))
            self._check_share_of(split, sizes[SPLITS.index(split)] / max(1, sizes.sum()), empty=not sizes.any())

    def _check_share_of(self, split: str, share: float, *, empty: bool) -> None:
        asked, named = getattr(self.corpus, f"{split}_fraction"), set(getattr(self.corpus, f"{split}_groups"))
        fits, found = empty or asked / 2 <= share <= 2 * asked or (split == "test" and not asked), Counter()
        if fits and not named:
            return
        for sizes_of in results.at_once(results.load_json, (self.tasks / f"{name}.groups" for name in self.maps)):
            found.update(sizes_of)
        if found and (missing := sorted(named - found.keys())):
            fix = "name others, or set it to () to choose them by hash"
            what = f"config.corpus.{split}_groups: the corpus has no group {missing[0]!r}"
            raise InputError(f"{what}; {fix}. The largest: {_shown(found)}.")
        if found and not fits:
            raise InputError(
                f"config.corpus.{split}_fraction = {asked:g}: whole groups (corpus.group) make it {share:.4f}; name "
                f"groups in corpus.{split}_groups that hold between half and twice that fraction of the text. "
                f"The largest: {_shown(found)}."
            )

    def _deal(self, split: str) -> list[np.ndarray]:
        """Returns the indices of the blocks of each shard of a split, at least a row in each."""
        own, length = np.flatnonzero(self.blocks["split"] == SPLITS.index(split)), self.settings.length
        hashes, tokens, copies = self.blocks["hash"][own], self.tokens[own], np.ones(len(own), np.int64)
        if split == "train":
            weights = dict(zip(self.corpus.sources, self.corpus.weights, strict=True))
            of_part = np.array([weights[part.source] for part in self.parts])
            copies = deal.copies(hashes, of_part[self.part_of_block[own]])
        count = self.settings.counts["train" if split == "train" else "validation"]
        rows = int((tokens * copies.astype(np.uint64)).sum()) // length
        while True:
            dealt = [own[p] for p in deal.deal(hashes, copies, tokens, count=count, seed=self.settings.seed)]
            if all(self.tokens[picks].sum() >= length for picks in dealt):
                return dealt
            if split == "train":
                text = f"there are only {rows} rows of {length} tokens in {copies.sum()} blocks; lower it."
                raise InputError(f"config.shards.count = {count}: {text}")
            if count == 1:
                need = f"raise corpus.{split}_fraction, or give more text"
                if split == "test":
                    need += ", or name the splits to read without it (#SPLIT)"
                raise InputError(f"the {split} split is shorter than a row of {length} tokens: {need}.")
            count = min(count - 1 - count // 8, max(1, rows))

    def _reduce(self, rows: dict[int, str], counts: dict[str, dict[str, int]]) -> dict[str, Split]:
        """Writes the shards; returns what the manifest says of them."""
        tasks = {split: [] for split in self.splits}
        for split in self.splits:
            for number, picks in enumerate(self._deal(split)):
                records = int(self.tokens[picks].sum()) // self.settings.length
                parts = self.part_of_block[picks].tolist()
                used = sorted(set(parts))
                task = WriteShard(
                    name=f"{split}/dataset-{number}-{records}.tfrecord",
                    blocks=self.blocks[picks].tobytes(),
                    parts=tuple(parts),
                    maps={part: self.maps[part] for part in used},
                    sources={part: self.parts[part].source for part in used},
                    left_out={part: rows[part] for part in used if part in rows},
                    length=self.settings.length,
                    vocab_size=self.vocabulary["vocab_size"],
                    folder=str(self.tasks),
                    shards=str(self.shards),
                )
                tasks[split].append(task._replace(key=results.key([*map(str, task[:-3]), self.inputs])))
        every = [task for split in self.splits for task in tasks[split]]
        self._do(write_shard, every, label="write", last=".json")
        results.save_json(self.shards / PARTS, [[part.source, part.name] for part in self.parts])
        self._remove_others({task.name for task in every})
        return {split: self._summary(tasks[split], counts[split]) for split in self.splits}

    def _remove_others(self, names: set[str]) -> None:
        """Removes files beside the shards that killed tasks left, or a start with another text."""
        names = names | {table_name(name) for name in names} | {PARTS}
        for folder in (*SPLITS, "documents"):
            for name in sizes(self.shards / folder):
                if f"{folder}/{name}" not in names:
                    (self.shards / folder / name).unlink(missing_ok=True)

    def _summary(self, tasks: list[WriteShard], left_out: dict[str, int]) -> Split:
        counts_V, sources = np.zeros(self.vocabulary["vocab_size"], np.int64), Counter()
        for counts_of_shard in self._load_each([task.key for task in tasks], "counts", np.int64):
            counts_V += counts_of_shard
        notes = list(results.at_once(results.load_json, (self.tasks / f"{task.key}.json" for task in tasks)))
        for note in notes:
            sources.update(note["sources"])
        unk_id = self.vocabulary["special_ids"].get("unk")
        unknown = 0 if unk_id is None else int(counts_V[unk_id])
        counts_V[list(self.vocabulary["all_special_ids"])] = 0
        probs = counts_V[counts_V > 0] / counts_V.sum()
        return Split(
            shards=tuple(Shard(**note["shard"]) for note in notes),
            documents=sum(note["documents"] for note in notes),
            **left_out,
            tokens=int(counts_V.sum()),
            unknown_tokens=unknown,
            dropped_tokens=sum(note["dropped_tokens"] for note in notes),
            text_bytes=sum(note["text_bytes"] for note in notes),
            unigram_entropy=float(-np.sum(probs * np.log(probs))),
            sources=dict(sources),
        )


def _shown(groups: Counter) -> str:
    """Returns the largest groups and their sizes, for a message."""
    listed = ", ".join(f"{group} {size / 1e6:.2f} MB" for group, size in groups.most_common(LISTED))
    return listed + (f" and {len(groups) - LISTED} more" if len(groups) > LISTED else "")
