"""The one loader: every layout gives the same parameters, whoever asks; nothing in a folder is executed or followed
out of it, or ends in a traceback."""

import json
import pathlib
import pickle
import random
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.export import export
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files, load, locate
from mlm.workdir import Workdir
from tests.support import trained_model
from tests.support.refusals import refuse


@pytest.fixture
def folder(model, tmp_path) -> pathlib.Path:
    """A transformers folder that may be changed."""
    path = pathlib.Path(shutil.copytree(model.tokenizer, tmp_path / "model"))
    export.write_model(model, path)
    return path


def change(file: pathlib.Path, **keys) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | keys))


def assert_same(leaves: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert leaves.keys() == wanted.keys()
    assert [name for name, value in leaves.items() if not np.array_equal(value, wanted[name])] == []


READERS = {"--model=": load.LM_HEAD, load.INIT_FROM: None}  # what a model is named with, and the head that it must have


def lay_out(folder: pathlib.Path, layout: str) -> None:
    """Changes the files of a folder, not the model in them."""
    file = folder / locate.SAFETENSORS
    tensors = load_file(file)
    if layout == "msgpack":
        file.unlink()
        return
    (folder / locate.MSGPACK).unlink()
    if layout == "several files":
        file.unlink()
        names = {name: f"model-0000{1 + ('layer.1' in name)}-of-00002.safetensors" for name in tensors}
        for part in set(names.values()):
            save_file({name: tensors[name] for name in tensors if names[name] == part}, folder / part)
        (folder / locate.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    elif layout == "tied bias":
        save_file(tensors | {"lm_head.decoder.bias": tensors.pop("lm_head.bias")}, file)
    elif layout.startswith("bias of a"):
        bias = tensors.pop("lm_head.bias")
        left = bias[:-4].copy() if "smaller" in layout else np.pad(bias, (0, 4))
        save_file(tensors | {"lm_head.decoder.bias": bias, "lm_head.bias": left}, file)
    elif layout in WRAPPED:
        save_file({WRAPPED[layout](name): value for name, value in tensors.items()}, file)
    elif layout == "pooler":
        save_file(tensors | {"roberta.pooler.dense.weight": np.ones((64, 64), np.float32)}, file)
    elif layout == "without a head":
        save_file({name: value for name, value in tensors.items() if not name.startswith("lm_head")}, file)
    elif layout == "encoder alone":
        own = {name.removeprefix("roberta."): value for name, value in tensors.items() if name.startswith("roberta.")}
        save_file(own, file)


BIASES = ["tied bias", "bias of a smaller vocabulary", "bias of a larger vocabulary"]
WRAPPED = {
    "compiled and parallel": lambda name: f"_orig_mod.module.{name}",
    "layers compiled": lambda name: name.replace(".layer.1.", ".layer.1._orig_mod."),
    "an attribute of that name": lambda name: f"roberta.{name}",
    "an attribute of an attribute": lambda name: f"net.backbone.{name}",
    "old names": lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    ),
}
LAYOUTS = ["msgpack", "several files", *BIASES, "pooler", *WRAPPED]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_parameters(folder, model, layout):
    lay_out(folder, layout)
    for flag, head in READERS.items():
        found = load.load(str(folder), head=head, flag=flag)
        leaves = {name: value for name, value in found.leaves.items() if "pooler" not in name}
        assert_same(leaves, model.leaves)
        assert ("roberta/pooler/dense/kernel" in found.leaves) == (layout == "pooler" and head is None)
        assert found.tokenizer == str(folder) and found.source == str(folder) and found.step is None


@pytest.mark.parametrize("layout", ["without a head", "encoder alone"])
def test_a_model_without_a_head_is_only_a_start(folder, model, layout, capsys):
    lay_out(folder, layout)
    found = load.load(str(folder), head=None)
    assert_same(found.leaves, {name: value for name, value in model.leaves.items() if name.startswith("roberta/")})
    refuse(["predict", f"--model={folder}", "a <mask>"], 2, f"--model={folder}: has no language-model", capsys=capsys)


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


# Bad input ------------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, file: pathlib.Path):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


def test_code_in_a_folder_is_not_run(folder, tmp_path, monkeypatch):
    """Neither with a question at the terminal nor without: no one is asked."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    change(folder / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForMaskedLM": "own.Own"})
    own = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    change(folder / "tokenizer_config.json", **own)
    load.load(str(folder), head=load.LM_HEAD)
    with pytest.raises(InputError, match=str(folder)):
        tokenizer.load(str(folder))
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
    (folder / "model.safetensors").unlink(), (folder / "flax_model.msgpack").unlink()
    for name in ("pytorch_model.bin", "model.safetensors"):
        (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
        with pytest.raises(InputError, match=f"^--model={folder}: "):
            load.load(str(folder), head=load.LM_HEAD)
    assert not (tmp_path / "ran").exists()


VALUES = ["x", "", None, -1, 0, 10**30, 1.5, float("nan"), float("inf"), True]
VALUES += [[], {}, [1], {"a": 1}, "\x1b[2J", "\ud800"]


def test_a_config_changed_at_random_is_read_or_refused(folder):
    file = folder / "config.json"
    content, refused = json.loads(file.read_text()), 0
    for seed in range(300):
        rng = random.Random(seed)
        key, value = rng.choice(list(content)), rng.choice(VALUES)
        file.write_text(json.dumps(content | {key: value}))
        try:
            load.read_config(UPath(folder), "a folder")
            if seed % 15 == 0:
                load.load(str(folder), head=load.LM_HEAD)
        except InputError as error:
            refused += 1
            assert str(error).isprintable(), (key, value, error)
    assert refused > 100


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 90_000, b"null", b'{"model_type": "\\u001b[2J"}'])
def test_a_config_that_is_no_config_is_refused(folder, data):
    (folder / "config.json").write_bytes(data)
    for head in (load.LM_HEAD, load.CLASSIFIER, None):
        with pytest.raises(InputError, match=r"config\.json") as error:
            load.load(str(folder), head=head)
        assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"hidden_activation": "tanh"}, r"hidden_activation = 'tanh'; .*gelu, gelu_new, relu, silu"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"hidden_size": 30, "num_attention_heads": 6}, "hidden_size .*odd"),
    ],
)
def test_a_modernbert_that_we_would_not_compute_is_refused(modernbert_folder, tmp_path, keys, words):
    shutil.copy(f"{modernbert_folder}/config.json", tmp_path)
    assert load.read_config(UPath(tmp_path), "a folder").hidden_size == 32
    change(tmp_path / "config.json", **keys)
    with pytest.raises(InputError, match=words):
        load.read_config(UPath(tmp_path), "a folder")


@pytest.mark.parametrize(("key", "value"), [("is_decoder", True), ("position_embedding_type", "relative_key")])
def test_a_roberta_that_we_would_not_compute_is_refused(folder, key, value):
    change(folder / "config.json", **{key: value})
    with pytest.raises(InputError, match=rf"config\.json .*{key} = {value!r}; "):
        load.load(str(folder), head=load.LM_HEAD)


def test_a_wide_initialisation_is_read(folder):
    change(folder / "config.json", initializer_range=1.5)
    assert load.load(str(folder), head=load.LM_HEAD).config.initializer_range == 1.5


@pytest.mark.parametrize(
    ("head", "words"), [("SequenceClassification", "the mean of a row"), ("TokenClassification", "has neither model")]
)
def test_a_classifier_that_reads_the_mean_of_a_row_is_refused(modernbert_folder, tmp_path, head, words):
    shutil.copy(f"{modernbert_folder}/config.json", tmp_path)
    change(tmp_path / "config.json", architectures=[f"ModernBertFor{head}"], classifier_pooling="mean")
    with pytest.raises(InputError, match=words):
        load.load(str(tmp_path), head=load.CLASSIFIER)


@pytest.mark.parametrize(("layers", "given", "every"), [(2, 3, 3), (2, None, 2), (7, 3, 3), (7, 9, 3)])
def test_layer_types_of_transformers_5(modernbert_folder, layers, given, every):
    content = json.loads(pathlib.Path(modernbert_folder, "config.json").read_text())
    types = ["sliding_attention" if index % 3 else "full_attention" for index in range(layers)]
    rope = {kind: {"rope_type": "default", "rope_theta": 10_000} for kind in ("full_attention", "sliding_attention")}
    content |= {"rope_parameters": rope, "layer_types": types, "global_attn_every_n_layers": given}
    assert load.config_of(content).global_attn_every_n_layers == every


@pytest.mark.parametrize("is_of_5", [False, True])
def test_a_local_rotary_base_of_null_is_the_global_one(modernbert_folder, tmp_path, is_of_5):
    content = json.loads(pathlib.Path(modernbert_folder, "config.json").read_text()) | {"local_rope_theta": None}
    if is_of_5:
        bases = {
            "full_attention": content.pop("global_rope_theta"),
            "sliding_attention": content.pop("local_rope_theta"),
        }
        content["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
        }
        content["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
        content |= {"num_hidden_layers": 3}
    change(tmp_path / "config.json", **content)
    found = load.read_config(UPath(tmp_path), "a folder")
    assert found.local_rope_theta == found.global_rope_theta == 9000


@pytest.mark.parametrize("data", [b"[]", b"\xff", b'{"mask_token": 3}', b'{"mask_token": {"text": 1}}'])
def test_special_tokens_of_another_type_are_refused(folder, data):
    (folder / "tokenizer_config.json").write_bytes(data)
    for file in ("special_tokens_map.json", "added_tokens.json"):
        (folder / file).unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"no \w+ token|is not a JSON object"):
        tokenizer.manifest_fields(str(folder))


def keep_tensors(folder: pathlib.Path, is_kept, **others: np.ndarray) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if is_kept(n)} | others, folder / "model.safetensors")


def rename_tensors(folder: pathlib.Path, prefix: str, **others: np.ndarray) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(others | {prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def cut(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-50])


def pickle_alone(folder: pathlib.Path) -> None:
    (folder / "flax_model.msgpack").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def part_missing(folder: pathlib.Path) -> None:
    lay_out(folder, "several files")
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_of(content) -> Callable[[pathlib.Path], object]:
    return lambda folder: (folder / locate.INDEX).write_text(json.dumps({"weight_map": content}))


FAULTS = {
    "gpt2": (lambda folder: change(folder / "config.json", model_type="gpt2"), "config.json has model_type = gpt2"),
    "untied": (lambda folder: change(folder / "config.json", tie_word_embeddings=False), "not tied"),
    "type": (lambda folder: change(folder / "config.json", hidden_size="64"), "config.json has hidden_size = '64'"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "a pickle alone": (pickle_alone, "neither model.safetensors nor flax_model.msgpack"),
    "torn": (cut, "weights can't be read"),
    "a layer less": (
        lambda folder: keep_tensors(folder, lambda name: ".layer.1." not in name),
        "1 layers where config.json asks for 2",
    ),
    "a norm less": (
        lambda folder: keep_tensors(folder, lambda name: ".embeddings.LayerNorm." not in name),
        "roberta/embeddings/LayerNorm/bias is None where config.json asks for (64,)",
    ),
    "another prefix": (
        lambda folder: rename_tensors(folder, "net.backbone.", **{"classifier.weight": np.ones((2, 64), np.float32)}),
        "classifier/kernel",
    ),
    "a name twice": (
        lambda folder: rename_tensors(folder, "_orig_mod.", **load_file(folder / "model.safetensors")),
        "lm_head.bias",
    ),
    "a part missing": (part_missing, "model-00002-of-00002.safetensors"),
    "a file of the system": (index_of({"roberta.x": "/etc/hostname"}), "'/etc/hostname' is not the name of a file"),
    "a file outside": (index_of({"roberta.x": "../model/model.safetensors"}), "not the name of a file inside"),
    "a number": (index_of({"roberta.x": 4}), "weights can't be read (4"),
    "an empty index": (index_of([]), "weights can't be read"),
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
