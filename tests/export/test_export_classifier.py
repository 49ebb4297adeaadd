"""Export of a classifier: PyTorch's classes for texts and for words give its logits, and a damage is found."""

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import FlaxRobertaForSequenceClassification

from mlm.errors import DamageError, InputError
from mlm.export import export
from mlm.model import classifier
from mlm.paths import UPath
from mlm.pretrained import load, locate
from mlm.workdir import Workdir
from tests.support.pytorch import run_torch
from tests.support.tiny import slow
from tests.support.trained_classifier import make

EVAL = {"step": 5, "kind": "eval", "loss": 1.25, "accuracy": 0.5, "f1": 0.4321, "rows": 29}
KINDS = {"classes": {}, "pairs": {"pair": True}, "regression": {"labels": ()}, "tokens": {"of_tokens": True}}
KINDS |= {"modernbert": {"family": "modernbert"}, "modernbert tokens": {"family": "modernbert", "of_tokens": True}}
KINDS |= {"prelayernorm": {"family": "roberta_prelayernorm"}}
KINDS |= {"real-bert pairs": {"family": "bert", "pair": True, "is_bert": True}, "real-bert": {"family": "bert"}}
KINDS |= {"real-bert tokens": {"family": "bert", "of_tokens": True, "is_bert": True}}
KINDS |= {"bert pairs": {"pair": True, "is_bert": True}, "bert tokens": {"of_tokens": True, "is_bert": True}}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Callable[[str], Workdir]:
    """The workdir of a kind, with its export."""

    @functools.cache
    def make_workdir(kind: str) -> Workdir:
        workdir = Workdir(str(tmp_path_factory.mktemp(kind)))
        export.export(make(pathlib.Path(str(workdir.root)), **KINDS[kind]), workdir.export, scores=EVAL, name=kind)
        return workdir

    return make_workdir


def damaged(workdir: Workdir, folder: pathlib.Path, tensor: str) -> pathlib.Path:
    """A copy of the export whose head is wrong by little."""
    shutil.copytree(str(workdir.export), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor][2, 4] += 0.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("generation", [4, 5])
def test_pytorch_gives_the_same(exported, tmp_path, generation):
    """Ids, logits and the pipeline's probabilities, of one process; and a damage is seen."""
    folders = [exported(kind).export for kind in KINDS]
    folders.append(damaged(exported("classes"), tmp_path / "damaged", "classifier.dense.weight"))
    folders.append(damaged(exported("tokens"), tmp_path / "damaged tokens", "classifier.weight"))
    found = [json.loads(line) for line in run_torch(generation, "tests/pytorch/verify.py", *folders).splitlines()]
    for each, kind in zip(found, [*KINDS, "damaged", "damaged tokens"], strict=True):
        assert each["code"] == (4 if "damaged" in kind else 0), f"{kind}: {each['printed']}"
        own = "Token" if "tokens" in kind else "Sequence"
        name = {"modernbert": "ModernBert", "prelayernorm": "RobertaPreLayerNorm", "real-bert": "Bert"}.get(
            kind.split()[0], "Roberta"
        )
        assert f"every parameter of {name}For{own}Classification is there" in each["printed"]
        assert ("probabilities" in each["printed"]) == (kind != "regression")
        assert ("WRONG logits" in each["printed"]) == ("damaged" in kind)


@pytest.mark.standard
def test_the_folder_is_read_back(exported, trained_classifier):
    folder = str(exported("classes").export)
    assert locate.is_classifier(folder)
    again = load.load(folder, head=load.CLASSIFIER)
    assert classifier.class_names(again.config) == ("animal", "money", "weather")
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, trained_classifier.params))
    names = {path.name for path in pathlib.Path(folder).iterdir()}
    assert names >= {"config.json", "model.safetensors", "flax_model.msgpack", "tokenizer.json", "run_config.json"}
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    assert config["id2label"] == {"0": "animal", "1": "money", "2": "weather"}
    assert config["problem_type"] == "single_label_classification"


def test_the_folder_of_a_classifier_of_words_is_read_back(exported, tmp_path):
    folder = str(exported("tokens").export)
    assert locate.is_classifier(folder)
    again = load.load(folder, head=load.CLASSIFIER)
    assert classifier.kind(again.config) == "tokens" and set(again.params["classifier"]) == {"kernel", "bias"}
    tensors = load_file(UPath(folder) / "model.safetensors")
    assert {name for name in tensors if "roberta" not in name} == {"classifier.weight", "classifier.bias"}
    assert not any("pooler" in name for name in tensors)
    config = json.loads((UPath(folder) / "config.json").read_text())
    assert config["architectures"] == ["RobertaForTokenClassification"] and config["id2label"]["2"] == "weather"
    proof = json.loads((UPath(folder) / "proof.json").read_text())
    assert proof["task"] == "token-classification" and len(proof["rows"][0]["scores"]) == len(proof["rows"][0]["ids"])
    card = (UPath(folder) / "README.md").read_text()
    assert "pipeline_tag: token-classification" in card and "one of 3 labels for each word" in card


@pytest.mark.parametrize(
    "kind", ["classes", *(slow(kind) for kind in KINDS if kind != "classes" and not kind.endswith("tokens"))]
)
def test_the_proof_has_several_lengths_and_texts_that_differ(exported, kind):
    folder = exported(kind).export
    proof = json.loads((folder / "proof.json").read_text())
    lengths = [len(row["ids"]) for row in proof["rows"]]
    assert max(lengths) == lengths[-1] == 32 and len(set(lengths)) >= 3
    logits = load_file(UPath(folder) / "proof.safetensors")["logits"]
    assert logits.std(axis=0).min() > 0.02, "logits that don't depend on the text prove little"


def test_the_card(exported):
    card = (exported("classes").export / "README.md").read_text()
    scores = ("| F1, weighted | 43.21% |", "| steps | 5 |")
    for words in ("pipeline_tag: text-classification", "# classes", "`weather`", *scores):
        assert words in card


@pytest.mark.standard
@pytest.mark.parametrize("broken", ["model.safetensors", slow("flax_model.msgpack")])
def test_damage_on_the_way_is_found_and_the_earlier_export_is_kept(exported, tmp_path, monkeypatch, broken):
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(str(exported("classes").export), str(workdir.export))
    before = {path.name: path.read_bytes() for path in workdir.export.iterdir()}
    write = export.write_model

    def wrong(model, folder):
        params = jax.tree.map(np.array, model.params)
        params["classifier"]["out_proj"]["bias"][1] += 0.01
        write(dataclasses.replace(model, params=params), folder)
        good = "flax_model.msgpack" if broken == "model.safetensors" else "model.safetensors"
        (folder / good).write_bytes(before[good])

    monkeypatch.setattr(export, "write_model", wrong)
    with pytest.raises(DamageError, match=f"{broken}: read back, its logits differ"):
        export.export(make(tmp_path), workdir.export, scores=None, name="x")
    assert {path.name: path.read_bytes() for path in workdir.export.iterdir()} == before


def test_folders_that_are_no_classifiers(exported, tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json and no checkpoints"):
        load.load(str(tmp_path), head=load.CLASSIFIER)
    folder = shutil.copytree(str(exported("classes").export), tmp_path / "copy")
    content = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"problem_type": "multi_label_classification"}, "is a multi-label classifier"),
        ({"problem_type": "regression"}, f"predicts {len(content['id2label'])} numbers per row; one that predicts one"),
        ({"id2label": {str(i + 1): "a" for i in range(len(content["id2label"]))}}, "id2label = .* labels 0 to "),
        ({"model_type": "gpt2"}, "its config.json has model_type = gpt2; it must be "),
        ({"hidden_size": 32}, "where config.json asks for"),
    ):
        (folder / "config.json").write_text(json.dumps(content | change))
        with pytest.raises(InputError, match=words):
            load.load(str(folder), head=load.CLASSIFIER)


@pytest.mark.standard
def test_flax_loads_it(exported):
    stock = FlaxRobertaForSequenceClassification.from_pretrained(str(exported("regression").export))
    assert stock.config.num_labels == 1 and stock.config.problem_type == "regression"
