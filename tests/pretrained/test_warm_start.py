"""Parameters to start from: what is taken, by text and by position, and what is refused before anything compiles."""

import copy
import functools
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


@functools.cache
def run_of(folder: str, *overrides: str) -> Pretraining:
    """A run with the tokenizer in a folder, on a mesh that splits its parameters."""
    mesh = sharding.make_mesh(data=1, fsdp=2, tensor=1, devices=jax.devices()[:2])
    return Pretraining(
        tiny_config(*SAME_MODEL, *overrides), info_of(tokenizer.load(folder)), mesh=mesh
    )


def started(name: str, folder: str, *overrides: str):
    """Returns (parameters before, parameters after, the lines), by name."""
    run = run_of(folder, *overrides)
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


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory) -> str:
    return train_tokenizer(tmp_path_factory.mktemp("source") / "bpe", "bpe", 700)


def fitted(source: load.Pretrained, table: str, rows: int, **settings):
    """Returns what is taken for a model with another number of rows of a table, and the lines."""
    leaves = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in source.leaves.items()
    }
    leaves[table] = jax.ShapeDtypeStruct((rows, 64), np.float32)
    return warm_start.fit(source, unflatten_dict(leaves, sep="/"), **settings)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_same_model_comes_back_whole(dtype, exported, model, tmp_path):
    """But for the padding of the vocabulary, which stays as it was."""
    folder = shutil.copytree(exported, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: value.astype(dtype) for name, value in tensors.items()}, folder / "model.safetensors"
    )
    before, after, lines = started(str(folder), str(exported))
    for name, value in model.leaves.items():
        count = len(value)  # of rows that are taken
        assert np.array_equal(after[name][:count], value.astype(dtype)), name
        assert np.array_equal(after[name][count:], before[name][count:]), name
        assert (len(after[name]) > count) == (name in (WORDS, BIAS)) and not np.array_equal(
            before[name], after[name]
        )
    _, copied, rows, positions = lines
    assert str(folder) in lines[0] and "2 layers" in copied and "lm_head/layer_norm" in copied
    assert rows == f"  {WORDS} and {BIAS}: 1,000 of 1,000 rows copied; matched by id"
    assert positions == f"  {POSITIONS}: 32 of 32 positions copied"


def test_rows_are_matched_by_the_text_of_the_tokens(exported, model, other_tokenizer):
    before, after, lines = started(str(exported), other_tokenizer)
    ours = tokenizer.load(other_tokenizer)
    theirs = tokenizer.load(str(exported))
    by_text = 0
    for piece, number in ours.get_vocab().items():
        text = (
            piece.replace("Ġ", "▁").replace("Ċ", "\n")
            if piece.isascii() or "Ġ" in piece or "Ċ" in piece
            else None
        )
        row = None if text is None else theirs.get_vocab().get(text)
        if row is None:
            continue
        by_text += 1
        assert np.array_equal(after[WORDS][number], model.leaves[WORDS][row]), piece
        assert after[BIAS][number] == model.leaves[BIAS][row], piece
    taken = [
        number
        for number in range(700)
        if not np.array_equal(after[WORDS][number], before[WORDS][number])
    ]
    assert 200 < by_text <= len(taken) <= by_text + 5, "the roles of special tokens come on top"
    for count in (
        f"{len(taken):,} of 1,000 rows",
        f"{700 - len(taken):,} newly",
        f"{1000 - len(taken):,} unused",
    ):
        assert count in lines[2]


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (48, "32 of 32 positions copied, 16 newly initialized"),
        (24, "24 of 32 positions copied, 8 unused"),
    ],
)
@pytest.mark.parametrize("pad", [1, 3])
def test_positions_are_cut_and_grown_from_the_right_one(exported, positions, words, pad):
    """The first position is the row behind pad id: of another pad id, other rows."""
    source = read(str(exported))
    tokens = str(exported)
    taken, lines = fitted(
        source, POSITIONS, positions + pad + 1, pad_id=pad, vocab_size=1000, tokens=tokens
    )
    (table, is_taken) = taken[POSITIONS]
    theirs = source.leaves[POSITIONS]
    count = min(positions, 32)
    assert np.array_equal(table[pad + 1 :][:count], theirs[2:][:count])
    assert np.flatnonzero(is_taken).tolist() == list(range(pad - 1, pad + count + 1))
    assert words in lines[3]


def test_heads_that_one_of_them_lacks_are_named(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "classifier")
    tensors = load_file(exported / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if not name.startswith("lm_head")}
    tensors |= {
        f"classifier.{part}.weight": np.ones((64, 64), np.float32) for part in ("dense", "out_proj")
    }
    tensors["roberta.pooler.dense.weight"] = np.ones((64, 64), np.float32)
    save_file(tensors, folder / "model.safetensors")
    before, after, (*_, fresh, unused) = started(str(folder), str(exported))
    assert np.array_equal(before["lm_head/dense/kernel"], after["lm_head/dense/kernel"])
    assert fresh.endswith(": lm_head/bias, lm_head/dense, lm_head/layer_norm")
    assert unused.endswith(": classifier/dense, classifier/out_proj, roberta/pooler/dense")


@pytest.mark.standard
@pytest.mark.usefixtures("one_device")
def test_the_loop_starts_there_once(trained_workdir, model, tmp_path, capfd):
    """At a learning rate of nearly 0 it ends with the source's parameters; a restart takes the checkpoint."""
    workdir = Workdir(str(tmp_path / "run"))
    shutil.copytree(str(trained_workdir.tokenizer), str(workdir.tokenizer))
    shards = write_shards(real_texts()[:300], tmp_path / "shards", str(trained_workdir.tokenizer))
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


def wrapped(
    small: np.ndarray, shape: tuple[int, ...], starts: dict[int, int], *, table: bool
) -> np.ndarray:
    """Element by element: that of the small array, which begins at `starts` of each axis and wraps around."""
    found = np.empty((len(small) if table else shape[0], *shape[1:]), np.float32)
    for place in np.ndindex(found.shape):
        index = [
            index if length == size else (index - starts[length]) % size
            for index, length, size in zip(place, found.shape, small.shape, strict=True)
        ]
        found[place] = small[tuple(index)]
    return found


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
    theirs = source.leaves
    missing = []
    for name, shape in shapes.items():
        index, _, rest = name.removeprefix(stack).partition("/")
        small = theirs.get(
            f"{stack}{layers[int(index)]}/{rest}" if name.startswith(stack) else name
        )
        if small is None:
            missing.append(name)
            continue
        expected = wrapped(small, shape, starts, table=name.endswith(TABLES))
        assert np.array_equal(tiled.leaves[name], expected), name
    assert missing == (["model/layers/3/attn_norm/scale"] if family == "modernbert" else [])
    words = (f"16 to {8 * heads}", "24 to 42", f"2 to 4: layers {', '.join(map(str, layers))}")
    assert all(any(word in line for line in lines) for word in words)


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        (
            "roberta",
            {"layers": 1, "intermediate_size": 16},
            ["layers = 1 (it has 2)", "size = 16 (it has 24)"],
        ),
        ("roberta", {"heads": 4, "hidden_size": 64}, ["heads of size 16, "]),
        ("modernbert", {}, ["model.family = modernbert (it has roberta)"]),
    ],
)
def test_what_can_not_be_tiled_is_refused(family, sizes, words):
    source = load.Pretrained(config_of("roberta", 2), {}, "", None, {}, "small")
    with pytest.raises(InputError, match=r"^config\.train\.init_from = small: ") as error:
        warm_start.refuse_another_model(
            source, config_of(family, **{"layers": 2, **sizes}), tiled=True
        )
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [
                "model.hidden_size=32",
                "model.activation=relu",
                "model.layer_norm_eps=1e-06",
                "model.layers=3",
            ],
            [
                "hidden_size = 32 (it has 64)",
                "activation = relu (it has gelu)",
                "1e-06 (it has 1e-05)",
                "layers = 3 (it has 2)",
            ],
        ),
        (
            ["model.family=modernbert", "model.layers=3"],
            ["model.family = modernbert (it has roberta)"],
        ),
    ],
)
def test_another_architecture_is_refused_with_all_its_differences(
    exported, overrides, words, monkeypatch
):
    """Before anything compiles; keys of another family mean something else."""
    run = copy.copy(run_of(str(exported), *overrides, f"train.init_from={exported}"))
    monkeypatch.setattr(run, "init", lambda *_: pytest.fail("something was to be compiled"))
    with pytest.raises(
        InputError, match=f"^config.train.init_from = {exported}: does not fit "
    ) as error:
        run.initial_state()
    assert all(word in str(error.value) for word in words) and str(error.value).count(
        "(it has"
    ) == len(words)


def test_rotary_bases_are_reported_and_the_activation_of_a_head_is_compared(modernbert_folder):
    source = load.load(modernbert_folder, head=None)
    config = copy.deepcopy(source.config)
    warm_start.refuse_another_model(source, config)
    assert warm_start.rotary_changes(source, config) == []
    config.global_rope_theta = 160_000.0
    assert warm_start.rotary_changes(source, config) == [
        "  model.global_rope_theta: 9000 in the source, 160000 here"
    ]
    source.config.classifier_activation = "relu"
    with pytest.raises(InputError, match=r"classifier_activation = gelu \(it has relu\)"):
        warm_start.refuse_another_model(source, config)
