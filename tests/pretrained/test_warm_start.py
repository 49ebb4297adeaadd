"""Parameters to start from: what is taken, by text and by position, and what is refused before anything compiles."""

import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.model import families
from mlm.model.families import family_of
from mlm.pretrained import load, warm_start
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.workdir import Workdir
from tests.support.corpora import real_texts, write_shards
from tests.support.tiny import INFO, pretrain, tiny_config
from tests.support.trained_model import info_of, random_params, train_tokenizer, write_folder

SAME_MODEL = ("model.positions=32", "model.layers=2", "model.hidden_size=64")
WORDS = "roberta/embeddings/word_embeddings/embedding"
BIAS = "lm_head/bias"
POSITIONS = "roberta/embeddings/position_embeddings/embedding"


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory) -> pathlib.Path:
    return write_folder(model, tmp_path_factory.mktemp("source") / "export")


def read(name: str) -> load.Pretrained:
    return load.load(name, head=None, flag=load.INIT_FROM)


def started(name: str, folder: str):
    """Returns (parameters before, parameters after, the lines), by name, of a run with the tokenizer in a folder.

    On a mesh that splits its parameters.
    """
    mesh = sharding.make_mesh(data=1, fsdp=2, tensor=1, devices=jax.devices()[:2])
    run = Pretraining(tiny_config(*SAME_MODEL), info_of(tokenizer.load(folder)), mesh=mesh)
    source = read(name)
    warm_start.refuse_another_model(source, run.module.config)
    shapes = run.abstract_state.params
    params = jax.device_put(random_params(shapes, stddev=0.02), sharding.shardings_of(shapes))
    taken, lines = warm_start.fit(
        source,
        shapes,
        pad_id=run.module.config.pad_token_id,
        vocab_size=run.info.vocab_size,
        tokens=folder,
    )
    new = warm_start.start(params, taken)
    assert jax.tree.map(lambda p: p.sharding, new) == jax.tree.map(lambda p: p.sharding, params)
    before, after = (
        {name: np.asarray(leaf) for name, leaf in sharding.named_leaves(tree)}
        for tree in (params, new)
    )
    return before, after, lines


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_same_model_comes_back_whole(dtype, exported, model, tmp_path):
    """But for the padding of the vocabulary, which stays as it was."""
    folder = shutil.copytree(exported, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    halves = {name: value.astype(dtype) for name, value in tensors.items()}
    save_file(halves, folder / "model.safetensors")
    before, after, lines = started(str(folder), str(exported))
    for name, value in model.leaves.items():
        count = len(value)  # of rows that are taken
        assert np.array_equal(after[name][:count], value.astype(dtype)), name
        assert np.array_equal(after[name][count:], before[name][count:]), name
        assert (len(after[name]) > count) == (name in (WORDS, BIAS))
    source, rows, copied, positions = lines
    assert str(folder) in source and "copied whole: 39 of 42" in copied
    assert rows == f"  {WORDS} and {BIAS}: 1,000 of 1,000 copied to 1,000 rows; matched by id"
    assert positions == f"  {POSITIONS}: 32 of 32 copied to 32 positions"


def test_rows_are_matched_by_the_text_of_the_tokens(exported, model, tmp_path):
    other_tokenizer = train_tokenizer(tmp_path / "bpe", "bpe", 700)
    before, after, lines = started(str(exported), other_tokenizer)
    theirs = tokenizer.load(str(exported)).get_vocab()
    by_text = 0
    for piece, number in tokenizer.load(other_tokenizer).get_vocab().items():
        text = piece.replace("Ġ", "▁").replace("Ċ", "\n")
        if text not in theirs or not (piece.isascii() or text != piece):
            continue
        by_text += 1
        assert np.array_equal(after[WORDS][number], model.leaves[WORDS][theirs[text]]), piece
        assert after[BIAS][number] == model.leaves[BIAS][theirs[text]], piece
    taken = np.count_nonzero((after[WORDS] != before[WORDS]).any(axis=1))
    assert 200 < by_text <= taken <= by_text + 5, "the roles of special tokens come on top"
    assert any(f"{taken} of 1,000 copied to 700 rows" in line for line in lines)


@pytest.mark.parametrize("positions", [24, 48])
@pytest.mark.parametrize("pad", [1, 3])
def test_positions_are_cut_and_grown_from_the_right_one(exported, positions, pad):
    """The first position is the row behind pad id: of another pad id, other rows."""
    source = read(str(exported))
    leaves = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in source.leaves.items()
    }
    leaves[POSITIONS] = jax.ShapeDtypeStruct((positions + pad + 1, 64), np.float32)
    params = unflatten_dict(leaves, sep="/")
    taken, lines = warm_start.fit(source, params, pad_id=pad, vocab_size=1000, tokens=str(exported))
    (table, is_taken) = taken[POSITIONS]
    count = min(positions, 32)
    assert np.array_equal(table[pad + 1 :][:count], source.leaves[POSITIONS][2:][:count])
    assert np.flatnonzero(is_taken).tolist() == list(range(pad - 1, pad + count + 1))
    assert f"{count} of 32 copied to {positions} positions" in lines[-1]


def test_heads_that_one_of_them_lacks_are_named(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "classifier")
    tensors = load_file(exported / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if not name.startswith("lm_head")}
    tensors["classifier.dense.weight"] = np.ones((64, 64), np.float32)
    tensors["roberta.pooler.dense.weight"] = np.ones((64, 64), np.float32)
    save_file(tensors, folder / "model.safetensors")
    before, after, lines = started(str(folder), str(exported))
    assert np.array_equal(before["lm_head/dense/kernel"], after["lm_head/dense/kernel"])
    assert any(line.endswith(": lm_head, lm_head/dense, lm_head/layer_norm") for line in lines)
    assert any(line.endswith(": classifier/dense, roberta/pooler/dense") for line in lines)


@pytest.mark.standard
@pytest.mark.usefixtures("one_device")
def test_the_loop_starts_there_once(trained_workdir, model, tmp_path, capfd):
    """At a learning rate of nearly 0 it ends with the source's parameters; a restart takes the checkpoint."""
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(str(trained_workdir.tokenizer), str(workdir.tokenizer))
    shards = write_shards(real_texts()[:100], tmp_path / "shards", str(trained_workdir.tokenizer))
    settings = (
        "data.lanes=4",
        "train.steps=2",
        "optimizer.learning_rate=1e-12",
        "optimizer.ema_decay=0.5",
    )
    config = tiny_config(*SAME_MODEL, *settings, f"train.init_from={trained_workdir.root}")
    pretrain(config, workdir, shards)
    assert f"start from {trained_workdir.root}" in capfd.readouterr().err
    same = load.from_workdir(workdir, head=load.LM_HEAD)
    for name, value in model.leaves.items():
        np.testing.assert_allclose(same.leaves[name], value, atol=1e-7, err_msg=name)
    pretrain(config, workdir, shards)
    assert "start from" not in capfd.readouterr().err


SMALL = {"hidden_size": 16, "heads": 2, "intermediate_size": 24}
# their rows are matched, not tiled
TABLES = ("/embedding", BIAS, "decoder/bias", "predictions/bias")


def config_of(family: str, layers: int, **sizes: int | str):
    overrides = [
        f"model.{key}={value}" for key, value in {**SMALL, **sizes, "layers": layers}.items()
    ]
    settings = tiny_config(f"model.family={family}", *overrides).model
    return families.find(family).make_config(settings, INFO.vocab_size, INFO.special_ids)


def shapes_of(config):
    return jax.eval_shape(family_of(config).make_module(config).init_params, jax.random.key(0))


@pytest.mark.parametrize(
    ("family", "heads", "starts"),  # of heads of 8: half of the new ones, or one less, come first
    [
        ("roberta", 3, {24: 0, 42: 9}),
        ("roberta_prelayernorm", 4, {32: 8, 42: 9}),
        ("bert", 7, {56: 16, 42: 9}),
        ("modernbert", 7, {56: 16, 42: 9}),
    ],
)
def test_tensors_are_tiled_from_the_middle(family, heads, starts):
    config = config_of(family, 4, hidden_size=8 * heads, heads=heads, intermediate_size=42)
    old = config_of(family, 2)
    source = load.Pretrained(old, random_params(shapes_of(old)), "", None, {}, "small")
    warm_start.refuse_another_model(source, config, tiled=True)
    shapes = warm_start.shapes_of(shapes_of(config))
    tiled, lines = warm_start.tile(source, config, shapes)
    layers = [0, 1, 1, 0] if family == "modernbert" else [0, 0, 1, 1]
    stack = "/".join(source.family.stack) + "/"
    missing = []
    for name, shape in shapes.items():
        index, _, rest = name.removeprefix(stack).partition("/")
        old_name = f"{stack}{layers[int(index)]}/{rest}" if name.startswith(stack) else name
        if old_name not in source.leaves:
            missing.append(name)
            continue
        small = source.leaves[old_name]
        sizes = (small.shape[0], *shape[1:]) if name.endswith(TABLES) else shape
        pads = [
            (starts[large], large - size - starts[large]) if large != size else (0, 0)
            for large, size in zip(sizes, small.shape, strict=True)
        ]
        assert np.array_equal(tiled.leaves[name], np.pad(small, pads, "wrap")), name
    assert missing == (["model/layers/3/attn_norm/scale"] if family == "modernbert" else [])
    words = (f"16 tiled to {8 * heads}", "24 to 42", f"to 4: {', '.join(map(str, layers))}")
    assert all(any(word in line for line in lines) for word in words)


@pytest.mark.parametrize(
    ("family", "sizes", "tiled", "words"),
    [
        (
            "roberta",
            {"layers": 1, "intermediate_size": 16},
            True,
            ["layers = 1 (it has 2)", "size = 16 (it has 24)"],
        ),
        ("roberta", {"heads": 4, "hidden_size": 64}, True, [".heads = 16 (it has 8)"]),
        ("modernbert", {}, True, ["model.family = modernbert (it has roberta)"]),
        (
            "roberta",
            {"hidden_size": 32, "activation": "relu", "layer_norm_eps": 1e-6},
            False,
            ["size = 32 (it has 16)", "relu (it has gelu)", "1e-06 (it has 1e-05)"],
        ),
        ("modernbert", {"layers": 3}, False, ["model.family = modernbert (it has roberta)"]),
    ],
)
def test_another_architecture_is_refused_with_all_its_differences(family, sizes, tiled, words):
    """Keys of another family mean something else."""
    source = load.Pretrained(config_of("roberta", 2), {}, "", None, {}, "small")
    config = config_of(family, **{"layers": 2, **sizes})
    with pytest.raises(InputError, match=r"^config\.train\.init_from = small: ") as error:
        warm_start.refuse_another_model(source, config, tiled=tiled)
    assert all(word in str(error.value) for word in words)
    assert str(error.value).count("(it has") == len(words)
