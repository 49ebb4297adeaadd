"""The export: what lies in the folder, that it is the model, proven by PyTorch too, and what is never overwritten."""

import dataclasses
import json
import pathlib
import re
import shutil
import sys

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, FlaxRobertaForMaskedLM

from mlm import __main__
from mlm import config as configs
from mlm.data import tokenizer
from mlm.errors import DamageError, InputError
from mlm.export import export
from mlm.inference import fill_mask
from mlm.model import weights
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.training.sharding import named_leaves
from mlm.workdir import Workdir
from tests import ROOT
from tests.support.pytorch import run_torch, torch_python
from tests.support.tiny import pretrain, slow, tiny_config
from tests.support.trained_model import facts_of, save_checkpoint

SCORES = {"step": 5, "kind": "eval", "loss": 3.25, "perplexity": 25.79, "accuracy": 0.31, "predictions": 12345}
VERIFY = "mlm/export/verify_export.py"


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory) -> str:
    """Of a model whose tokenizer was trained for longer rows."""
    folder, own = UPath(tmp_path_factory.mktemp("exported") / "export"), tmp_path_factory.mktemp("long") / "tokenizer"
    file = pathlib.Path(shutil.copytree(model.tokenizer, own), "tokenizer_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 8192}))
    export.export(dataclasses.replace(model, tokenizer=str(own)), folder, scores=SCORES, name="small")
    return str(folder)


@pytest.fixture
def copy(exported, tmp_path) -> str:
    return shutil.copytree(exported, tmp_path / "copy")


@pytest.mark.standard
def test_the_folder_is_complete(exported, model):
    names = {path.name for path in UPath(exported).iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "flax_model.msgpack",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "run_config.json",
        "proof.json",
        "proof.safetensors",
    }
    assert not [path for path in UPath(exported).parent.iterdir() if path.name.endswith(".tmp")]
    modes = {path.stat().st_mode for path in UPath(exported).iterdir()}
    assert len(modes) == 1, "a file can be read by fewer people than the others"
    config = json.loads((UPath(exported) / "config.json").read_text())
    assert config["vocab_size"] == 1000, "the vocabulary is the tokenizer's, without the padding of training"
    assert config["architectures"] == ["RobertaForMaskedLM"]
    assert config["max_position_embeddings"] == 32 + 2
    assert json.loads((UPath(exported) / "tokenizer_config.json").read_text())["model_max_length"] == 32
    assert json.loads((UPath(exported) / "run_config.json").read_text())["train"]["steps"] == 5


@pytest.mark.slow
def test_the_averaged_parameters_are_the_model_if_there_are_any(model, tmp_path):
    workdir = Workdir(str(tmp_path / "averaged"))
    config = configs.replace(model.run_config, {"optimizer.ema_decay": 0.9})
    info = facts_of(tokenizer.load(model.tokenizer))
    run = Pretraining(config, info, mesh=sharding.make_mesh(data=-1, fsdp=1, tensor=1))
    state = run.init()
    state = state.replace(ema=jax.tree.map(lambda p: p + 1, state.params))
    save_checkpoint(workdir, config, info, state, 7)
    found = load.from_workdir(workdir, head=load.LM_HEAD)
    assert found.step == 7
    assert np.array_equal(found.params["lm_head"]["bias"], np.ones(1000, np.float32))
    assert not np.array_equal(model.params["lm_head"]["bias"], np.ones(1000, np.float32))


def test_transformers_flax_and_ours_read_the_same_parameters(exported, model):
    ours = dict(named_leaves(load.load(exported, head=load.LM_HEAD).params))
    flax = dict(named_leaves(FlaxRobertaForMaskedLM.from_pretrained(exported).params))
    for name, value in named_leaves(model.params):
        assert np.array_equal(ours[name], value), name
        assert np.array_equal(flax[name], value), name
    assert ours.keys() == flax.keys() == dict(named_leaves(model.params)).keys()


def test_fillings_of_the_folder_are_those_of_the_checkpoint(exported, model):
    tok = tokenizer.load(exported)
    texts = ["The function returns a <mask> of all elements.", "<mask> the <mask> file."]
    ours, theirs = (fill_mask.FillMask(each, tok, 5)(texts) for each in (model, load.load(exported, head=load.LM_HEAD)))
    assert ours == theirs


@pytest.mark.standard
@pytest.mark.parametrize("generation", [slow(4), 5])
def test_pytorch_gives_the_same_ids_logits_and_fillings(exported, generation, tmp_path):
    script = VERIFY
    if generation == 4:  # the modules beside the script must not be taken for installed ones of the same names
        script = shutil.copy(ROOT / VERIFY, tmp_path)
        (tmp_path / "tokenizers.py").write_text("raise AssertionError('not the installed one')")
    lines = run_torch(generation, script, exported).splitlines()
    assert f"transformers {generation}." in lines[0]
    checks = ["ok    weights", "ok    token ids", "ok    logits", "ok    fillings"]
    assert [line.split(":")[0] for line in lines[1:]] == checks


OTHERS = {
    "Bert": ("model.family=bert", "model.layers=2"),
    "RobertaPreLayerNorm": ("model.family=roberta_prelayernorm", "model.layers=2"),
    "ModernBert": (  # both kinds of layers, windows that end within a row, and no value that is transformers' default
        *("model.family=modernbert", "model.layers=3", "model.global_every=2", "model.local_attention=8"),
        *("model.global_rope_theta=9000", "model.local_rope_theta=800"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("one_device")
def test_pytorch_verifies_the_other_families(name, manifest, tokenizer_folder, tmp_path, capsys):
    """Trained for a step, then exported by the command, once for each generation of transformers."""
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(tokenizer_folder, str(workdir.tokenizer))
    settings = ("data.lanes=4", "train.steps=1", "model.positions=32", "model.init_stddev=0.3")
    pretrain(tiny_config(*settings, *OTHERS[name]), workdir, manifest)
    for generation in (4, 5):
        python = torch_python(generation)
        assert __main__.main(["export", f"--workdir={workdir.root}", f"--torch={python}"]) == 0
        printed = capsys.readouterr().err
        for words in (f"transformers {generation}.", f"every parameter of {name}ForMaskedLM is", "ok    fillings"):
            assert words in printed
        difference, largest = re.search(r"ok    logits: .*difference (\S+) \(largest logit (\S+),", printed).groups()
        assert float(difference) < 1e-4 and float(largest) > 1
    assert json.loads((workdir.export / "config.json").read_text())["architectures"] == [f"{name}ForMaskedLM"]


def test_the_proof_exercises_what_can_go_wrong(exported, model):
    proof = json.loads((UPath(exported) / "proof.json").read_text())
    rows = proof["rows"]
    assert max(len(row["ids"]) for row in rows) == model.longest_row, "no row reaches the last position"
    assert len({len(row["ids"]) for row in rows}) > 3, "no padding is exercised"
    assert {len(row["fillings"]) for row in rows} >= {1, 2}
    fillings = {tuple(filling["token"] for filling in mask) for row in rows[:5] for mask in row["fillings"]}
    assert len(fillings) >= 5, "fillings that don't depend on the text prove little"
    texts = [row["text"] for row in rows]
    tok = AutoTokenizer.from_pretrained(exported)
    assert [row["ids"] for row in rows] == tok(texts)["input_ids"]
    logits = load_file(UPath(exported) / "proof.safetensors")
    assert [logits[f"logits.{i}"].shape for i in range(len(rows))] == [(len(row["positions"]), 1000) for row in rows]


def damage_embedding(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["roberta.embeddings.position_embeddings.weight"][20, 3] += 0.02
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def damage_name(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.layernorm.weight"] = tensors.pop("lm_head.layer_norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def damage_tokenizer(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab[10], vocab[11] = vocab[11], vocab[10]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def damage_filling(folder):
    proof = json.loads((folder / "proof.json").read_text())
    mask = proof["rows"][0]["fillings"][0]
    mask[0]["token_str"], mask[1]["token_str"] = mask[1]["token_str"], mask[0]["token_str"]
    (folder / "proof.json").write_text(json.dumps(proof))


def damage_ranks(folder):
    proof = json.loads((folder / "proof.json").read_text())
    mask = proof["rows"][0]["fillings"][0]
    mask[0]["token"], mask[1]["token"] = mask[1]["token"], mask[0]["token"]
    mask[0]["token_str"], mask[1]["token_str"] = mask[1]["token_str"], mask[0]["token_str"]
    (folder / "proof.json").write_text(json.dumps(proof))


def damage_cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


@pytest.mark.slow
def test_pytorch_finds_what_is_not_the_model(exported, tmp_path):
    expected = {
        damage_embedding: "WRONG logits",
        damage_name: "WRONG weights",
        damage_tokenizer: "WRONG token ids",
        damage_filling: "WRONG fillings",
        damage_ranks: "WRONG fillings",
        damage_cut: "WRONG SafetensorError",
    }
    folders = [shutil.copytree(exported, tmp_path / damage.__name__) for damage in expected]
    for damage, folder in zip(expected, folders, strict=True):
        damage(folder)
    results = [json.loads(line) for line in run_torch(5, "tests/pytorch/verify.py", *folders).splitlines()]
    for (damage, words), result in zip(expected.items(), results, strict=True):
        assert result["code"] == 4, damage.__name__
        assert words in result["printed"], damage.__name__


@pytest.mark.standard
def test_a_folder_without_a_proof_is_not_verified(tmp_path):
    run_torch(5, VERIFY, tmp_path, code=2)


def test_the_card(exported):
    _, metadata, body = (UPath(exported) / "README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(metadata)
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "fill-mask"
    assert metadata["mask_token"] == "<mask>"
    for words in ("# small", "| corpus | `docstrings` |", "| steps | 5 |", "3.2500 |", "12,345", "2 layers of 64"):
        assert words in body
    code = body.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")


@pytest.mark.standard
def test_an_earlier_export_is_replaced_and_nothing_else_is(model, copy, tmp_path):
    (copy / "old").write_text("of an earlier export")
    export.export(model, UPath(copy), scores=None, name="again")
    assert not (copy / "old").exists()
    assert "# again" in (copy / "README.md").read_text()

    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="is not an export"):
        export.export(model, UPath(notes), scores=None, name="oops")
    assert (notes / "thesis.txt").read_text() == "years of work"


@pytest.mark.standard
@pytest.mark.parametrize("broken", ["model.safetensors", "flax_model.msgpack", "not a number", "missing"])
def test_damage_on_the_way_is_found_and_the_earlier_export_is_kept(model, copy, monkeypatch, broken):
    """A disk, or a bug in the mapping, that changes a weight by little: each of the two files is read back."""
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    write = export.write_model

    def damaged(model, folder):
        params = jax.tree.map(np.array, model.params)
        params["lm_head"]["bias"][7] = np.nan if broken == "not a number" else params["lm_head"]["bias"][7] + 0.01
        write(dataclasses.replace(model, params=params), folder)
        if broken != "not a number":
            good = "flax_model.msgpack" if broken == "model.safetensors" else "model.safetensors"
            (folder / good).write_bytes(before[good])
        if broken == "missing":
            (folder / "model.safetensors").unlink()

    monkeypatch.setattr(export, "write_model", damaged)
    words = {"missing": "can't be read back", "not a number": "model.safetensors: read back, .* nan"}
    with pytest.raises(DamageError, match=words.get(broken, f"{broken}: read back, its logits differ")):
        export.export(model, UPath(copy), scores=None, name="small")
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
    assert [path.name for path in copy.parent.iterdir()] == ["copy"], "a temporary folder was left"


@pytest.mark.slow
def test_what_pytorch_refuses_is_not_exported(model, tmp_path, monkeypatch):
    """A wrong position offset that both of our own readers share is found by PyTorch alone."""
    monkeypatch.setattr(
        "mlm.model.module.position_ids", lambda attention, first: jax.numpy.cumsum(attention, -1) + first
    )
    monkeypatch.setattr(export, "check_files", lambda *_: None)
    with pytest.raises(DamageError, match=r"not proven .*WRONG logits"):
        export.export(model, UPath(tmp_path / "new"), scores=None, name="x", torch_python=torch_python(4))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.standard
def test_a_python_without_torch_or_none_at_all_is_named(model, tmp_path):
    for python, words in (
        ("/no/such/python", "can't be run"),
        (sys.executable, "lacks a package: No module named 'torch'"),
    ):
        with pytest.raises(InputError, match=words):
            export.export(model, UPath(tmp_path / "new"), scores=None, name="x", torch_python=python)
        assert list(tmp_path.iterdir()) == []


def test_a_kill_between_the_two_renames_loses_nothing(model, copy, monkeypatch):
    """The earlier export is put back by the next attempt, even if that one fails."""
    hidden = copy.parent / ".copy.tmp"
    (hidden / "new").mkdir(parents=True)
    copy.rename(hidden / "old")
    monkeypatch.setattr(export, "write_model", lambda *_: (_ for _ in ()).throw(DamageError("fails")))
    with pytest.raises(DamageError):
        export.export(model, UPath(copy), scores=None, name="small")
    assert (copy / "proof.json").is_file()
    assert not hidden.exists()


@pytest.mark.standard
def test_remote_folders_are_written_with_the_proof_last(model, exported):
    folder = UPath("memory://bucket/run/export")
    export.export(model, folder, scores=SCORES, name="small")
    names = [path.name for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)]
    assert names[-1] == "proof.json"
    assert sorted(names) == sorted(path.name for path in UPath(exported).iterdir())
    assert (folder / "model.safetensors").read_bytes() == (UPath(exported) / "model.safetensors").read_bytes()
    export.export(model, folder, scores=None, name="again")
    assert "# again" in (folder / "README.md").read_text()


def test_an_export_can_be_exported(exported, tmp_path):
    """From a folder, whoever wrote it: the same weights, a card that claims no recipe."""
    export.export(load.load(exported, head=load.LM_HEAD), UPath(tmp_path / "new"), scores=None, name="copy")
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == (UPath(exported) / "model.safetensors").read_bytes()
    assert "its recipe is not known" in (tmp_path / "new" / "README.md").read_text()
    assert not (tmp_path / "new" / "run_config.json").exists()


def test_names_and_layout_are_pytorch_s(exported):
    tensors = load_file(UPath(exported) / "model.safetensors")
    assert tensors["roberta.encoder.layer.0.intermediate.dense.weight"].shape == (64, 64)
    assert "lm_head.decoder.weight" not in tensors
    back = weights.to_torch(weights.from_torch(tensors))
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)
