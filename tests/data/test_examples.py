"""Token ids of labelled texts: labels, truncation, the order of batches, and the few lengths that they have."""

import dataclasses
import itertools

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from mlm.data import examples as data
from mlm.data import tokenizer
from mlm.data.examples import Examples
from mlm.data.labelled import Columns, Table
from mlm.errors import InputError
from tests.data.rows import assert_same
from tests.support.labelled_texts import rows, sentences, write_conll, write_jsonl

ORDER = {"seed": 3, "global_batch": 16, "lanes": 4}
ROWS = rows(83)


def table(texts: list[tuple[str, ...]], labels: list, **kind) -> Table:
    return Table("x.csv", texts, labels, ["line 1"] * len(texts), **kind)


@pytest.fixture(autouse=True)
def short_batches(monkeypatch):
    monkeypatch.setattr(data, "MULTIPLE", 8)


@pytest.fixture(scope="module")
def examples(tokenizer_folder) -> Examples:
    train = table([(row["text"],) for row in ROWS], [row["label"] for row in ROWS])
    names = data.class_names(train)
    return data.tokenize({"train": train}, names, tokenizer_folder=tokenizer_folder, length=24)


def take(
    examples: Examples, count: int, start: int = 0, part: tuple[int, int] = (0, 16), **order
) -> list[dict]:
    stream = data.train_batches(examples, **(ORDER | order), start_step=start, rows=part)
    return list(itertools.islice(stream, count))


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["b", "a", "b"], ("a", "b")),
        (["10", "9", "-1", "9"], ("-1", "9", "10")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["10.0", "9.5", "-1.0"], ("-1.0", "9.5", "10.0")),
        # whatever PYTHONHASHSEED
        (["7", "07", "\uff17", "0", "-0", "00"], ("-0", "0", "00", "07", "7", "\uff17")),
        (["1", "1.0", "0.0", "True", "true"], ("0.0", "1", "true")),
    ],
)
def test_classes_are_sorted(labels, names):
    assert data.class_names(table([("a",)] * len(labels), labels)) == names
    with pytest.raises(InputError, match=r"x\.csv: "):
        data.class_names(table([("a",)] * 2, labels[:1] * 2))


def test_ids_and_labels_are_those_of_the_rows(examples, tokenizer_folder):
    tok = tokenizer.load(tokenizer_folder)
    split = examples.splits["train"]
    assert examples.labels == ("animal", "money", "weather")
    truncated = 0
    for number, row in enumerate(ROWS):
        ids = tok(row["text"], truncation=True, max_length=24)["input_ids"]
        assert split.tokens[split.starts[number] : split.starts[number + 1]].tolist() == ids
        assert examples.labels[split.labels_N[number]] == row["label"]
        truncated += len(tok(row["text"])["input_ids"]) > 24
    assert split.truncated == truncated > 0 and split.lengths.max() == 24


def test_the_order_does_not_depend_on_hosts_or_restarts(examples):
    whole = take(examples, 12)
    for start, part in ((0, (0, 8)), (5, (8, 16)), (9, (4, 12))):
        found = take(examples, 12 - start, start, part)
        for batch, expected in zip(found, whole[start:], strict=True):
            assert_same(batch, {key: column[slice(*part)] for key, column in expected.items()})
    (other,) = take(examples, 1, seed=4)
    assert not np.array_equal(other["record_id"], whole[0]["record_id"])


def test_rows_are_padded_to_few_lengths(examples):
    split = examples.splits["train"]
    seen = set()
    for batch in take(examples, 40, global_batch=4, part=(0, 4)):
        lengths = split.lengths[batch["record_id"]]
        width = min(-(-lengths.max() // 8) * 8, 24)
        np.testing.assert_array_equal(batch["attention_mask"].sum(axis=1), lengths)
        padding = batch["input_ids"][batch["attention_mask"] == 0]
        assert len(padding) == 4 * width - lengths.sum() and (padding == examples.pad_id).all()
        seen.add(width)
    assert len(seen) > 1 and seen <= set(examples.lengths())
    # where the longest is no multiple
    assert dataclasses.replace(examples, length=20).lengths() == [8, 16, 20]


@pytest.mark.parametrize("batch", [16, 128])
def test_evaluation_meets_each_row_once(examples, batch):
    """Every host pads its rows to the longest of all."""
    half = batch // 2
    hosts = [
        data.eval_batches(examples, split="train", batch=batch, rows=rows)
        for rows in ((0, half), (half, batch))
    ]
    ids = []
    for one, other in zip(*hosts, strict=True):
        assert one["input_ids"].shape == other["input_ids"].shape
        ids += [*one["record_id"], *other["record_id"]]
    assert ids[:83] == data.eval_order(examples, "train").tolist()
    assert sorted(ids[:83]) == list(range(83))


def test_a_label_that_the_training_split_lacks(tmp_path):
    train = write_conll(tmp_path / "a", sentences(9))
    test = write_jsonl(tmp_path / "b", [{"tokens": ["a"], "ner_tags": ["B-NEW"]}])
    columns = Columns(("tokens",), "ner_tags", "tokens")
    with pytest.raises(InputError, match=r"/b, line 1: .*'B-NEW'"):
        data.read_tables({"train": train, "test": test}, columns)


SENTENCE = "Peter's cat , in Zürich-West , is called # Numpy 3.5 ( the naïve one ) ."


@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece"])
def test_the_pieces_of_words_are_those_of_running_text(tokenizers, kind):
    """And the first piece is transformers' of words that are split already."""
    tok = tokenizer.load(tokenizers[kind])
    if kind == "bpe":  # transformers asks for a space before the first word, too
        tok.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    words = SENTENCE.split()
    encoding = tok(SENTENCE).encodings[0]
    first = data.first_pieces(encoding, words).tolist()
    assert first[0] == 1 and first == sorted(set(first))
    for start, word in zip(first, words, strict=True):
        piece = tok.decode([encoding.ids[start]]).strip()
        assert word.startswith(piece) or not word.isascii()
    if kind != "unigram":
        stock = tok(words, is_split_into_words=True).encodings[0]
        assert stock.ids == encoding.ids
        assert first == [stock.word_ids.index(word) for word in range(len(words))]


def test_the_label_of_a_word_is_at_its_first_piece(tokenizer_folder):
    found = sentences(40)
    texts = [tuple(row["tokens"]) for row in found]
    labels = [tuple(row["ner_tags"]) for row in found]
    train = table(texts, labels, is_tokens=True)
    new = dataclasses.replace(train, labels=[None] * 40)
    names = data.class_names(train)
    tables = {"train": train, "new": new}
    examples = data.tokenize(tables, names, tokenizer_folder=tokenizer_folder, length=64)
    tok = tokenizer.load(tokenizer_folder)
    assert examples.labels == ("B-CASH", "B-LIFE", "I-LIFE", "O")
    batch = examples.splits["train"].batch(np.array([7, 3]), 64, examples.pad_id)
    for ids, labels_L, row in zip(batch["input_ids"], batch["label"], (7, 3), strict=True):
        places_W = np.flatnonzero(labels_L >= 0)
        assert tuple(examples.labels[label] for label in labels_L[places_W]) == labels[row]
        for place, word in zip(places_W, texts[row], strict=True):
            assert word.startswith(tok.decode([ids[place]]).strip())
    assert (examples.splits["new"].batch(np.arange(3), 64, 1)["label"] == -1).all()
