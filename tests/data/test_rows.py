"""Rows of all three kinds, against a reference written from their definition; and what is said of them."""

import itertools
from collections import Counter

import numpy as np
import pytest

from mlm.data import rows, tokenizer
from mlm.data.manifest import Manifest
from tests.data.rows import small_parts
from tests.support.corpora import LENGTH, ids_of, shard_rows, write_shards

CLS = 0
SEP = 2
PAD = 1
KINDS = ("concatenated", "lines", "documents")
Row = list[tuple[int, list[int]]]  # its pieces: the number of the document, and tokens


def reference(kind: str, documents: list[list[int]], length: int) -> list[Row]:
    """The rows; of "concatenated" also the last, partial one."""
    if kind == "concatenated":
        stream = [(number, token) for number, ids in enumerate(documents) for token in ids]
        cut = [stream[first : first + length] for first in range(0, len(stream), length)]
        by_document = (itertools.groupby(row, lambda pair: pair[0]) for row in cut)
        return [[(n, [token for _, token in pairs]) for n, pairs in row] for row in by_document]
    if kind == "lines":
        cut = (ids if len(ids) <= length else [*ids[: length - 1], SEP] for ids in documents)
        return [[(number, ids)] for number, ids in enumerate(cut)]
    pieces = []
    for number, ids in enumerate(documents):
        body = ids[1:-1]
        cuts = range(0, max(len(body), 1), length - 2)
        pieces += [(number, [CLS, *body[first : first + length - 2], SEP]) for first in cuts]
    sizes = [len(ids) for _, ids in pieces]
    packed: list[list[int]] = []  # rows of numbers of pieces
    for piece in sorted(range(len(pieces)), key=lambda piece: -sizes[piece]):
        rooms = [length - sizes[piece] - sum(sizes[each] for each in row) for row in packed]
        fitting = [number for number, room in enumerate(rooms) if room >= 0]
        if fitting:
            packed[min(fitting, key=rooms.__getitem__)].append(piece)
        else:
            packed.append([piece])
    return [[pieces[piece] for piece in sorted(row)] for row in sorted(packed, key=min)]


def tokens_of(row: Row) -> list[int]:
    return [token for _, ids in row for token in ids]


@pytest.mark.parametrize("kind", ["lines", "documents"])
def test_rows_are_those_of_the_definition(kind):
    """Of documents of many sizes, empty and longer than several rows; where each piece is, too."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        length = int(rng.integers(8, 20))
        size = int(rng.integers(3, 60))
        documents = [
            [CLS, *rng.integers(5, 600, rng.integers(0, size)).tolist(), SEP]
            for _ in range(rng.integers(60))
        ]
        sizes = np.array([*map(len, documents)], np.int64)
        ids = np.array([*itertools.chain(*documents)], np.uint16)
        made = rows.arrange(kind, ids, sizes, length=length, pad_id=PAD)
        expected = reference(kind, documents, length)
        tokens = list(map(tokens_of, expected))
        assert made.tokens_N.tolist() == list(map(len, tokens))
        assert made.ids_NxL.tolist() == [(row + [PAD] * length)[:length] for row in tokens]
        assert made.document_P.tolist() == [number for row in expected for number, _ in row]
        starts = [
            n * length + len(tokens_of(row[:k]))
            for n, row in enumerate(expected)
            for k in range(len(row))
        ]
        assert made.start_P.tolist() == starts


@pytest.fixture(scope="module")
def made(texts, tokenizer_folder, tmp_path_factory) -> dict[str, Manifest]:
    """The same documents, 128 of which are longer than a row, in all kinds of rows."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        small_parts(patch, part=10**9)  # blocks, in one part
        return {
            kind: write_shards(texts[:300], folder / kind, tokenizer_folder, rows=kind)
            for kind in KINDS
        }


@pytest.mark.parametrize("kind", KINDS)
def test_shards_hold_the_rows_of_the_definition_and_their_counts(
    made, texts, tokenizer_folder, kind
):
    """The entropy is that of the tokens in rows, other counts are those of whole documents."""
    manifest = made[kind]
    ids = ids_of(texts[:300], tokenizer_folder)
    # whole documents are dealt as concatenated ones are
    order = made["lines" if kind == "lines" else "concatenated"]
    assert (manifest.rows, manifest.full_rows) == (kind, kind == "concatenated")
    for name, split in manifest.splits.items():
        counts = Counter()
        held = Counter()
        for number, found in enumerate(shard_rows(manifest, name)):
            table = np.load(f"{order.folder}/documents/{name}-{number}.npy")
            documents = [ids[place] for place in table["place"].tolist()]
            expected = reference(kind, documents, LENGTH)
            tokens = list(map(tokens_of, expected))
            assert [[t for t in row if t >= 0] for row in found.tolist()] == tokens[: len(found)]
            held.update(token for token in itertools.chain(*tokens) if token > 4)
            counts["padding_tokens"] += sum(LENGTH - len(row) for row in tokens[: len(found)])
            first = {n: len(piece) for row in reversed(expected) for n, piece in row}
            if kind != "concatenated":
                first = {n: min(len(document), LENGTH) for n, document in enumerate(documents)}
            counts["cut_tokens"] += sum(map(len, documents)) - sum(first.values())
        assert {key: getattr(split, key) for key in counts} == counts
        of_split = [ids[n] for n in range(300) if (n % 10 > 0) == (name == "train")]
        assert split.documents == len(of_split)
        assert split.tokens == sum(token > 4 for token in itertools.chain(*of_split))
        probs = np.array([*held.values()]) / held.total()
        assert split.unigram_entropy == pytest.approx(-float(np.sum(probs * np.log(probs))))


def test_lines_are_what_transformers_tokenizer_cuts_and_pads(made, texts, tokenizer_folder):
    """As run_mlm.py calls it with --line_by_line."""
    tok = tokenizer.load(tokenizer_folder)
    encoded = tok(texts[:300], padding="max_length", truncation=True, max_length=LENGTH)
    theirs = np.where(encoded["attention_mask"], encoded["input_ids"], -1).tolist()
    ours = [shard_rows(made["lines"], split) for split in ("train", "validation")]
    assert sorted(np.concatenate(sum(ours, [])).tolist()) == sorted(theirs)  # noqa: RUF017
