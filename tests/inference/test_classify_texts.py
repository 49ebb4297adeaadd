"""`predict` of a classifier: what comes out, what is refused, and the ways to call it."""

import copy
import dataclasses
import io
import json

import jax
import numpy as np
import pytest
import scipy

from mlm.data import examples, tokenizer
from mlm.errors import InputError
from mlm.inference.answers import answer_texts
from mlm.inference.classify_texts import TextClassifier
from mlm.model import classifier
from mlm.pretrained.load import Pretrained
from tests.support.streams import Pipe, Terminal
from tests.support.trained_classifier import make

TEXTS = [
    "Where is my card?",
    "rain",
    "a dog and a cat and a fish and a bird and a horse and a dog and a cat",
    "snow",
]


def classifier_of(model: Pretrained, top_k: int = 5) -> TextClassifier:
    return TextClassifier(model, tokenizer.load(model.tokenizer), top_k)


def predicted(predictor: TextClassifier, lines: str) -> list[dict]:
    out = io.StringIO()
    answer_texts(predictor, [], Pipe(lines), out)
    return [json.loads(line) for line in out.getvalue().split("\n")[:-1]]


@pytest.fixture(scope="module")
def predictor(trained_classifier) -> TextClassifier:
    return classifier_of(trained_classifier)


def test_probabilities_are_the_softmax_of_each_text_alone(trained_classifier, predictor):
    tok = tokenizer.load(trained_classifier.tokenizer)
    module = trained_classifier.module
    found = predicted(predictor, "\n".join(TEXTS) + "\n")
    assert [line["text"] for line in found] == TEXTS
    names = classifier.class_names(trained_classifier.config)
    logits = jax.jit(module.logits)
    for line in found:
        ids = np.full((1, 32), tok.pad_token_id, np.int32)
        encoded = tok(line["text"], truncation=True, max_length=24)["input_ids"]  # as in training
        ids[0, : len(encoded)] = encoded
        attention = (np.arange(32) < len(encoded)).astype(np.int32)[None]
        probs = scipy.special.softmax(logits(trained_classifier.params, ids, attention)[0])
        order = np.argsort(-probs)
        assert line["label"] == names[order[0]]
        assert list(line["probabilities"]) == [names[at] for at in order]
        np.testing.assert_allclose(list(line["probabilities"].values()), probs[order], rtol=1e-4)
    assert np.ptp([line["probabilities"]["money"] for line in found]) > 0.05


def test_lines_of_json(predictor):
    lines = [
        '{"text": "rain"}',
        '{"words": "x", "text": "rain"}',
        "{not json",
        '{"text":' + "[" * 90_000,
    ]
    found = predicted(predictor, "\n".join(lines) + "\n")
    assert [line["text"] for line in found] == ["rain", "rain", *lines[2:]]
    assert found[0] == found[1]


def test_a_pair_is_parted_by_a_tab(tmp_path_factory):
    made = make(tmp_path_factory.mktemp("pairs"), pair=True)
    # it may read one, too
    model = classifier_of(made)
    unknown = classifier_of(dataclasses.replace(made, meta={}))
    same = [
        "rain\tsnow",
        '{"first": "rain", "second": "snow"}',
        '{"text": "rain", "text_pair": "snow"}',
    ]
    one, two, three, other = predicted(model, "\n".join([*same, "snow\train"]) + "\n")
    assert one == two == three and one["text_pair"] == "snow"
    assert one["probabilities"] != other["probabilities"]
    pair, single = predicted(unknown, f"{same[0]}\nrain\n")
    assert pair["text_pair"] == "snow" and "text_pair" not in single
    for predictor, line in ((model, "rain"), (unknown, "rain\tsnow\twind")):
        with pytest.raises(InputError, match=r"line 1: .*tab"):
            predicted(predictor, line)


def test_a_number(tmp_path_factory):
    (line,) = predicted(
        classifier_of(make(tmp_path_factory.mktemp("numbers"), labels=())), "rain\n"
    )
    assert line.keys() == {"text", "value"} and isinstance(line["value"], float)


def test_words(tmp_path_factory):
    """Each has the label of its first piece, whatever the spaces; those that are cut off have "O"."""
    model = make(tmp_path_factory.mktemp("words"), of_tokens=True)
    predictor = classifier_of(model)
    text = "the default value of " * 9
    found, same = predicted(predictor, f'  {text}\n{{"text": "{text.replace(" ", "  ")}"}}\n')
    assert (
        found["words"] == same["words"]
        and [word["word"] for word in found["words"]] == text.split()
    )
    tok = tokenizer.load(model.tokenizer)
    encoded = tok(text.strip(), truncation=True, max_length=24)
    logits = np.asarray(
        jax.jit(model.module.logits)(model.params, *map(np.atleast_2d, encoded.values()))[0]
    )
    first = examples.first_pieces(encoded.encodings[0], text.split())
    assert (first < 0).any() and (first >= 0).sum() > 5
    for at, word in zip(first, found["words"], strict=True):
        if at < 0:
            assert (word["label"], word["probability"]) == ("O", None)
        else:
            probs = scipy.special.softmax(logits[at])
            assert word["label"] == classifier.class_names(model.config)[probs.argmax()]
            assert word["probability"] == pytest.approx(probs.max(), rel=1e-4)
    words = ["default", "value\u00a0of", "\u2028c"]  # as CoNLL's files and rows of JSON have them
    for line in ("default  value\u00a0of \u2028c", json.dumps({"text": words})):
        (found,) = predicted(predictor, f"{line}\r\n")
        assert [word["word"] for word in found["words"]] == words
    for line in (" \n", '{"text": ["a", ""]}\n'):
        with pytest.raises(InputError, match=r"line 1: .* empty"):
            predicted(predictor, line)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b"a\tb", "line 2: .* one text"),
        (rb'{"text": "\ud800"}', "line 2: .* UTF-8"),
        (rb'{"\u001b[2J": "x"}', r"line 2: .* under text; its keys: \\u001b\[2J"),
    ],
)
def test_a_bad_line_is_named_and_what_came_before_is_written(predictor, line, match):
    stdin = io.TextIOWrapper(io.BytesIO(b"rain\n" + line + b"\nsnow\n"), encoding="ascii")
    out = io.StringIO()
    with pytest.raises(InputError, match=match):
        answer_texts(predictor, [], stdin, out)
    assert [json.loads(written)["text"] for written in out.getvalue().splitlines()] == ["rain"]


def test_a_hostile_label_does_not_reach_a_terminal(trained_classifier):
    config = copy.deepcopy(trained_classifier.config)
    config.id2label = {number: f"\x1b[2J{name}\n" for number, name in config.id2label.items()}
    predictor = classifier_of(dataclasses.replace(trained_classifier, config=config), top_k=1)
    for stdout in (Terminal(), Pipe()):
        answer_texts(predictor, ["rain"], Terminal(), stdout)
        assert (
            (r"\u001b[2J" in stdout.getvalue()) == stdout.isatty() != ("\x1b" in stdout.getvalue())
        )
    (line,) = predicted(predictor, "rain\n")
    assert line["label"].startswith("\x1b[2J"), "as it is, for programs"
