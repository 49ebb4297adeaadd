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


def reference(
    kind: str, documents: list[list[int]], length: int
) -> list[list[tuple[int, list[int]]]]:
    """For each row its pieces, (document, tokens); of "concatenated" also the last, partial row."""
    if kind == "concatenated":
        stream = [(number, token) for number, ids in enumerate(documents) for token in ids]
        cut = [stream[first : first + length] for first in range(0, len(stream), length)]
        return [
            [(n, [t for m, t in row if m == n]) for n in dict.fromkeys(m for m, _ in row)]
            for row in cut
        ]
    if kind == "lines":
        return [
            [(n, ids if len(ids) <= length else [*ids[: length - 1], SEP])]
            for n, ids in enumerate(documents)
        ]
    pieces = []
    for number, ids in enumerate(documents):
        body = ids[1:-1]
        cuts = range(0, max(len(body), 1), length - 2)
        pieces += [(number, [CLS, *body[first : first + length - 2], SEP]) for first in cuts]
    packed: list[list[int]] = []  # rows of numbers of pieces
    room = lambda row: length - sum(len(pieces[piece][1]) for piece in row)  # noqa: E731
    for piece in sorted(range(len(pieces)), key=lambda piece: -len(pieces[piece][1])):
        fitting = [row for row in packed if room(row) >= len(pieces[piece][1])]
        if fitting:
            min(fitting, key=room).append(piece)
        else:
            packed.append([piece])
    return [[pieces[piece] for piece in sorted(row)] for row in sorted(packed, key=min)]


def tokens_of(row: list[tuple[int, list[int]]]) -> list[int]:
    return [token for _, ids in row for token in ids]


def counts_of(
    kind: str, documents: list[list[int]], expected: list[list[tuple[int, list[int]]]]
) -> dict[str, int]:
    """The counts of a manifest, by hand; of "concatenated", of whole rows, and what is cut of all documents."""
    first = {number: len(ids) for row in reversed(expected) for number, ids in row}
    kept = [
        first[number] if kind == "concatenated" else min(len(ids), LENGTH)
        for number, ids in enumerate(documents)
    ]
    held = [row for row in expected if kind != "concatenated" or len(tokens_of(row)) == LENGTH]
    return {
        "padding_tokens": sum(LENGTH - len(tokens_of(row)) for row in held),
        "joined_tokens": sum(len(tokens_of(row)) for row in held if len(row) > 1),
        "cut_tokens": sum(map(len, documents)) - sum(kept),
    }


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
        assert made.tokens_N.tolist() == [len(tokens_of(row)) for row in expected]
        assert made.ids_NxL.tolist() == [
            (tokens_of(row) + [PAD] * length)[:length] for row in expected
        ]
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
    """Counted by hand; the entropy is that of the tokens in rows, tokens to a byte are those of whole documents."""
    manifest = made[kind]
    ids = ids_of(texts[:300], tokenizer_folder)
    # whole documents are dealt as concatenated ones are
    order = made["lines" if kind == "lines" else "concatenated"]
    assert (manifest.rows, manifest.full_rows) == (kind, kind == "concatenated")
    for split, facts in manifest.splits.items():
        counts = Counter()
        held = []
        for number, found in enumerate(shard_rows(manifest, split)):
            table = np.load(f"{order.folder}/documents/{split}-{number}.npy")
            documents = [ids[place] for place in table["place"].tolist()]
            expected = reference(kind, documents, LENGTH)
            assert [[t for t in row if t >= 0] for row in found.tolist()] == [
                *map(tokens_of, expected)
            ][: len(found)]
            counts.update(counts_of(kind, documents, expected))
            held += [token for row in expected for token in tokens_of(row) if token > 4]
        assert {key: getattr(facts, key) for key in counts} == counts
        assert facts.joined_tokens > 0 or kind == "lines"
        texts_of_split = [ids[n] for n in range(300) if (n % 10 > 0) == (split == "train")]
        assert facts.documents == len(texts_of_split)
        assert facts.tokens == sum(token > 4 for token in itertools.chain(*texts_of_split))
        probs = np.array([*Counter(held).values()]) / len(held)
        assert facts.unigram_entropy == pytest.approx(-float(np.sum(probs * np.log(probs))))


def test_lines_are_what_transformers_tokenizer_cuts_and_pads(made, texts, tokenizer_folder):
    """As run_mlm.py calls it with --line_by_line."""
    tok = tokenizer.load(tokenizer_folder)
    encoded = tok(texts[:300], padding="max_length", truncation=True, max_length=LENGTH)
    theirs = np.where(encoded["attention_mask"], encoded["input_ids"], -1).tolist()
    ours = np.concatenate(
        [rows for split in ("train", "validation") for rows in shard_rows(made["lines"], split)]
    )
    assert sorted(ours.tolist()) == sorted(theirs)
