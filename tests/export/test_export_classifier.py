"""Export of a classifier: it is read back as the same model, its card has its scores, and a damage is found."""

import json

import jax
import numpy as np
import pytest

from mlm.errors import InputError
from mlm.export import export
from mlm.model import classifier
from mlm.pretrained import load, locate
from tests.export.folders import damaged


def test_the_folder_is_read_back(classifier_of, trained_classifier):
    folder = classifier_of("classes").export
    assert locate.is_classifier(str(folder))
    again = load.load(str(folder), head=load.CLASSIFIER)
    assert classifier.class_names(again.config) == ("animal", "money", "weather")
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, trained_classifier.params))
    card = (folder / "README.md").read_text()
    scores = ("| F1, weighted | 43.21% |", "| steps | 5 |", "value: 0.4321")
    for words in ("pipeline_tag: text-classification", "# classes", "`weather`", *scores):
        assert words in card


@pytest.mark.parametrize("marks", [True, False])
def test_the_second_text_has_the_type_that_the_tokenizer_gives_it(classifier_of, tmp_path, marks):
    """Whatever its post-processor says; transformers 5's class for any tokenizer gives none unless told to."""
    folder = damaged(classifier_of("real-bert pairs").export, tmp_path / "copy", lambda _: None)
    file = folder / "tokenizer_config.json"
    names = ["input_ids", "attention_mask"]
    settings = json.loads(file.read_text()) | {
        "model_input_names": [*names, "token_type_ids"] if marks else names
    }
    saved_by_5 = settings | {"tokenizer_class": "TokenizersBackend"}
    if not marks:
        del saved_by_5["model_input_names"]
    for content in (settings, saved_by_5):
        file.write_text(json.dumps(content))
        assert (load.load(str(folder), head=load.CLASSIFIER).config.sep_token_id is None) == (
            not marks
        )


def test_folders_that_are_no_classifiers(trained_classifier, tmp_path):
    export.write_model(trained_classifier, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for change, match in (
        ({"problem_type": "multi_label_classification"}, "multi-label"),
        ({"problem_type": "regression"}, "predicts 3 numbers"),
        # answers are by name
        ({"id2label": {"0": "a", "1": "a", "2": "b"}}, "id2label = .* share a name"),
        ({"classifier_pooling": "mean"}, "mean of a row"),
        ({"hidden_size": 32}, r"config\.json asks for"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content | change))
        with pytest.raises(InputError, match=match):
            load.load(str(tmp_path), head=load.CLASSIFIER)
