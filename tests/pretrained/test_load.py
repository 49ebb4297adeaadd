"""The one loader: every layout gives the same parameters, whoever asks; nothing in a folder is executed or followed
out of it, or ends in a traceback."""

import json
import pathlib
import re
import shutil
from collections.abc import Callable

import jax
import numpy as np
import pytest
from flax.serialization import msgpack_restore, msgpack_serialize
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.export import export
from mlm.model import weights
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files, load, locate
from mlm.workdir import Workdir
from tests.support import trained_model
from tests.support.refusals import refuse


@pytest.fixture
def folder(model, tmp_path) -> pathlib.Path:
    return trained_model.write_folder(model, tmp_path / "model")


def change(file: pathlib.Path, **keys) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | keys))


def assert_same(leaves: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert leaves.keys() == wanted.keys()
    assert [name for name, value in leaves.items() if not np.array_equal(value, wanted[name])] == []


READERS = {"--model=": load.LM_HEAD, load.INIT_FROM: None}  # what a model is named with, and the head that it must have


Tensors = dict[str, np.ndarray]


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {change(name): value for name, value in tensors.items()}


LAYOUTS = {  # the same model, as transformers, torch.compile, DataParallel and modules around it have saved it
    "tied bias": renamed(lambda name: name.replace("lm_head.bias", "lm_head.decoder.bias")),
    "another vocabulary": lambda tensors: (
        tensors  # the head's own bias is of it, the decoder's is the model's
        | {"lm_head.decoder.bias": tensors["lm_head.bias"], "lm_head.bias": np.pad(tensors["lm_head.bias"], (0, 4))}
    ),
    "compiled and parallel": renamed(lambda name: f"_orig_mod.module.{name}"),
    "layers compiled": renamed(lambda name: name.replace(".layer.1.", ".layer.1._orig_mod.")),
    "an attribute of an attribute": renamed(lambda name: f"net.backbone.{name}"),
    "old names": renamed(lambda name: re.sub("(LayerNorm|norm).weight", r"\1.gamma", name).replace("m.bias", "m.beta")),
    "pooler": lambda tensors: tensors | {"roberta.pooler.dense.weight": np.ones((64, 64), np.float32)},
}
HEADLESS = {
    "without a head": lambda tensors: {n: value for n, value in tensors.items() if not n.startswith("lm_head")},
    "encoder alone": lambda tensors: {
        name.removeprefix("roberta."): value for name, value in tensors.items() if name.startswith("roberta.")
    },
}


def change_tensors(folder: pathlib.Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(folder / locate.SAFETENSORS)), folder / locate.SAFETENSORS)


def split_safetensors(folder: pathlib.Path, factor: float = 1) -> None:
    tensors = load_file(folder / locate.SAFETENSORS)
    parts = {name: f"model-0000{1 + ('layer.1' in name)}-of-00002.safetensors" for name in tensors}
    for part in set(parts.values()):
        save_file({name: factor * tensors[name] for name in tensors if parts[name] == part}, folder / part)
    (folder / locate.SAFETENSORS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": parts}))


def split_msgpack(folder: pathlib.Path, factor: float = 1) -> None:
    """As transformers' Flax classes save a model in several files."""
    params = flatten_dict(msgpack_restore((folder / locate.MSGPACK).read_bytes()), sep="/")
    parts = {name: f"flax_model-0000{1 + ('layer/1' in name)}-of-00002.msgpack" for name in params}
    for part in set(parts.values()):
        kept = {name: factor * params[name] for name in params if parts[name] == part}
        (folder / part).write_bytes(msgpack_serialize(kept))
    (folder / locate.MSGPACK_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": parts}))


def one_msgpack(folder: pathlib.Path, factor: float = 1) -> None:
    params = msgpack_restore((folder / locate.MSGPACK).read_bytes())
    (folder / locate.MSGPACK).write_bytes(msgpack_serialize(jax.tree.map(lambda x: factor * x, params)))


def pickle(folder: pathlib.Path, factor: float = 1) -> None:
    (folder / locate.PICKLES[0]).write_bytes(b"what PyTorch has saved")


KINDS = {  # in transformers' order: what writes the weights, times a factor, beside those that come before
    locate.SAFETENSORS: lambda folder, factor=1: None,
    locate.SAFETENSORS_INDEX: split_safetensors,
    locate.PICKLES[0]: pickle,
    locate.MSGPACK: one_msgpack,
    locate.MSGPACK_INDEX: split_msgpack,
}


@pytest.mark.parametrize("kind", KINDS)
def test_of_several_kinds_of_weights_those_are_read_that_transformers_reads(folder, model, kind):
    """The others are three times as large, as of an earlier save; each alone is read, too, but for a pickle."""
    order = list(KINDS)
    for later in order[order.index(kind) + 1 :][::-1]:
        KINDS[later](folder, 3)
    if kind == locate.MSGPACK:  # as it was
        export.write_model(model, folder)
    KINDS[kind](folder)
    for earlier in order[: order.index(kind)]:
        (folder / earlier).unlink(missing_ok=True)
    for flag, head in READERS.items():
        if kind in locate.PICKLES:
            with pytest.raises(InputError, match=f"^{flag}{folder}: .*{kind}, a pickle"):
                load.load(str(folder), head=head, flag=flag)
        else:
            assert_same(load.load(str(folder), head=head, flag=flag).leaves, model.leaves)
    if kind == locate.SAFETENSORS:  # not even the parts of what does not count are needed
        for part in folder.glob("*-of-*"):
            part.unlink()
        assert_same(load.load(str(folder), head=None).leaves, model.leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_parameters(folder, model, layout):
    change_tensors(folder, LAYOUTS[layout])
    for flag, head in READERS.items():
        found = load.load(str(folder), head=head, flag=flag)
        assert_same({name: value for name, value in found.leaves.items() if "pooler" not in name}, model.leaves)
        assert ("roberta/pooler/dense/kernel" in found.leaves) == (layout == "pooler" and head is None)
        assert found.tokenizer == str(folder) and found.source == str(folder) and found.step is None


def test_a_bert_s_head_for_the_next_sentence_is_not_read():
    assert weights.from_torch({"cls.seq_relationship.weight": np.ones((2, 64), np.float32)}) == {}


@pytest.mark.parametrize("layout", HEADLESS)
def test_a_model_without_a_head_is_only_a_start(folder, model, layout):
    change_tensors(folder, HEADLESS[layout])
    found = load.load(str(folder), head=None)
    assert_same(found.leaves, {name: value for name, value in model.leaves.items() if name.startswith("roberta/")})
    with pytest.raises(InputError, match=f"^--model={folder}: .*language-model head"):
        load.load(str(folder), head=load.LM_HEAD)


def test_a_workdir_by_its_name(trained_workdir, model, tmp_path):
    name = str(trained_workdir.root)
    for flag, head in READERS.items():
        found = load.load(name, head=head, flag=flag)
        assert found.source == name and found.step == 5 and found.tokenizer == str(trained_workdir.tokenizer)
        assert_same(found.leaves, model.leaves)
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=f"^{flag}{tmp_path}: .*no complete checkpoint"):
            load.load(str(tmp_path), head=head, flag=flag)
    with pytest.raises(InputError, match=r"checkpoints: .* no classification head"):
        load.from_workdir(trained_workdir, head=load.CLASSIFIER)


@pytest.mark.parametrize(
    "place", [(checkpoint_files, "_sha256"), (checkpoint_files.json, "loads"), (load.ocp, "PyTreeCheckpointHandler")]
)
def test_a_step_that_a_run_removes_while_it_is_read(place, trained_workdir, tmp_path, monkeypatch):
    """While its hashes are compared, its metadata is read, or its state: neither damage nor a traceback."""
    shutil.copytree(trained_workdir.root, tmp_path / "run")
    workdir, (module, name) = Workdir(str(tmp_path / "run")), place
    (step,) = checkpoint_files.complete_steps(workdir.checkpoints)
    read = getattr(module, name)

    def removed(*args):
        shutil.rmtree(workdir.checkpoints / str(step), ignore_errors=True)
        return read(*args)

    monkeypatch.setattr(module, name, removed)
    with pytest.raises(InputError, match=f"{step}: was removed while it was read"):
        load.from_workdir(workdir, head=load.LM_HEAD)


def test_a_folder_in_a_bucket(folder, model):
    bucket = UPath("memory://models/small")
    (bucket / "notes").mkdir(parents=True)
    (bucket / "notes" / "text").write_text("x")
    for flag, head in READERS.items():
        with pytest.raises(InputError, match=rf"^{flag}{bucket}: .*config\.json"):
            load.load(str(bucket), head=head, flag=flag)
    for file in folder.iterdir():
        (bucket / file.name).write_bytes(file.read_bytes())
    for flag, head in READERS.items():
        found = load.load(str(bucket), head=head, flag=flag)
        assert_same(found.leaves, model.leaves)
        assert len(tokenizer.load(found.tokenizer)) == 1000


def test_a_checkpoint_of_an_older_version_is_refused(trained_workdir, tmp_path):
    workdir = Workdir(shutil.copytree(trained_workdir.root, tmp_path / "run"))
    file = workdir.checkpoints / "5" / "meta" / "metadata"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"format": 1}))
    checkpoint_files.write_hashes(workdir.checkpoints, 5)
    with pytest.raises(InputError, match=rf"checkpoints/5: .*format is 1, .* {checkpoint_files.FORMAT};"):
        load.from_workdir(workdir, head=load.LM_HEAD)


def test_a_name_in_the_cache_of_the_hub_is_found_offline(model, tmp_path, monkeypatch):
    snapshot = trained_model.publish(model, "someone/small", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for flag, head in READERS.items():
        found = load.load("someone/small", head=head, flag=flag)
        assert found.source == "someone/small" and found.tokenizer == str(snapshot)
        assert_same(found.leaves, model.leaves)


def test_code_in_a_folder_is_not_run(folder, tmp_path, monkeypatch):
    """Neither with a question at the terminal nor without: no one is asked."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    change(folder / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForMaskedLM": "own.Own"})
    own = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    change(folder / "tokenizer_config.json", **own)
    with pytest.raises(InputError, match=str(folder)):
        load.load(str(folder), head=load.LM_HEAD)
    assert not (tmp_path / "ran").exists()


def test_what_has_no_tokenizer(trained_workdir, folder, tmp_path, capsys):
    """Of a run the shards were made elsewhere: what is missing is said, not what a Hub's name looks like."""
    run = tmp_path / "run"
    shutil.copytree(trained_workdir.checkpoints, run / "checkpoints")
    for arguments in (["predict", f"--workdir={run}", "a <mask>"], ["export", f"--workdir={run}"]):
        assert "Repo id" not in refuse(arguments, 2, f"{run}/tokenizer: ", "shards", capsys=capsys)
    for file in (*folder.glob("*token*.json"), *folder.glob("vocab.*")):
        file.unlink()
    refuse(["predict", f"--model={folder}", "a <mask>"], 2, "tokenizer.json", str(folder), capsys=capsys)


def test_a_pickle_is_not_opened(folder, tmp_path):
    """Whatever it is called; unpickled, it would make a folder."""
    (folder / locate.SAFETENSORS).write_bytes(f"cos\nmkdir\n(V{tmp_path / 'ran'}\ntR.".encode())
    with pytest.raises(InputError, match=f"^--model={folder}: .*can't be read"):
        load.load(str(folder), head=load.LM_HEAD)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("reader", ["predict", "init_from", "classifier"])
def test_a_padding_id_that_means_another_token_is_refused(folder, trained_classifier, tmp_path, reader):
    """transformers gives that token the position of padding; of a BERT no position depends on it."""
    if reader == "classifier":
        folder = trained_model.write_folder(trained_classifier, tmp_path / "classifier")
    head = {"predict": load.LM_HEAD, "init_from": None, "classifier": load.CLASSIFIER}[reader]
    pad_id = json.loads((folder / "config.json").read_text())["pad_token_id"]
    table = json.loads((folder / "tokenizer_config.json").read_text())
    change(folder / "tokenizer_config.json", pad_token=table["unk_token"], unk_token=table["pad_token"])
    with pytest.raises(
        InputError, match=f"pad_token_id = {pad_id}, which .* {table['pad_token']}; .* {table['unk_token']}"
    ):
        load.load(str(folder), head=head)


def without(part: str) -> Callable[[pathlib.Path], None]:
    return lambda folder: change_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if part not in n})


def index_of(file: str) -> Callable[[pathlib.Path], object]:
    def replace(folder: pathlib.Path) -> None:
        (folder / locate.SAFETENSORS).unlink()
        (folder / locate.SAFETENSORS_INDEX).write_text(json.dumps({"weight_map": {"roberta.x": file}}))

    return replace


def cut(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-50])


def part_missing(folder: pathlib.Path) -> None:
    split_safetensors(folder)
    (folder / locate.SAFETENSORS).unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()


def beside(prefix: str, others: Callable[[Tensors], Tensors]) -> Callable[[pathlib.Path], None]:
    return lambda folder: change_tensors(
        folder, lambda tensors: others(tensors) | {prefix + name: tensor for name, tensor in tensors.items()}
    )


FAULTS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "untied": (lambda folder: change(folder / "config.json", tie_word_embeddings=False), "not tied"),
    "torn": (cut, "weights can't be read"),
    "a layer less": (without(".layer.1."), "1 layers where config.json asks for 2"),
    "a norm less": (without(".embeddings.LayerNorm."), "roberta/embeddings/LayerNorm/bias is None"),
    "another prefix": (beside("net.backbone.", lambda _: {"classifier.weight": np.ones((2, 64))}), "classifier/kernel"),
    "a name twice": (beside("_orig_mod.", dict), "lm_head.bias"),
    "a part missing": (part_missing, "model-00002-of-00002.safetensors"),
    "a file of the system": (index_of("/etc/hostname"), "'/etc/hostname' is not the name of a file"),
    "a file outside": (index_of("../model/model.safetensors"), "not the name of a file inside"),
    "a number": (index_of(4), "weights can't be read (4"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_folders_that_are_no_model_are_refused(folder, fault):
    break_folder, words = FAULTS[fault]
    break_folder(folder)
    for flag, head in READERS.items():
        with pytest.raises(InputError) as error:
            load.load(str(folder), head=head, flag=flag)
        assert str(error.value).startswith(f"{flag}{folder}: ")
        assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["someone/no-such-model", "no such folder"])
def test_a_name_that_is_nowhere_is_told_in_a_sentence(name):
    for flag, head in READERS.items():
        with pytest.raises(InputError, match=f"^{flag}{name}: .*Hub") as error:
            load.load(name, head=head, flag=flag)
        assert "\n" not in str(error.value)
