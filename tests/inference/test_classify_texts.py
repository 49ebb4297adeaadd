"""`predict` of a classifier: what comes out, what is refused, and the ways to call it."""

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
from tests.support.streams import Pipe
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
    found = predicted(predictor, "\n".join(TEXTS) + "\n")
    assert [line["text"] for line in found] == TEXTS
    names = classifier.class_names(trained_classifier.config)
    logits = jax.jit(trained_classifier.module.logits)
    for line in found:
        # cut as in training
        row = tok([line["text"]], truncation=True, max_length=24, padding="max_length")
        columns = (np.array(row[name]) for name in ("input_ids", "attention_mask"))
        probs = scipy.special.softmax(logits(trained_classifier.params, *columns)[0])
        order = np.argsort(-probs)
        assert list(line["probabilities"]) == [names[at] for at in order]
        assert line["label"] == names[order[0]]
        np.testing.assert_allclose(list(line["probabilities"].values()), probs[order], rtol=1e-4)
    assert np.ptp([line["probabilities"]["money"] for line in found]) > 0.05


def test_a_pair_is_parted_by_a_tab_or_an_object_of_json(tmp_path):
    made = make(tmp_path, pair=True)
    model = classifier_of(made)
    unknown = classifier_of(dataclasses.replace(made, meta={}))  # it may read one, too
    same = [
        "rain\tsnow",
        '{"first": "rain", "second": "snow"}',
        '{"text": "rain", "text_pair": "snow"}',
    ]
    one, two, three, other = predicted(model, "\n".join([*same, "snow\train"]) + "\n")
    assert one == two == three and one["text_pair"] == "snow"
    assert one["probabilities"] != other["probabilities"]
    pair, single, brace = predicted(unknown, f"{same[0]}\nrain\n{{not json\n")
    assert (
        pair["text_pair"] == "snow" and "text_pair" not in single and brace["text"] == "{not json"
    )
    for predictor, line in ((model, "rain"), (unknown, "rain\tsnow\twind")):
        with pytest.raises(InputError, match=r"line 1: .*tab"):
            predicted(predictor, line)


def test_a_number(tmp_path):
    (line,) = predicted(classifier_of(make(tmp_path, labels=())), "rain\n")
    assert line.keys() == {"text", "value"} and isinstance(line["value"], float)


def test_words(tmp_path):
    """Each has the label of its first piece, whatever the spaces; those that are cut off have "O"."""
    model = make(tmp_path, of_tokens=True)
    predictor = classifier_of(model)
    text = "the default value of " * 9
    (found,) = predicted(predictor, f"  {text}\n")
    assert [word["word"] for word in found["words"]] == text.split()
    encoded = tokenizer.load(model.tokenizer)(text.strip(), truncation=True, max_length=24)
    columns = map(np.atleast_2d, encoded.values())
    logits = np.asarray(jax.jit(model.module.logits)(model.params, *columns)[0])
    first = examples.first_pieces(encoded.encodings[0], text.split())
    assert (first < 0).any() and (first >= 0).sum() > 5
    names = classifier.class_names(model.config)
    for at, word in zip(first, found["words"], strict=True):
        probs = scipy.special.softmax(logits[at])
        expected = ("O", None)
        if at >= 0:
            expected = (names[probs.argmax()], pytest.approx(probs.max(), rel=1e-4))
        assert (word["label"], word["probability"]) == expected
    words = ["default", "value\u00a0of", "\u2028c"]  # as CoNLL's files and rows of JSON have them
    for line in ("default  value\u00a0of \u2028c", json.dumps({"text": words})):
        (found,) = predicted(predictor, f"{line}\r\n")
        assert [word["word"] for word in found["words"]] == words
    with pytest.raises(InputError, match=r"line 1: .* empty"):
        predicted(predictor, '{"text": ["a", ""]}\n')


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("a\tb", "line 1: .* one text"),
        (r'{"text": "\ud800"}', "line 1: .* UTF-8"),
        (r'{"\u001b[2J": "x"}', r"line 1: .* under text; its keys: \\u001b\[2J"),
    ],
)
def test_a_bad_line_is_named(predictor, line, match):
    with pytest.raises(InputError, match=match):
        predicted(predictor, line)
