"""The one loader: every layout gives the same parameters, whoever asks; nothing in a folder is executed or followed
out of it, or ends in a traceback."""

import json
import pathlib
import re
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.model import weights
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files, load, locate
from mlm.workdir import Workdir
from tests.support import trained_model
from tests.support.refusals import refuse
from tests.support.states import edit_meta

# what a model is named with, and the head that it must have
READERS = {"--model=": load.LM_HEAD, load.INIT_FROM: None}
Tensors = dict[str, np.ndarray]


@pytest.fixture
def folder(model, tmp_path) -> pathlib.Path:
    folder = trained_model.write_folder(model, tmp_path / "model")
    (folder / locate.MSGPACK).unlink()
    return folder


def read(name: str | pathlib.Path, head=load.LM_HEAD, flag: str = "--model=") -> load.Pretrained:
    return load.load(str(name), head=head, flag=flag)


def change(file: pathlib.Path, **keys) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def assert_same(leaves: Tensors, wanted: Tensors) -> None:
    assert leaves.keys() == wanted.keys()
    assert [name for name, value in leaves.items() if not np.array_equal(value, wanted[name])] == []


def change_tensors(folder: pathlib.Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(folder / locate.SAFETENSORS)), folder / locate.SAFETENSORS)


def write_weights(folder: pathlib.Path, kind: str, leaves: Tensors) -> None:
    """Writes one of transformers' kinds of weights: safetensors, a pickle, or Flax's, or an index with one part."""
    name = kind.removesuffix(".index.json")
    file = folder / (name if name == kind else f"part-{name}")
    tree = unflatten_dict(leaves, sep="/")
    if kind in locate.PICKLES:
        file.write_bytes(b"what PyTorch has saved")
    elif name == locate.SAFETENSORS:
        save_file(weights.to_torch(tree), file)
    else:
        file.write_bytes(msgpack_serialize(tree if name == kind else leaves))
    if name != kind:
        (folder / kind).write_text(json.dumps({"weight_map": {"every tensor": file.name}}))


ORDER = [  # in which transformers looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "flax_model.msgpack",
    "flax_model.msgpack.index.json",
]


@pytest.mark.parametrize("kind", ORDER)
def test_of_several_kinds_of_weights_those_are_read_that_transformers_reads(folder, model, kind):
    """The others are three times as large, as of an earlier save, and their parts need not be there."""
    (folder / locate.SAFETENSORS).unlink()
    for other in ORDER[ORDER.index(kind) + 1 :]:
        write_weights(folder, other, {name: 3 * value for name, value in model.leaves.items()})
    for part in folder.glob("part-*"):
        part.unlink()
    write_weights(folder, kind, model.leaves)
    for flag, head in READERS.items():
        if kind in locate.PICKLES:
            with pytest.raises(InputError, match=f"^{flag}{folder}: .*{kind}, a pickle"):
                read(folder, head, flag)
        else:
            assert_same(read(folder, head, flag).leaves, model.leaves)


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {change(name): value for name, value in tensors.items()}


# the same model, as transformers of today and of old have saved it
LAYOUTS = {
    "tied bias": renamed(lambda name: name.replace("lm_head.bias", "lm_head.decoder.bias")),
    "another vocabulary": lambda tensors: (
        tensors  # the head's own bias is of it, the decoder's is the model's
        | {
            "lm_head.decoder.bias": tensors["lm_head.bias"],
            "lm_head.bias": np.pad(tensors["lm_head.bias"], (0, 4)),
        }
    ),
    "old names": renamed(
        lambda name: re.sub("(LayerNorm|norm).weight", r"\1.gamma", name).replace(
            "m.bias", "m.beta"
        )
    ),
    "pooler": lambda tensors: (
        tensors | {"roberta.pooler.dense.weight": np.ones((64, 64), np.float32)}
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_parameters(folder, model, layout):
    change_tensors(folder, LAYOUTS[layout])
    for flag, head in READERS.items():
        found = read(folder, head, flag)
        assert_same(
            {name: value for name, value in found.leaves.items() if "pooler" not in name},
            model.leaves,
        )
        assert ("roberta/pooler/dense/kernel" in found.leaves) == (
            layout == "pooler" and head is None
        )
        assert found.tokenizer == str(folder) and found.source == str(folder) and found.step is None


@pytest.mark.parametrize("prefix", ["roberta.", ""])
def test_a_model_without_a_head_is_only_a_start(folder, model, prefix):
    def body(tensors: Tensors) -> Tensors:
        names = (name for name in tensors if name.startswith("roberta."))
        return {prefix + name.removeprefix("roberta."): tensors[name] for name in names}

    change_tensors(folder, body)
    found = read(folder, None)
    assert_same(
        found.leaves,
        {name: value for name, value in model.leaves.items() if name.startswith("roberta/")},
    )
    with pytest.raises(InputError, match=f"^--model={folder}: .*language-model head"):
        read(folder)


def test_a_workdir_by_its_name(trained_workdir, model, tmp_path):
    name = str(trained_workdir.root)
    for flag, head in READERS.items():
        found = read(name, head, flag)
        assert (found.source, found.step) == (name, 5)
        assert found.tokenizer == str(trained_workdir.tokenizer)
        assert_same(found.leaves, model.leaves)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match=f"^--model={tmp_path}: .*no complete checkpoint"):
        read(tmp_path)
    with pytest.raises(InputError, match=r"checkpoints: .* no classification head"):
        load.from_workdir(trained_workdir, head=load.CLASSIFIER)


def test_a_step_that_a_run_removes_while_it_is_read(trained_workdir, tmp_path, monkeypatch):
    """Neither damage nor a traceback."""
    workdir = Workdir(shutil.copytree(trained_workdir.root, tmp_path / "run"))
    read = load.ocp.PyTreeCheckpointHandler

    def removed(*args):
        shutil.rmtree(workdir.checkpoints / "5")
        return read(*args)

    monkeypatch.setattr(load.ocp, "PyTreeCheckpointHandler", removed)
    with pytest.raises(InputError, match="5: was removed while it was read"):
        load.from_workdir(workdir, head=load.LM_HEAD)


def test_a_checkpoint_of_an_older_version_is_refused(trained_workdir, tmp_path):
    workdir = Workdir(shutil.copytree(trained_workdir.root, tmp_path / "run"))
    edit_meta(workdir.checkpoints, 5, format=1)
    with pytest.raises(
        InputError, match=rf"checkpoints/5: .*format is 1, .* {checkpoint_files.FORMAT};"
    ):
        load.from_workdir(workdir, head=load.LM_HEAD)


def test_a_folder_in_a_bucket_and_a_name_in_the_cache_of_the_hub(
    folder, model, tmp_path, monkeypatch
):
    bucket = UPath("memory://models/small")
    for file in folder.iterdir():
        (bucket / file.name).write_bytes(file.read_bytes())
    trained_model.publish(model, "someone/small", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in (str(bucket), "someone/small"):
        found = read(name)
        assert_same(found.leaves, model.leaves)
        assert found.source == name and len(tokenizer.load(found.tokenizer)) == 1000


def test_code_in_a_folder_is_not_run(folder, tmp_path, monkeypatch):
    """Neither with a question at the terminal nor without. A pickle, unpickled, would make a folder."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    ran = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    classes = {"AutoConfig": "own.Own", "AutoModelForMaskedLM": "own.Own"}
    change(folder / "config.json", auto_map=classes)
    read(folder)
    classes = {"AutoTokenizer": ["own.Own", "own.Own"]}
    change(folder / "tokenizer_config.json", auto_map=classes, tokenizer_class="Own")
    with pytest.raises(InputError, match=str(folder)):
        read(folder)
    for file in folder.glob("*token*"):
        file.unlink()
    (folder / locate.SAFETENSORS).write_bytes(f"cos\nmkdir\n(V{ran}\ntR.".encode())
    with pytest.raises(InputError, match=f"^--model={folder}: .*can't be read"):
        read(folder)
    assert not ran.exists()


def test_what_has_no_tokenizer(trained_workdir, tmp_path, capsys):
    """Of a run the shards were made elsewhere: what is missing is said, not what a Hub's name looks like."""
    shutil.copytree(trained_workdir.checkpoints, tmp_path / "checkpoints")
    command = ["predict", f"--workdir={tmp_path}", "a <mask>"]
    assert "Repo id" not in refuse(command, 2, f"{tmp_path}/tokenizer: ", "shards", capsys=capsys)


def test_a_tokenizer_that_is_not_the_run_s_is_refused(trained_workdir, tmp_path):
    for name in ("checkpoints", "tokenizer"):
        shutil.copytree(getattr(trained_workdir, name), tmp_path / name)
    other = tokenizer.load(f"{tmp_path}/tokenizer")
    other.add_tokens(["another"])
    other.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(InputError, match=r"vocabulary entries, .*tokenizer has .* trained with"):
        read(tmp_path)


@pytest.mark.parametrize("head", [load.LM_HEAD, None])
def test_a_padding_id_that_means_another_token_is_refused(folder, head):
    """transformers gives that token the position of padding."""
    pad_id = json.loads((folder / "config.json").read_text())["pad_token_id"]
    roles = json.loads((folder / "tokenizer_config.json").read_text())
    pad = roles["pad_token"]
    unk = roles["unk_token"]
    change(folder / "tokenizer_config.json", pad_token=unk, unk_token=pad)
    with pytest.raises(InputError, match=f"pad_token_id = {pad_id}, which .* {pad}; .* {unk}"):
        read(folder, head)


def test_a_tokenizer_larger_than_the_model_is_refused_but_for_a_start(folder):
    larger = tokenizer.load(str(folder))
    larger.add_tokens(["another"])
    larger.save_pretrained(folder)
    assert read(folder, None).config.vocab_size == 1000
    with pytest.raises(InputError, match=r"has 1000 vocabulary entries, .* 1001"):
        read(folder)


def without(part: str) -> Callable[[pathlib.Path], None]:
    return lambda folder: change_tensors(
        folder, lambda tensors: {n: t for n, t in tensors.items() if part not in n}
    )


def part_at(file: str) -> Callable[[pathlib.Path], object]:
    def replace(folder: pathlib.Path) -> None:
        (folder / locate.SAFETENSORS).unlink()
        index = {"weight_map": {"roberta.x": file}}
        (folder / locate.SAFETENSORS_INDEX).write_text(json.dumps(index))

    return replace


def cut(folder: pathlib.Path) -> None:
    (folder / locate.SAFETENSORS).write_bytes((folder / locate.SAFETENSORS).read_bytes()[:-50])


FAULTS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "no weights": (
        lambda folder: (folder / locate.SAFETENSORS).unlink(),
        "neither model.safetensors nor",
    ),
    "untied": (
        lambda folder: change(folder / "config.json", tie_word_embeddings=False),
        "not tied",
    ),
    "torn": (cut, "weights can't be read"),
    "a layer less": (without(".layer.1."), "roberta/encoder/layer/1/"),
    "a norm less": (without(".embeddings.LayerNorm."), "roberta/embeddings/LayerNorm/bias is None"),
    "compiled": (
        lambda folder: change_tensors(folder, renamed(lambda name: f"_orig_mod.{name}")),
        "remove the prefix",
    ),
    "a part missing": (part_at("model-2.safetensors"), "model-2.safetensors"),
    "a file of the system": (part_at("/etc/hostname"), "'/etc/hostname' is not the name of a file"),
    "a file outside": (part_at("../model/model.safetensors"), "not the name of a file inside"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_folders_that_are_no_model_are_refused(folder, fault):
    break_folder, words = FAULTS[fault]
    break_folder(folder)
    for flag, head in READERS.items():
        with pytest.raises(InputError) as error:
            read(folder, head, flag)
        assert str(error.value).startswith(f"{flag}{folder}: ")
        assert words in str(error.value) and "\n" not in str(error.value)


def test_a_name_that_is_nowhere_is_told_in_a_sentence():
    with pytest.raises(InputError, match=r"^--model=someone/none: .*Hub") as error:
        read("someone/none")
    assert "\n" not in str(error.value)
