"""Labelled texts out of files and libraries: what is read, and what is refused with its file and row."""

import math
from decimal import Decimal

import datasets
import pytest

from mlm.data import labelled
from mlm.errors import InputError
from tests.support.labelled_texts import rows, sentences, write_conll, write_jsonl

TABLE = rows(40)
CLASSES = datasets.Features(
    {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
)
WORDS = {"text": ("tokens",), "label": "ner_tags", "kind": "tokens"}
SENTENCES = sentences(20)


def read(source: str, *, text=("text",), label="label", kind="classes", split="train", **more):
    return labelled.read_table(source, labelled.Columns(text, label, kind), split=split, **more)


def refused(source: str, **settings) -> str:
    with pytest.raises(InputError) as caught:
        read(source, **settings)
    return str(caught.value)


def test_csv_of_spreadsheets(tmp_path):
    """Windows' line ends, quoted commas, quotes and line breaks, columns without a name; places are lines."""
    text = 'text,label,,\r\n"one, two",a,,\r\n"three\r\nfour",b,,\r\n\r\n"say ""hi""",a,,\r\n'
    (tmp_path / "a.csv").write_text(text, newline="")
    found = read(f"csv:{tmp_path}/a.csv")
    assert found.texts == [("one, two",), ("three\r\nfour",), ('say "hi"',)]
    assert found.labels == ["a", "b", "a"]
    assert found.places[:2] == [f"csv:{tmp_path}/a.csv, line 2", f"csv:{tmp_path}/a.csv, line 3"]


def test_tsv_has_no_quotes(tmp_path):
    (tmp_path / "a.tsv").write_text('first\tsecond\tscore\n"open\tb, c\t4.5\nx"\ty\t-1\n')
    columns = {"text": ("first", "second"), "label": "score", "kind": "regression"}
    found = read(f"csv:{tmp_path}/a.tsv", **columns)
    assert found.texts == [('"open', "b, c"), ('x"', "y")]
    assert found.labels == [4.5, -1.0]


def test_hf_reads_a_local_folder(tmp_path):
    train, test = TABLE[:30], TABLE[30:]
    for split, part in (("train", train), ("test", test)):
        datasets.Dataset.from_list(part).to_parquet(tmp_path / f"{split}.parquet")
    source = f"hf:{tmp_path}"
    for name, part in (("", train), ("#test", test), ("#train[10:20]", train[10:20])):
        found = read(source + name)
        assert found.texts == [(row["text"],) for row in part]
        assert found.labels == [row["label"] for row in part]
    assert "'nothing'" in refused(source, label="nothing")
    assert "config.classify.validation" in refused(source, split="validation")


def test_hf_names_of_classes(tmp_path):
    """-1 marks rows without a label, as in GLUE's test splits, though a class of training has that name."""
    table = {"text": [*"abcd"], "label": [1, 0, -1, None]}
    datasets.Dataset.from_dict(table, features=CLASSES).to_parquet(tmp_path / "train.parquet")
    assert "row 3: its 'label' is -1" in refused(f"hf:{tmp_path}")
    found = read(f"hf:{tmp_path}", require_labels=False, classes=("-1", "yes"))
    assert found.labels == ["yes", "no", None, None]


@pytest.mark.parametrize("value", ["high", None, "nan", [1], 10**400, 1e39])
def test_targets_that_are_no_numbers(tmp_path, value):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": value}])
    assert "line 1: its 'label'" in refused(source, kind="regression")


@pytest.mark.parametrize(
    ("kind", "classes", "value", "label"),
    [
        ("classes", ("0", "1"), -1, None),
        ("classes", ("-1", "0"), -1.0, "-1.0"),
        ("classes", ("-1", "0"), math.nan, None),
        ("classes", ("-1", ""), " ", None),
        ("classes", ("NaN", "1"), "nan", "nan"),
        ("regression", (), "-1", -1.0),
        ("regression", (), "NaN", None),
    ],
)
def test_what_means_no_label_depends_on_the_classes_of_training(
    tmp_path, kind, classes, value, label
):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": value}])
    assert read(source, kind=kind, classes=classes, require_labels=False).labels == [label]


def test_one_text_of_a_pair_may_be_empty(tmp_path):
    """Two rows of GLUE's QQP have no second question."""
    table = [{"a": "x", "b": "", "label": 0}, {"a": "", "b": " ", "label": 0}]
    source = write_jsonl(tmp_path / "a.jsonl", table)
    assert read(source, text=("a", "b"), limit=1).texts == [("x", "")]
    assert "line 2: its 'a' and 'b' is empty" in refused(source, text=("a", "b"))


BAD_FILES = {  # format and fault: content, what the sentence must name
    "csv empty text": ("text,label\na,b\n  ,b\n", "line 3: its 'text'"),
    "csv too few": ("text,label\na,b\nd\n", "line 3: has 1 columns where the header has 2"),
    "csv no rows": ("text,label\n", "no rows"),
    "csv stray quote": ('text,label\n"a\nb",x\n"a" b,x\n', "line 4"),
    "csv twice": ("text,label,label\na,b,c\n", "2 of its columns are named 'label'"),
    "jsonl an array": ('[\n{"text": "a", "label": 1},\n', "line 1: begins a JSON array"),
    "jsonl deep": ("[" * 100_000 + "\n", "line 1"),
    "jsonl no column": ('\n{"text": "a"}\n', "line 2: its 'label' is missing"),
    "jsonl list label": ('{"text": "a", "label": [1]}\n', "line 1: its 'label' is [1]"),
    "jsonl nan label": ('{"text": "a", "label": NaN}\n', "line 1: its 'label' is nan"),
    "jsonl surrogate": ('{"text": "\\ud800", "label": 1}\n', "line 1: its 'text' has"),
    "conll no label": ("EU\tO\nrejects\n", "line 2: lacks"),
    "conll no word": ("EU\tO\n\tO\n", "line 2: lacks"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_bad_files(tmp_path, fault):
    kind = fault.partition(" ")[0]
    content, words = BAD_FILES[fault]
    columns = WORDS if kind == "conll" else {}
    (tmp_path / "bad").write_text(content)
    sentence = refused(f"{kind}:{tmp_path}/bad", split="validation", **columns)
    assert words in sentence and f"{tmp_path}/bad" in sentence


def test_the_same_sentences_of_each_source(tmp_path):
    names = ["O", "I-LIFE", "B-LIFE", "B-CASH"]
    columns = {"tokens": datasets.Value("string"), "ner_tags": datasets.ClassLabel(names=names)}
    features = datasets.Features({name: datasets.List(kind) for name, kind in columns.items()})
    table = datasets.Dataset.from_list(SENTENCES, features=features)
    table.to_parquet(tmp_path / "train.parquet")
    for source in (
        write_conll(tmp_path / "a.txt", SENTENCES),
        write_jsonl(tmp_path / "a.jsonl", SENTENCES),
        f"hf:{tmp_path}#train",
    ):
        found = read(source, **WORDS)
        assert found.texts == [tuple(row["tokens"]) for row in SENTENCES] and found.is_tokens
        assert found.labels == [tuple(row["ner_tags"]) for row in SENTENCES]
    assert found.names == names


def test_conll_comments_tabs_and_places(tmp_path):
    text = "# id = 1\nEU B-X\r\nrejects O\n\n\n-DOCSTART- O\n\n# x\n# B-X\n#tag O\n# O\n\n"
    text += "New York\tNNP\tB-X\n.\t.\t-100"  # no label
    (tmp_path / "a.conll").write_text(text, encoding="utf-8")
    found = read(f"conll:{tmp_path}/a.conll", **WORDS)
    assert found.texts == [("EU", "rejects"), ("#", "#tag", "#"), ("New York", ".")]
    assert found.labels == [("B-X", "O"), ("B-X", "O", "O"), ("B-X", None)]
    assert found.places == [f"conll:{tmp_path}/a.conll, line {number}" for number in (2, 9, 13)]


def test_labels_may_be_decimals(tmp_path):
    table = {"text": ["a", "b"], "label": [Decimal("1.50"), Decimal(2)]}
    datasets.Dataset.from_dict(table).to_parquet(tmp_path / "train.parquet")
    assert read(f"hf:{tmp_path}").labels == ["1.50", "2.00"]
    assert read(f"hf:{tmp_path}", kind="regression").labels == [1.5, 2.0]


def test_sentences_to_predict_need_no_labels(tmp_path):
    (tmp_path / "a.conll").write_text("EU\nrejects\n")
    assert read(f"conll:{tmp_path}/a.conll", **WORDS, require_labels=False).labels == [None]
    rows = [{"tokens": ["c"]}, {"tokens": ["c"], "ner_tags": [-1]}]
    source = write_jsonl(tmp_path / "a.jsonl", [*rows, {"tokens": ["c"], "ner_tags": ["O"]}])
    assert read(source, **WORDS, require_labels=False).labels == [None, None, ("O",)]


@pytest.mark.parametrize(
    ("words", "labels", "message"),
    [
        (["a", "b"], ["O"], "has 2 words, 1 labels"),
        (["a", 3], ["O", "O"], "its 'tokens' has 3"),
        (["a", ""], ["O", "O"], "its 'tokens' has '', no word"),
        (["a", "b"], [math.nan, "O"], "its 'ner_tags' is nan"),
        ("a cat", "x", "its 'tokens' is 'a cat'; config.classify.kind = tokens"),
    ],
)
def test_bad_sentences(tmp_path, words, labels, message):
    source = write_jsonl(tmp_path / "a.jsonl", [{"tokens": words, "ner_tags": labels}])
    assert f"line 1: {message}" in refused(source, **WORDS)
