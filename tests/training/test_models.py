"""The step and the loop with real models: meshes, processes that are killed, and what compilers may do to numbers."""

import json
import pathlib
import signal

import jax
import numpy as np
import pytest

from mlm import logs
from mlm.pretrained import checkpoint_files
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.workdir import Workdir
from tests.support.corpora import train_tokenizer, write_shards
from tests.support.processes import DELAYED, kill_when, logged_step, run_together, start, train_arguments
from tests.support.states import assert_same, back_to, state_of
from tests.support.tiny import INFO, assert_close, flat, meshes_of, pretrain, random_batch, slow, tiny_config

MODERNBERT = ("model.family=modernbert", "model.layers=3", "model.local_attention=8")
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")


def train(*overrides: str, mesh: tuple[int, int, int] = (1, 1, 1), count: int = 2):
    """Returns the state after `count` updates, and the metrics of each."""
    devices = jax.devices()[: int(np.prod(mesh))]
    shape = dict(zip(sharding.AXES, mesh, strict=True))
    run = Pretraining(tiny_config(*overrides), INFO, mesh=sharding.make_mesh(**shape, devices=devices))
    state, history = run.init(), []
    for index in range(count):
        state, metrics = run.train_step(state, sharding.put_batch(random_batch(16, index), run.mesh, 16))
        history.append({key: float(value) for key, value in metrics.items() if value.ndim == 0})
    assert run.train_step._cache_size() == 1
    return state, history


def moments(state):
    """The first moments of adamw: after one update, (1 - b1) times the gradient."""
    return next(s.mu for s in jax.tree.leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param((2, 2, 2), (*DROPOUT, "train.accumulate=2"), marks=pytest.mark.standard),
        slow((4, 2, 1), MODERNBERT),
        slow((1, 2, 2), ("model.family=roberta_prelayernorm",)),
    ],
)
def test_meshes_and_accumulation_change_rounding_alone(mesh, settings):
    """Loss and gradient norm of every step, and the first moments, which are the gradient, dropout included."""
    whole = [key for key in settings if not key.startswith("train.accumulate")]
    one, other = train(*whole, "data.global_batch=16"), train(*settings, "data.global_batch=16", mesh=mesh)
    for a, b in zip(one[1], other[1], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert_close(moments(one[0]), moments(other[0]), 1e-3, f"mesh {mesh}")
    if mesh == (2, 2, 2):
        kernel = moments(other[0])["roberta"]["encoder"]["layer"]["0"]["attention"]["self"]["query"]["kernel"]
        assert kernel.addressable_shards[0].data.shape == (16, 16)


@pytest.mark.slow
def test_what_the_step_leaves_as_it_is():
    """Padding of the vocabulary is never learnt; parameters are float32; remat changes no number."""
    state, history = train("optimizer.weight_decay=0", "model.dtype=bfloat16")
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state.params))
    after, before = flat(state.params), flat(Pretraining(tiny_config(), INFO).init().params)
    for name in ("lm_head/bias", "roberta/embeddings/word_embeddings/embedding"):
        assert np.array_equal(after[name][500:512], before[name][500:]), f"{name}: a row of the padding has moved"
    plain, again = train(*DROPOUT), train(*DROPOUT, "model.remat=true")
    assert plain[1][-1]["loss"] == pytest.approx(again[1][-1]["loss"], rel=1e-5)
    assert history[0]["loss"] == pytest.approx(plain[1][0]["loss"], rel=2e-2)
    assert_close(moments(plain[0]), moments(again[0]), 1e-4, "remat")


# A run that is killed -------------------------------------------------------------------------------------------------

SETTINGS = (
    "train.steps=24",
    "checkpoint.every=7",
    "evaluate.every=10",
    "log.every=4",
    "model.hidden_dropout=0.1",
    "masking.end_rate=0.1",
    "optimizer.ema_decay=0.9",
    "data.batch_stages=((8, 6),)",
)


@pytest.fixture(scope="module")
def straight(manifest, tmp_path_factory) -> pathlib.Path:
    """In this process; the others of these runs have one device, too."""
    workdir = tmp_path_factory.mktemp("straight")
    with meshes_of(1):
        pretrain(tiny_config("data.lanes=4", *SETTINGS), Workdir(str(workdir)), manifest)
    return workdir


def assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
    """Every line of the log and every bit of the last state."""
    assert (one / "metrics.jsonl").read_text() == (other / "metrics.jsonl").read_text()
    assert_same(state_of(one, 24), state_of(other, 24))


def go_on(workdir: pathlib.Path, manifest) -> None:
    with meshes_of(1):
        pretrain(tiny_config("data.lanes=4", *SETTINGS), Workdir(str(workdir)), manifest)


@pytest.mark.standard
def test_killed_and_started_again_it_ends_with_the_same_bits(straight, manifest, tmp_path):
    """Within the steps after a checkpoint, by SIGKILL; the log has a line for each of its steps, and none twice."""
    process = start(train_arguments(tmp_path, manifest.folder, *SETTINGS), devices=1, program=DELAYED)
    kill_when(process, lambda: checkpoint_files.complete_steps(tmp_path / "checkpoints") == [7])
    go_on(tmp_path, manifest)
    assert_same_run(straight, tmp_path)
    lines = logs.read(Workdir(str(tmp_path)).metrics, "train")
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20, 24]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1


@pytest.mark.slow
def test_killed_while_it_saves_and_stopped_by_a_signal(straight, manifest, tmp_path):
    """Before there is a checkpoint, while one is written, and by SIGTERM: then it saves at a step that none was due."""
    arguments, folder = train_arguments(tmp_path, manifest.folder, *SETTINGS), tmp_path / "checkpoints"

    def saving() -> bool:
        return any("tmp" in path.name for path in folder.glob("*")) and logged_step(tmp_path) >= 12

    kill_when(start(arguments, devices=1, program=DELAYED), lambda: logged_step(tmp_path) >= 4)
    assert checkpoint_files.complete_steps(folder) == []
    kill_when(start(arguments, devices=1, program=DELAYED), saving)
    process = start(arguments, devices=1, program=DELAYED)
    while logged_step(tmp_path) < 16:
        assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 75, err
    steps = checkpoint_files.complete_steps(folder)
    assert steps[-1] >= 16 and steps[-1] % 7
    go_on(tmp_path, manifest)
    assert_same_run(straight, tmp_path)


@pytest.mark.slow
def test_other_devices_give_the_same_losses(straight, manifest, tmp_path):
    """From the same checkpoint, as two processes of two devices."""
    workdir = back_to(straight, tmp_path / "moved", 14)
    arguments = train_arguments(workdir, manifest.folder, *SETTINGS, "checkpoint.keep=9")
    run_together(arguments, processes=2, devices=2)
    old, new = ([json.loads(line) for line in (path / "metrics.jsonl").open()] for path in (straight, workdir))
    assert [(line["step"], line["kind"]) for line in old] == [(line["step"], line["kind"]) for line in new]
    for a, b in zip(old, new, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_branch_reads_longer_rows(texts, tokenizer_folder, manifest, tmp_path):
    """As modernbert_base_long.py: rows of twice the length, in other batches, and another rotary base."""
    modern = (*MODERNBERT[:1], "model.layers=2", "model.local_attention=16", "data.lanes=2", "checkpoint.every=6")
    with meshes_of(1):
        pretrain(tiny_config(*modern, "train.steps=6"), Workdir(str(tmp_path / "trunk")), manifest)
        longer = write_shards(texts[:400], tmp_path / "shards", tokenizer_folder, length=64)
        config = tiny_config(*modern, f"train.branch_from={tmp_path}/trunk@6", "model.global_rope_theta=160000",
                             "data.global_batch=4", "shards.length=64", "train.steps=8")  # fmt: skip
        task = Pretraining.open(config, Workdir(str(tmp_path / "long")), longer)
        pretrain(config, Workdir(str(tmp_path / "long")), longer)
    assert next(task.batches(6))["input_ids"].shape == (4, 64) and task.tokens_read(8) == 8 * 4 * 64
    assert logs.read(Workdir(str(tmp_path / "long")).metrics)[-1]["loss"] < np.log(600)


@pytest.mark.standard
@pytest.mark.parametrize("kind", ["unigram", slow("bpe"), slow("wordpiece")])
def test_words_are_counted_as_a_person_counts_them(texts, kind, tmp_path):
    """Within a tenth of the words of the documents, cut at white space, whatever the tokenizer does; not indented."""
    flat = [text for text in texts if "\n " not in text][:400]
    workdir = Workdir(str(tmp_path))
    folder = train_tokenizer(texts, tmp_path / "tokenizer", kind, vocab_size=2000)
    manifest = write_shards(flat, tmp_path / "shards", folder)
    with meshes_of(1):
        task = Pretraining.open(tiny_config(), workdir, manifest)
        words = sum(len(text.split()) for number, text in enumerate(flat) if number % 10)
        assert task.words_per_row() == pytest.approx(words / manifest.splits["train"].records, rel=0.1)
        (tmp_path / "tokenizer" / "tokenizer.json").unlink()
        run_of_words = tiny_config("data.lanes=4", "checkpoint.milestones=words:1k")
        with pytest.raises(Exception, match=r"tokenizer.json: there is no such file"):
            pretrain(run_of_words, workdir, manifest)
    assert not workdir.config.exists() and not workdir.checkpoints.exists()
