"""The export: what lies in the folder, that it is the model, and what is never overwritten; of classifiers, too."""

import dataclasses
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from safetensors.numpy import load_file
from transformers import AutoTokenizer, FlaxAutoModelForMaskedLM, FlaxRobertaForMaskedLM

from mlm import config as configs
from mlm.data import tokenizer
from mlm.entry import Entry
from mlm.errors import DamageError, InputError
from mlm.export import export, reference
from mlm.model import classifier
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files, load, locate
from mlm.pretrained.locate import SAFETENSORS
from mlm.workdir import Workdir
from tests.export.folders import SCORES, damaged
from tests.support.refusals import snapshot
from tests.support.tokenizers import make_bert_tokenizer, random_model
from tests.support.trained_model import info_of, save_checkpoint


@pytest.fixture(scope="module")
def expected(model) -> reference.Reference:
    return reference.compute(model)


@pytest.fixture
def computed(expected, monkeypatch) -> None:
    """The outputs of `model` are computed once."""
    monkeypatch.setattr(reference, "compute", lambda _: expected)


@pytest.fixture
def unchecked(computed, monkeypatch) -> None:
    """Nothing is read back, which other tests hold."""
    monkeypatch.setattr(export, "check_files", lambda *_: [])


@pytest.fixture
def copy(exported, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(exported, tmp_path / "copy"))


def test_the_folder_is_complete(exported):
    names = "README.md config.json flax_model.msgpack model.safetensors proof.json proof.safetensors run_config.json"
    names += " tokenizer.json tokenizer_config.json"
    assert sorted(path.name for path in exported.iterdir()) == names.split()
    assert [path.name for path in exported.parent.iterdir()] == [exported.name], (
        "a temporary folder was left"
    )
    modes = {path.stat().st_mode for path in exported.iterdir()}
    assert len(modes) == 1, "a file can be read by fewer people than the others"
    config = json.loads((exported / "config.json").read_text())
    assert config["vocab_size"] == 1000, (
        "the vocabulary is the tokenizer's, without the padding of training"
    )
    assert config["architectures"] == ["RobertaForMaskedLM"]
    assert config["max_position_embeddings"] == 32 + 2
    assert json.loads((exported / "tokenizer_config.json").read_text())["model_max_length"] == 32
    assert json.loads((exported / "run_config.json").read_text())["train"]["steps"] == 5


def test_transformers_flax_and_ours_read_the_same_parameters(exported, model):
    ours = load.load(str(exported), head=load.LM_HEAD).leaves
    stock = FlaxAutoModelForMaskedLM.from_pretrained(str(exported))
    assert type(stock) is FlaxRobertaForMaskedLM
    flax = load.flatten_dict(stock.params, sep="/")
    assert ours.keys() == flax.keys() == model.leaves.keys()
    for name, value in model.leaves.items():
        assert np.array_equal(ours[name], value), name
        assert np.array_equal(flax[name], value), name
    assert "lm_head.decoder.weight" not in load_file(exported / "model.safetensors"), "it is tied"


def test_the_averaged_parameters_are_the_model_if_there_are_any(model, tmp_path):
    workdir = Workdir(str(tmp_path))
    config = configs.replace(model.run_config, {"optimizer.ema_decay": 0.9})
    save_checkpoint(workdir, config, info_of(tokenizer.load(model.tokenizer)), 7)
    found = load.from_workdir(workdir, head=load.LM_HEAD)
    np.testing.assert_allclose(found.params["lm_head"]["bias"].std(), 0.2, rtol=0.1)
    np.testing.assert_allclose(model.params["lm_head"]["bias"].std(), 0.3, rtol=0.1)


@pytest.mark.usefixtures("unchecked")
def test_an_earlier_export_or_an_empty_folder_is_replaced_and_nothing_else_is(
    model, copy, tmp_path, monkeypatch
):
    (copy / "old").write_text("of an earlier export")
    for name in ("empty", "volume"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("volume"))
    (tmp_path / "link").symlink_to("empty")
    files = {path.name for path in copy.iterdir()} - {"old"}
    # an empty folder, by a link, one that can't be renamed, and that again
    for name in ("copy", "link", "volume", "volume"):
        export.export(model, UPath(tmp_path / name), scores=None, name=name)
        assert {path.name for path in (tmp_path / name).iterdir()} == files
        assert f"# {name}" in (tmp_path / name / "README.md").read_text()
    assert (tmp_path / "link").is_symlink()
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"notes: .*proof\.json"):
        export.export(model, UPath(notes), scores=None, name="oops")
    assert (notes / "thesis.txt").read_text() == "years of work"


def changed(model, by: float):
    params = jax.tree.map(np.array, model.params)
    params["lm_head"]["bias"][7] += by
    return dataclasses.replace(model, params=params)


@pytest.mark.usefixtures("computed")
def test_damage_on_the_way_is_found_and_the_earlier_export_is_kept(model, copy, monkeypatch):
    """A disk, or a bug in the mapping, that changes a weight by little."""
    before = snapshot(copy)
    write = export.write_model
    monkeypatch.setattr(
        export, "write_model", lambda model, folder: write(changed(model, by=0.01), folder)
    )
    with pytest.raises(DamageError, match=r"model\.safetensors: "):
        export.export(model, UPath(copy), scores=None, name="small")
    assert snapshot(copy) == before
    assert [path.name for path in copy.parent.iterdir()] == ["copy"], "a temporary folder was left"


@pytest.mark.parametrize("broken", ["flax_model.msgpack", "not a number", "a parameter"])
def test_each_of_the_two_files_is_read_back(model, copy, expected, broken):
    good = (copy / SAFETENSORS).read_bytes()
    export.write_model(changed(model, by=np.nan if broken == "not a number" else 0.01), copy)
    if broken != "not a number":
        (copy / SAFETENSORS).write_bytes(good)
    if broken == "a parameter":
        params = {name: value for name, value in model.params.items() if name != "lm_head"}
        (copy / broken).write_bytes(msgpack_serialize(params))
        (copy / broken).rename(copy / "flax_model.msgpack")
    words = {"not a number": r"model\.safetensors: .* nan", "a parameter": "read back .*lm_head"}
    with pytest.raises(DamageError, match=words.get(broken, rf"{broken}: ")):
        export.check_files(copy, expected, model)


@pytest.mark.usefixtures("unchecked")
def test_remote_folders_are_written_with_the_proof_last(model, exported):
    folder = UPath("memory://bucket/run/export")
    for name in ("small", "again"):
        export.export(model, folder, scores=SCORES, name=name)
        assert f"# {name}" in (folder / "README.md").read_text()
    names = [path.name for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)]
    assert names[-1] == "proof.json"
    assert sorted(names) == sorted(path.name for path in exported.iterdir())


@pytest.mark.usefixtures("unchecked")
def test_an_export_can_be_exported(exported, tmp_path):
    """From a folder, whoever wrote it: the same weights, a card that claims no recipe."""
    new = tmp_path / "new"
    source = load.load(str(exported), head=load.LM_HEAD)
    export.export(source, UPath(new), scores=None, name="copy")
    weights = (file.read_bytes() for file in (new / SAFETENSORS, exported / SAFETENSORS))
    assert len(set(weights)) == 1
    assert "recipe is not known" in (new / "README.md").read_text()
    assert not (new / "run_config.json").exists()


def test_the_tokenizer_gives_what_the_model_takes_alone(tmp_path, monkeypatch):
    """BERT's tokenizer beside a RoBERTa without a row for its second type: its export gives no token_type_ids."""
    model = random_model(make_bert_tokenizer(tmp_path / "bert"))
    texts = ("the name of the file", "the list")
    assert model.config.type_vocab_size == 1
    assert max(AutoTokenizer.from_pretrained(model.tokenizer)(*texts)["token_type_ids"]) == 1
    monkeypatch.setattr(export, "check_files", lambda *_: [])
    export.export(model, UPath(tmp_path / "export"), scores=None, name="x")
    encoded = AutoTokenizer.from_pretrained(str(tmp_path / "export"))(*texts)
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert encoded["input_ids"] == tokenizer.load(model.tokenizer)(*texts)["input_ids"]


def test_a_run_of_an_older_version_is_refused(trained_workdir, tmp_path):
    workdir = Workdir(shutil.copytree(trained_workdir.root, tmp_path / "run"))
    file = workdir.checkpoints / "5" / "meta" / "metadata"
    meta = json.loads(file.read_text())
    del meta["config"]["hub"]["language"]
    file.write_text(json.dumps(meta))
    checkpoint_files.write_hashes(workdir.checkpoints, 5)
    with pytest.raises(InputError, match=r"checkpoints/5: has no hub\.language, as if another"):
        export.load_checkpoint(workdir, Entry())


# Classifiers ----------------------------------------------------------------------------------------------------------


def test_a_classifier_is_read_back(classifier_of, trained_classifier):
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
