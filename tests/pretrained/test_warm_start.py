"""Parameters to start from: what is taken, by text and by position, and what is refused before anything compiles."""

import copy
import itertools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from mlm.data import tokenizer
from mlm.data.manifest import DatasetInfo
from mlm.errors import InputError
from mlm.export import export
from mlm.paths import UPath
from mlm.pretrained import load, warm_start
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.workdir import Workdir
from tests.pretrained.starts import SAME_MODEL, read, source_leaves, started
from tests.support.tiny import pretrain, tiny_config, tiny_run
from tests.support.trained_model import LENGTH, facts_of, train_tokenizer

WORDS, BIAS = "roberta/embeddings/word_embeddings/embedding", "lm_head/bias"
POSITIONS = "roberta/embeddings/position_embeddings/embedding"


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("initial") / "export"
    export.export(model, UPath(folder), scores=None, name="small")
    return folder


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory) -> str:
    return train_tokenizer(tmp_path_factory.mktemp("initial") / "bpe", "bpe", 700)


@pytest.mark.standard
@pytest.mark.parametrize("kind", ["workdir", "export", "flax", "sharded", "half"])
def test_the_same_model_comes_back_whole(kind, trained_workdir, exported, model, tmp_path):
    folder = tmp_path / "source"
    if kind == "workdir":
        folder = pathlib.Path(str(trained_workdir.root))
    else:
        shutil.copytree(exported, folder)
    tensors = load_file(exported / "model.safetensors")
    if kind != "workdir" and kind != "export":
        (folder / "model.safetensors").unlink()
    if kind != "flax" and kind != "workdir":
        (folder / "flax_model.msgpack").unlink()
    if kind == "sharded":
        half = sorted(tensors)[: len(tensors) // 2]
        parts = {"1": {name: tensors[name] for name in half}, "2": {n: t for n, t in tensors.items() if n not in half}}
        for number, part in parts.items():
            save_file(part, folder / f"model-0000{number}-of-00002.safetensors")
        index = {name: f"model-0000{number}-of-00002.safetensors" for number, part in parts.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    if kind == "half":
        save_file({name: value.astype(np.float16) for name, value in tensors.items()}, folder / "model.safetensors")
    before, after, lines = started(str(folder), str(trained_workdir.tokenizer))
    for name, value in source_leaves(model).items():
        expected = value.astype(np.float16) if kind == "half" else value
        if name in (WORDS, BIAS):
            assert np.array_equal(after[name][:1000], expected), name
            assert np.array_equal(after[name][1000:], before[name][1000:]), f"{name}: the padding of the vocabulary"
        else:
            assert np.array_equal(after[name], expected), name
        if not name.endswith("bias"):
            assert not np.array_equal(before[name], after[name]) or "LayerNorm" in name or "layer_norm" in name
    assert lines == [
        f"start from {folder}",
        "  copied: 2 layers, lm_head/dense, lm_head/layer_norm, roberta/embeddings/LayerNorm, "
        "roberta/embeddings/token_type_embeddings",
        f"  {WORDS} and {BIAS}: 1,000 of 1,000 rows copied; matched by id",
        f"  {POSITIONS}: 32 of 32 positions copied",
    ]


def test_rows_are_matched_by_the_text_of_the_tokens(exported, model, other_tokenizer):
    before, after, lines = started(str(exported), other_tokenizer)
    ours, theirs = tokenizer.load(other_tokenizer), tokenizer.load(str(exported))
    source = source_leaves(model)
    by_text = 0
    for piece, number in ours.get_vocab().items():
        text = piece.replace("Ġ", "▁").replace("Ċ", "\n") if piece.isascii() or "Ġ" in piece or "Ċ" in piece else None
        row = None if text is None else theirs.get_vocab().get(text)
        if row is None:
            continue
        by_text += 1
        assert np.array_equal(after[WORDS][number], source[WORDS][row]), piece
        assert after[BIAS][number] == source[BIAS][row], piece
    taken = [number for number in range(700) if not np.array_equal(after[WORDS][number], before[WORDS][number])]
    assert by_text > 200, "too few tokens in common to tell"
    assert by_text <= len(taken) <= by_text + 5
    assert np.array_equal(after[WORDS][700:], before[WORDS][700:])
    rest = f"{700 - len(taken):,} newly initialized, {1000 - len(taken):,} unused; matched by the tokens' text"
    assert lines[2] == f"  {WORDS} and {BIAS}: {len(taken):,} of 1,000 rows copied, {rest}"


@pytest.mark.parametrize(
    ("size", "words"),
    [(1200, "1,000 of 1,000 rows copied, 200 newly initialized"), (600, "600 of 1,000 rows copied, 400 unused")],
)
def test_without_a_tokenizer_rows_are_matched_by_id(exported, model, tmp_path, size, words):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(exported / name, tmp_path / name)
    info = DatasetInfo(size, {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}, (0, 1, 2, 3, 4), LENGTH, 0)
    run = Pretraining(tiny_config(*SAME_MODEL), info, mesh=sharding.make_mesh(data=8, fsdp=1, tensor=1))
    state, source = run.init(), read(str(tmp_path))
    taken, lines = warm_start.fit(source, run.abstract_state.params, pad_id=1, vocab_size=size, tokens=str(exported))
    after = dict(sharding.named_leaves(warm_start.start(state.params, taken)))
    rows = min(size, 1000)
    fresh_rows = dict(sharding.named_leaves(state.params))[WORDS][rows:]
    assert np.array_equal(after[WORDS][:rows], source_leaves(model)[WORDS][:rows])
    assert np.array_equal(after[WORDS][rows:], fresh_rows)
    assert words in lines[2] and "matched by id" in lines[2]


@pytest.mark.parametrize(
    ("positions", "words"),
    [(48, "32 of 32 positions copied, 16 newly initialized"), (24, "24 of 32 positions copied, 8 unused")],
)
@pytest.mark.parametrize("pad", [1, 3])
def test_positions_are_cut_and_grown_from_the_right_one(exported, model, positions, words, pad):
    """The first position is the row behind pad id: of another pad id, other rows."""
    source = read(str(exported))
    leaves = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in source.leaves.items()}
    leaves[POSITIONS] = jax.ShapeDtypeStruct((positions + pad + 1, 64), np.float32)
    params = unflatten_dict(leaves, sep="/")
    taken, lines = warm_start.fit(source, params, pad_id=pad, vocab_size=1000, tokens=str(exported))
    (table, is_taken), theirs = taken[POSITIONS], source.leaves[POSITIONS]
    count = min(positions, 32)
    assert np.array_equal(table[pad + 1 :][:count], theirs[2:][:count])
    assert np.flatnonzero(is_taken).tolist() == list(range(pad - 1, pad + count + 1))
    assert lines[3] == f"  {POSITIONS}: {words}"


def test_heads_that_one_of_them_lacks_are_named(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "classifier")
    tensors = load_file(exported / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if not name.startswith("lm_head")}
    tensors |= {f"classifier.{part}.weight": np.ones((64, 64), np.float32) for part in ("dense", "out_proj")}
    tensors["roberta.pooler.dense.weight"] = np.ones((64, 64), np.float32)
    save_file(tensors, tmp_path / "classifier" / "model.safetensors")
    before, after, lines = started(str(tmp_path / "classifier"), str(exported))
    assert np.array_equal(before["lm_head/dense/kernel"], after["lm_head/dense/kernel"])
    assert lines[2].startswith(f"  {WORDS}: 1,000 of 1,000 rows copied")
    assert lines[4:] == [
        "  newly initialized (missing from the source, or of another shape): lm_head/bias, lm_head/dense, "
        "lm_head/layer_norm",
        "  unused in the source: classifier/dense, classifier/out_proj, roberta/pooler/dense",
    ]


def test_an_encoder_alone_has_shorter_names(exported, model, tmp_path):
    shutil.copytree(exported, tmp_path / "encoder")
    tensors = load_file(exported / "model.safetensors")
    own = {name.removeprefix("roberta."): value for name, value in tensors.items() if name.startswith("roberta.")}
    save_file(own, tmp_path / "encoder" / "model.safetensors")
    _, after, _ = started(str(tmp_path / "encoder"), str(exported))
    for name, value in source_leaves(model).items():
        if name.startswith("roberta/encoder"):
            assert np.array_equal(after[name], value)


# A smaller model ------------------------------------------------------------------------------------------------------

FAMILIES = ("roberta", "roberta_prelayernorm", "bert", "modernbert")
SMALL = {"hidden_size": 16, "heads": 2, "intermediate_size": 24}
TABLES = ("/embedding", BIAS, "decoder/bias", "predictions/bias")  # their rows are matched, not tiled


def of_sizes(family: str, layers: int, **sizes: int) -> Pretraining:
    overrides = [f"model.{key}={value}" for key, value in {**SMALL, **sizes, "layers": layers}.items()]
    return tiny_run(f"model.family={family}", *overrides)


def random_source(family: str, layers: int = 2) -> load.Pretrained:
    run, rng = of_sizes(family, layers), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), run.abstract_state.params)
    return load.Pretrained(run.module.config, params, "", None, {}, "small")


def wrapped(small: np.ndarray, shape: tuple[int, ...], starts: dict[int, int], *, table: bool) -> np.ndarray:
    """Element by element: that of the small array, which begins at `starts` of each axis and wraps around."""
    found = np.empty((len(small) if table else shape[0], *shape[1:]), np.float32)
    for place in np.ndindex(found.shape):
        own = [
            index if length == size else (index - starts[length]) % size
            for index, length, size in zip(place, found.shape, small.shape, strict=True)
        ]
        found[place] = small[tuple(own)]
    return found


@pytest.mark.standard
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("heads", "starts"),
    [
        (3, {24: 0, 42: 9}),
        (4, {32: 8, 42: 9}),
        (7, {56: 16, 42: 9}),
    ],  # of heads of 8: half of the new ones, or one less, come first
)
def test_tensors_are_tiled_from_the_middle(family, heads, starts):
    source, run = random_source(family), of_sizes(
        family, 4, hidden_size=8 * heads, heads=heads, intermediate_size=42
    )  # fmt: skip
    warm_start.refuse_another_model(source, run.module.config, tiled=True)
    shapes = {name: leaf.shape for name, leaf in sharding.named_leaves(run.abstract_state.params)}
    tiled, lines = warm_start.tile(source, run.module.config, shapes)
    layers = [0, 1, 1, 0] if family == "modernbert" else [0, 0, 1, 1]
    stack, theirs, missing = "/".join(source.family.stack) + "/", source.leaves, []
    for name, shape in shapes.items():
        index, _, rest = name.removeprefix(stack).partition("/")
        small = theirs.get(f"{stack}{layers[int(index)]}/{rest}" if name.startswith(stack) else name)
        if small is None:
            missing.append(name)
            continue
        expected = wrapped(small, shape, starts, table=name.endswith(TABLES))
        assert np.array_equal(tiled.leaves[name], expected), name
    assert missing == (["model/layers/3/attn_norm/scale"] if family == "modernbert" else [])
    assert lines == [
        f"  tiled from 16 to {8 * heads}: hidden size",
        "  tiled from 24 to 42: intermediate size",
        f"  repeated from 2 to 4: layers {', '.join(map(str, layers))}",
    ]


@pytest.mark.standard
def test_a_layer_is_started_from_one_of_its_kind():
    small, large = of_sizes("modernbert", 22).module.config, of_sizes("modernbert", 28).module.config
    found = warm_start._spread_layers(small, large)
    assert [layer % 3 == 0 for layer in found] == [index % 3 == 0 for index in range(28)]
    assert [layer for layer in found if layer % 3 == 0] == [0, 3, 6, 9, 9, 12, 15, 18, 18, 21]
    assert [layer for layer in found if layer % 3] == [1, 2, 4, 4, 5, 7, 8, 8, 10, 11, 13, 14, 14, 16, 17, 19, 19, 20]
    small, large = of_sizes("roberta", 12).module.config, of_sizes("roberta", 24).module.config
    assert warm_start._spread_layers(small, large) == [min(round(index / 2), 11) for index in range(24)]
    assert warm_start._spread_layers(large, large) == list(range(24))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("one_device")
def test_a_tiled_start_is_ahead_of_a_fresh_one(family, manifest, tmp_path, capsys):
    """At once, and after some steps."""
    common = (f"model.family={family}", "data.lanes=4", "evaluate.every=0", "checkpoint.every=0", "log.every=100")
    own = ("model.layers=2", "train.steps=150", "schedule.warmup_fraction=0.1")
    pretrain(tiny_config(*common, *own), Workdir(str(tmp_path / "small")), manifest)
    sizes = ("model.layers=4", "model.hidden_size=48", "model.heads=3", "model.intermediate_size=96")
    start = (f"train.init_from={tmp_path}/small", "train.init_tiled=true", "optimizer.learning_rate=0.001")
    config = tiny_config(*common, *sizes, *start, "train.steps=20", "schedule.warmup_fraction=0.5")
    task, losses = Pretraining.open(config, Workdir(str(tmp_path / "large")), manifest), []
    for state in (task.init(), task.initial_state()):
        losses.append([task.evaluate(state.params)["loss"]])
        for batch in itertools.islice(task.batches(0), 20):
            state, _ = task.train_step(state, sharding.put_batch(batch, task.mesh, 16))
        losses[-1].append(task.evaluate(state.params)["loss"])
    assert "  tiled from 32 to 48: hidden size\n" in capsys.readouterr().err
    assert losses[1][0] < losses[0][0] - 0.3 and losses[1][1] < losses[0][1] - 0.3


@pytest.mark.parametrize(
    ("family", "sizes", "sentence"),
    [
        ("roberta", {"layers": 1}, "model.layers = 1: train.init_from = small has 2; set it to that or more, or start"),
        ("roberta", {"intermediate_size": 16}, "model.intermediate_size = 16: train.init_from = small has 24; set it"),
        ("roberta", {"heads": 4, "hidden_size": 64}, "model.heads = 4: gives heads of size 16, but train.init_from = "
                                                     "small has heads of size 8; make them equal."),
        ("modernbert", {}, "model.family = modernbert: train.init_from = small is a roberta; set it to that, or start"),
    ],
)  # fmt: skip
def test_what_can_not_be_tiled_is_refused(family, sizes, sentence):
    run = of_sizes(family, **{"layers": 2, **sizes})
    with pytest.raises(InputError) as error:
        warm_start.refuse_another_model(random_source("roberta"), run.module.config, tiled=True)
    assert str(error.value).startswith(f"config.{sentence}")


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.standard
@pytest.mark.parametrize(
    ("override", "theirs"),
    [
        ("model.hidden_size=32", 64),
        ("model.layers=1", 2),
        ("model.heads=4", 2),
        ("model.intermediate_size=128", 64),
        ("model.activation=relu", "gelu"),
        ("model.layer_norm_eps=1e-06", 1e-5),
    ],
)
def test_another_architecture_is_refused_by_key_and_values(exported, override, theirs):
    key, _, value = override.partition("=")
    with pytest.raises(InputError) as error:
        started(str(exported), str(exported), override)
    sentence = (
        f"config.{key} = {value}: train.init_from = {exported} has {theirs}; set it to that, or start from another"
    )
    assert str(error.value) == f"{sentence} model."


def test_another_family_is_refused(exported):
    with pytest.raises(InputError) as error:
        started(str(exported), str(exported), "model.family=modernbert")
    wrong = f"config.model.family = modernbert: train.init_from = {exported} is a roberta"
    assert str(error.value) == f"{wrong}; set it to that, or start from another model."


def test_other_rotary_bases_are_reported(modernbert_folder):
    source = load.load(modernbert_folder, head=None)
    config = copy.deepcopy(source.config)
    assert warm_start.rotary_changes(source, config) == []
    config.global_rope_theta = 160_000.0
    line = "  model.global_rope_theta: 9000 in the source, 160000 here"
    assert warm_start.rotary_changes(source, config) == [line]


def test_a_head_of_another_activation_is_refused(modernbert_folder):
    source = load.load(modernbert_folder, head=None)
    config = copy.deepcopy(source.config)
    warm_start.refuse_another_model(source, config)
    source.config.classifier_activation = "relu"
    with pytest.raises(InputError, match="its head has the activation relu, its layers have gelu; start from another"):
        warm_start.refuse_another_model(source, config)


def test_it_is_refused_before_anything_compiles(exported, manifest, tmp_path, monkeypatch):
    config, info = tiny_config(f"train.init_from={exported}"), facts_of(tokenizer.load(str(exported)))
    run = Pretraining(config, info, workdir=Workdir(str(tmp_path)), manifest=manifest)
    monkeypatch.setattr(run, "init", lambda *_: pytest.fail("something was to be compiled"))
    with pytest.raises(InputError, match=r"config\.model\.\w+ = "):
        run.initial_state()
