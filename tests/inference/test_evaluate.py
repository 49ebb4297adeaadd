"""Scores of a masked language model: a checkpoint and a folder, and the file beside the model that loses nothing."""

import dataclasses
import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlm import config as configs
from mlm.commands import common
from mlm.errors import InputError
from mlm.export import export
from mlm.inference import evaluate
from mlm.inference.evaluate import Extras
from mlm.model.attention import make_attention
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.workdir import Workdir
from tests.support.corpora import stdlib_docstrings, write_shards
from tests.support.tiny import tiny_config
from tests.support.trained_model import train_tokenizer

SIZES = ("model.positions=32", "model.layers=2", "model.hidden_size=64", "shards.count=8", "data.lanes=4")


@pytest.fixture(scope="module")
def setting(trained_workdir, tmp_path_factory):
    """A workdir with shards of its own tokenizer, its config and its manifest."""
    workdir = Workdir(shutil.copytree(trained_workdir.root, tmp_path_factory.mktemp("evaluate") / "run"))
    write_shards(stdlib_docstrings()[:600], workdir.shards, str(workdir.tokenizer))
    config = tiny_config(*SIZES)
    workdir.config.write_text(config.to_json())
    return config, workdir, common.open_data(config, workdir)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> str:
    folder = UPath(tmp_path_factory.mktemp("evaluate") / "export")
    export.export(model, folder, scores=None, name="small")
    return str(folder)


def results(folder) -> dict:
    return json.loads((pathlib.Path(str(folder)) / "evaluation.json").read_text())


@pytest.mark.slow
def test_a_checkpoint_and_its_export_score_the_same_and_both_write_it_down(setting, folder, capsys):
    config, workdir, manifest = setting
    ours = evaluate.run(config, workdir, manifest, model="", split="validation", extras=Extras(pseudo=3))
    out, err = capsys.readouterr()
    assert json.loads(out) == ours
    assert ours["pseudo_rows"] == 3 and ours["pseudo_tokens"] > 60
    for words in ("on validation", f"{ours['loss']:.4f} nats", "bits per byte", "of 3 rows, each masked alone"):
        assert words in err
    theirs = evaluate.run(config, workdir, manifest, model=folder, split="validation", extras=Extras(pseudo=3))
    for key in ("loss", "perplexity", "accuracy", "bits_per_byte", "predictions", "pseudo_perplexity", "pseudo_loss"):
        assert theirs[key] == pytest.approx(ours[key], rel=1e-5), key
    data = manifest.fingerprint[:12]
    masked, pseudo = results(workdir.root)
    assert masked == f"validation, token masks 0.2 0.8/0.1 seed 0, step 5, data {data}"
    assert pseudo == f"validation, pseudo-perplexity of 3 rows, step 5, data {data}"
    assert results(workdir.root)[masked]["loss"] == ours["loss"]
    assert results(workdir.root)[pseudo]["pseudo_loss"] == ours["pseudo_loss"]
    assert all(", weights " in key for key in results(folder))


@pytest.mark.standard
def test_models_of_every_kind_are_scored(setting, folder, trained_workdir, tmp_path, monkeypatch, capsys):
    """Another workdir, Flax's weights alone, a name on the hub: what is measured is written beside the model."""
    config, workdir, manifest = setting
    wanted = evaluate.run(config, workdir, manifest, model="", split="validation")["loss"]
    other = pathlib.Path(shutil.copytree(trained_workdir.root, tmp_path / "other"))
    flax = pathlib.Path(shutil.copytree(folder, tmp_path / "flax", ignore=shutil.ignore_patterns("evaluation.json")))
    (flax / "model.safetensors").unlink()
    snapshot = tmp_path / "models--someone--small" / "snapshots" / "0"
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for model, place in ((str(other), other), (str(flax), flax), ("someone/small", workdir.root)):
        found = evaluate.run(config, workdir, manifest, model=model, split="validation")
        assert found["loss"] == pytest.approx(wanted, rel=1e-5) and found["model"] == model
        assert any(values["model"] == model for values in results(place).values())
    (workdir.root / "evaluation.json").unlink()
    bare = load_file(flax.parent / "models--someone--small/snapshots/0/model.safetensors")
    save_file({n: t for n, t in bare.items() if not n.startswith("lm_head")}, flax / "model.safetensors")
    with pytest.raises(InputError, match=r"^--model=.*flax: has no language-model head; name a model with one\.$"):
        evaluate.run(config, workdir, manifest, model=str(flax), split="validation")


@pytest.mark.slow
def test_a_model_of_another_family_than_the_config_s_is_scored_as_it_is(setting, folder, modernbert_folder):
    config, workdir, manifest = setting
    found = evaluate.run(config, workdir, manifest, model=modernbert_folder, split="validation")
    assert found["loss"] == pytest.approx(np.log(1000), abs=0.3)
    wanted = evaluate.run(config, workdir, manifest, model="", split="validation")["loss"]
    config = tiny_config(*SIZES, "model.family=modernbert")
    found = evaluate.run(config, workdir, manifest, model=folder, split="validation")
    assert found["loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.standard
def test_the_kernel_is_the_fastest_for_the_rows_and_the_devices(setting, modernbert_folder, monkeypatch):
    config, workdir, manifest = setting
    config, asked = tiny_config(*SIZES, "data.isolate_documents=true"), []

    def record(name, *config, **settings):
        asked.append((name, settings["window"], settings["length"], settings["dtype"], settings["isolated"]))
        return make_attention("xla", *config, **settings)

    monkeypatch.setattr(evaluate, "make_attention", record, raising=False)
    evaluate.run(config, workdir, manifest, model=modernbert_folder, split="validation")
    whole, window = sorted(one[1] for one in asked)
    assert whole == 0 < window and {own[2:] for own in asked} == {(32, "float32", True)}
    assert {own[0] for own in asked} == {"auto"}, "the config's kernel may not support another model"


@pytest.mark.standard
def test_each_kind_of_mask_has_scores_of_its_own(setting, capsys):
    config, workdir, manifest = setting
    found = evaluate.run(
        config, workdir, manifest, model="", split="validation", extras=Extras(masks=["span", "word", "token"])
    )
    assert list(found["masks"]) == ["token", "span", "word"], "the run's own first, none twice"
    assert found["loss"] == found["masks"]["token"]["loss"]
    assert len({scores["loss"] for scores in found["masks"].values()}) == 3
    trained_alike = tiny_config(*SIZES, "masking.kind=word")
    alone = evaluate.run(trained_alike, workdir, manifest, model="", split="validation")
    assert alone["loss"] == found["masks"]["word"]["loss"]
    assert "span masks: loss" in capsys.readouterr().err
    assert any(
        key.startswith("validation, span masks 0.2 0.8/0.1 seed 0 longest 10 p 0.2") for key in results(workdir.root)
    )


@pytest.mark.standard
def test_bfloat16_is_compared_with_float32_when_asked(setting, capsys):
    config, workdir, manifest = setting
    found = evaluate.run(config, workdir, manifest, model="", split="validation", extras=Extras(dtypes=True))
    out, err = capsys.readouterr()
    assert json.loads(out) == found
    both = found["dtypes"]
    assert both["float32"] == {key: pytest.approx(found[key], rel=1e-5) for key in ("loss", "accuracy")}
    assert both["predictions"] == found["predictions"] and both["rows"] == manifest.splits["validation"].records
    bfloat16 = configs.replace(config, {"model.dtype": "bfloat16"})
    alone = evaluate.run(bfloat16, workdir, manifest, model="", split="validation")
    assert both["bfloat16"] == {key: pytest.approx(alone[key], abs=1e-3) for key in ("loss", "accuracy")}
    assert both["loss_difference"] == both["bfloat16"]["loss"] - both["float32"]["loss"]
    assert 0 < both["largest_logit_difference"] < 1 and 0 < both["largest_loss_difference"] < 1
    assert 0.9 < both["same_prediction"] <= 1
    assert f"{both['same_prediction']:.2%}" in err and f"{both['largest_logit_difference']:.3f}" in err


def test_the_breakdown_is_printed_and_kept_beside_the_scores(setting, capsys):
    config, workdir, manifest = setting
    (workdir.root / "evaluation.json").unlink(missing_ok=True)  # of an earlier test
    found = evaluate.run(
        config, workdir, manifest, model="", split="validation", extras=Extras(masks=["span"], breakdown=True)
    )
    out, err = capsys.readouterr()
    assert json.loads(out) == found
    assert found["by_position"] == found["masks"]["token"]["by_position"] != found["masks"]["span"]["by_position"]
    line = found["masks"]["span"]["by_copy_distance"]["no copy"]
    assert f"no copy {line['predictions']:,} {line['loss']:.4f}" in " ".join(err.split())
    for head in ("token masks: position in the row", "span masks: distance of the nearest copy"):
        assert head in err
    plain, tables, *_ = kept = results(workdir.root)
    assert len(kept) == 4 and tables.startswith("validation, by position and copy distance, token masks 0.2")
    assert kept[plain]["loss"] == found["loss"] and "by_position" not in kept[plain]
    assert kept[tables]["by_copy_distance"] == found["by_copy_distance"]
    evaluate.run(config, workdir, manifest, model="", split="validation")
    assert results(workdir.root) == kept, "the plain scores alone leave the tables"
    long = dataclasses.replace(manifest, length=40_000)
    with pytest.raises(InputError, match=r"^--breakdown: .*32,768 tokens.* 40,000"):
        evaluate.run(config, workdir, long, model="", split="validation", extras=Extras(breakdown=True))


@pytest.mark.slow
def test_no_earlier_result_is_lost(setting, capsys):
    config, workdir, manifest = setting
    file = pathlib.Path(str(workdir.root)) / "evaluation.json"
    file.write_text('{"by hand": {"loss": 1.0}}')
    evaluate.run(config, workdir, manifest, model="", split="validation")
    evaluate.run(config, workdir, manifest, model="", split="train")
    evaluate.run(tiny_config(*SIZES, "masking.rate=0.4"), workdir, manifest, model="", split="validation")
    found = results(workdir.root)
    assert found["by hand"] == {"loss": 1.0}
    assert len(found) == 4
    assert len({values["loss"] for values in found.values()}) == 4, "four settings, four losses"
    evaluate.run(config, workdir, manifest, model="", split="validation")
    assert results(workdir.root) == found, "the same setting gives the same entry"
    file.write_text("{torn")
    capsys.readouterr()
    evaluate.add_results("", workdir, {"new": {"loss": 1.0}})
    assert "the scores were not written: " in (said := capsys.readouterr().err) and "is not a JSON object" in said
    assert file.read_text() == "{torn"
    file.unlink()


def test_a_folder_that_can_not_be_written_is_said_and_the_scores_are_printed(setting, capsys):
    config, workdir, manifest = setting
    (workdir.root / "evaluation.json").unlink(missing_ok=True)  # of an earlier test
    (workdir.root / "evaluation.json").mkdir()  # the user of a test may write anywhere else
    scores = evaluate.run(config, workdir, manifest, model="", split="validation")
    out, err = capsys.readouterr()
    assert json.loads(out) == scores
    (sentence,) = (line for line in err.splitlines() if "not written" in line)
    assert "evaluation.json" in sentence
    (workdir.root / "evaluation.json").rmdir()


def test_results_in_a_bucket_and_values_that_are_not_finite():
    folder = UPath("memory://bucket/scored")
    place = types.SimpleNamespace(root=folder)  # a workdir there
    evaluate.add_results("", place, {"a": {"loss": 1.5, "model": "x"}})
    evaluate.add_results("", place, {"b": {"loss": float("nan"), "by_position": {"1": {"loss": float("inf")}}}})
    assert json.loads((folder / "evaluation.json").read_text()) == {
        "a": {"loss": 1.5, "model": "x"},
        "b": {"loss": None, "by_position": {"1": {"loss": None}}},
    }


@pytest.mark.standard
def test_what_does_not_fit_is_refused(setting, model, tmp_path):
    config, workdir, manifest = setting
    score = lambda folder, **kw: evaluate.run(config, workdir, manifest, model=folder, **{"split": "validation"} | kw)  # noqa: E731
    with pytest.raises(InputError, match=r"--split=test: the shards in .* hold no records"):
        score("", split="test")
    with pytest.raises(InputError, match="--pseudo=-1: must be"):
        score("", extras=Extras(pseudo=-1))
    other = dataclasses.replace(model, tokenizer=train_tokenizer(tmp_path / "tokenizer", "bpe"))
    export.export(other, UPath(tmp_path / "other"), scores=None, name="other")
    with pytest.raises(InputError, match=r"other: its tokenizer gives other ids than .*tokenizer"):
        score(str(tmp_path / "other"))
    params = jax.tree.map(np.array, model.params)
    table = params["roberta"]["embeddings"]["position_embeddings"]
    table["embedding"] = table["embedding"][:18]
    short = dataclasses.replace(model, params=params, config=type(model.config).from_dict(model.config.to_dict()))
    short.config.max_position_embeddings = 18
    export.write_model(short, pathlib.Path(shutil.copytree(model.tokenizer, tmp_path / "short")))
    assert load.load(str(tmp_path / "short"), head=load.LM_HEAD)
    with pytest.raises(InputError, match=r"short: reads at most 16 tokens, the rows of the shards in .* have 32"):
        score(str(tmp_path / "short"))
