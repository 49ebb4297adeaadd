"""What a command's config and flags name is opened before anything is read or written; `doctor` finds it, too."""

import json
import os
import pathlib
import re
import shutil
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.flax
from safetensors.numpy import load_file, save_file

from mlm import __main__, paths
from mlm.data import corpus, examples, sample, shards, tokenizer
from mlm.export import export
from mlm.workdir import Workdir
from tests.support import labelled_texts
from tests.support.corpora import train_tokenizer, write_jsonl
from tests.support.dask_cluster import free_port
from tests.support.refusals import refuse
from tests.support.tiny import TINY, command

# But for the model's sizes, which then are those of train.init_from.
WITHOUT_SIZES = [
    key
    for key in TINY
    if not re.match(r"model\.(hidden_size|layers|heads|intermediate_size|positions)=", key)
]


def nothing(folder: pathlib.Path) -> None:
    """Leaves the folder as it is."""


def deberta(folder: pathlib.Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "deberta"}))


def another_shape(folder: pathlib.Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["roberta.encoder.layer.1.output.dense.weight"] = np.zeros((64, 63), np.float32)
    save_file(tensors, folder / "model.safetensors")


def cut_short(folder: pathlib.Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def no_tokenizer(folder: pathlib.Path) -> None:
    (folder / "tokenizer.json").write_text("{")


MODELS = [  # command, what is done to a good folder, a setting, and what the sentence names
    ("train", deberta, "", ("model_type = deberta",)),
    ("run", nothing, "model.layers=1", ("model.layers = 1", "has 2")),
    ("run", nothing, "model.family=modernbert", ("model.family = modernbert", "roberta")),
    ("tokenizer", another_shape, "", ("1/output/dense/kernel", "(63, 64)")),
    ("run", cut_short, "", ("weights can't be read",)),
    ("run", no_tokenizer, "", ("tokenizer",)),
]


@pytest.fixture(scope="module")
def good_folder(model, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("good") / "roberta"
    shutil.copytree(model.tokenizer, folder)
    export.write_model(model, folder)
    return folder


@pytest.fixture
def unread(monkeypatch):
    """The test fails if the corpus is listed, read or written, or if weights are read: a model may have many GB."""
    forbid(monkeypatch, corpus.Corpus, "parts")
    forbid(monkeypatch, corpus.Corpus, "read")
    forbid(monkeypatch, safetensors.flax, "load_file")
    forbid(monkeypatch, sample, "draw")
    forbid(monkeypatch, shards, "write")


def forbid(monkeypatch, place: object, name: str) -> None:
    monkeypatch.setattr(place, name, lambda *_, **__: pytest.fail(f"{name} was called"))


def check(name: str, tmp_path, settings: list[str], *words: str, capsys, doctor=True) -> None:
    """Asserts that a command refuses without writing, in a sentence with `words` that `doctor` has, too."""
    workdir = tmp_path / "run"
    refuse(command(name, workdir, *settings), 2, *words, capsys=capsys)
    assert not workdir.exists(), "something was written"
    if doctor:
        assert __main__.main([*command("doctor", workdir, *settings), "--json"]) == 2
        found = json.loads(capsys.readouterr().out)["findings"]
        errors = [finding["what"] for finding in found if finding["level"] == "error"]
        assert any(all(word in what for word in words) for what in errors), found
        assert not workdir.exists()


@pytest.mark.parametrize(("name", "change", "setting", "words"), MODELS)
@pytest.mark.usefixtures("unread")
def test_models(good_folder, tmp_path, capsys, name, change, setting, words):
    folder = pathlib.Path(shutil.copytree(good_folder, tmp_path / "model"))
    change(folder)
    settings = [*WITHOUT_SIZES, f"train.init_from={folder}", *filter(None, [setting])]
    check(name, tmp_path, settings, *words, capsys=capsys)


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        (None, "package is missing"),
        ("def login():\n    raise ValueError('no API key,\\nlog in')\n", "no API key, log in"),
    ],
)
@pytest.mark.usefixtures("unread")
def test_wandb_without_its_package_or_a_key(tmp_path, capsys, monkeypatch, stub, words):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    if stub is None:
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        (tmp_path / "wandb.py").write_text(stub)
        monkeypatch.syspath_prepend(tmp_path)
    words = ("log.wandb = 'mine'", words)
    check("run", tmp_path, [*TINY, "log.wandb=mine"], *words, capsys=capsys, doctor=False)


@pytest.mark.usefixtures("unread")
def test_warmup_steps_of_epochs_that_are_not_counted_yet(tmp_path, capsys):
    settings = [*TINY, "train.steps=0", "train.epochs=1", "schedule.warmup=30"]
    words = ("schedule.warmup = 30", "train.epochs", "share")
    check("run", tmp_path, settings, *words, capsys=capsys)


def test_doctor_refuses_a_config_of_classify(tmp_path, capsys):
    line = ["doctor", "--config=configs/classify_banking77.py", f"--workdir={tmp_path}/run"]
    refuse(line, 2, "classify.train = csv:banking77", "pretraining", capsys=capsys)


def text(file: pathlib.Path, content: bytes) -> str:
    file.write_bytes(content)
    return f"text:{file}"


SOURCES = {
    "no field": (
        lambda at: write_jsonl(at, ["a text"], field="body"),
        ("corpus.sources", "no field 'text'"),
    ),
    "no file": (lambda at: f"text:{at}/*.txt", ("corpus.sources", "no such file")),
    "not UTF-8": (lambda at: text(at, b"caf\xe9\n"), ("line 1", "UTF-8")),
    "no text": (lambda at: text(at, b"\xef\xbb\xbf \n\t\r\n\n"), ("corpus.sources", "no text")),
}


@pytest.mark.parametrize("fault", SOURCES)
def test_sources(tmp_path, capsys, fault, monkeypatch):
    forbid(monkeypatch, sample, "draw")
    forbid(monkeypatch, shards, "write")
    make, words = SOURCES[fault]
    source = make(tmp_path / "source")
    check("run", tmp_path, [*TINY, f"corpus.sources={source}"], *words, capsys=capsys)
    good = write_jsonl(tmp_path / "good.jsonl", ["a text"])
    settings = [*TINY, f"corpus.sources={good}", f"corpus.keep_out={source}"]
    check("shards", tmp_path, settings, "corpus.keep_out", *words[1:], capsys=capsys)


@pytest.mark.standard
def test_other_folders(manifest, family, tmp_path, capsys, texts, unread):
    """Shards, validation sets, tokenizers and branches that are missing, or do not fit."""
    other = train_tokenizer(texts[:50], tmp_path / "other", kind="bpe")
    missing = f"{tmp_path}/none"
    another = f"tokenizer.path={other}"
    folder = f"shards.dir={manifest.folder}"
    branch = f"train.branch_from={family.root}@"
    for name, settings, *words in (
        ("run", [f"evaluate.sets=(('news', '{missing}'),)"], "evaluate.sets", missing),
        ("run", [f"tokenizer.path={missing}"], missing),
        ("run", [f"{branch}5", "train.steps=20"], "train.branch_from", "step 5", "4, 8, 12"),
    ):
        check(name, tmp_path, [*TINY, "data.lanes=4", *settings], *words, capsys=capsys)
    for name, settings, *words in (
        ("run", [f"evaluate.sets=(('n', '{manifest.folder}'),)", another], "evaluate.sets", other),
        ("run", [f"data.mixture=(('{manifest.folder}', 1.0),)", another], "data.mixture", other),
        ("run", [folder, "shards.length=40", another], "shards.length = 40"),
        ("train", [folder, another], other),
        ("run", [f"{branch}8", "model.layers=2"], "train.branch_from", "can't change"),
        ("run", [f"{branch}8", "train.steps=6"], "train.branch_from", "step 8"),
    ):
        settings = [*TINY, "data.lanes=4", *settings]
        check(name, tmp_path, settings, *words, capsys=capsys, doctor=False)


@pytest.mark.standard
def test_buckets_that_do_not_answer(trained_workdir, manifest, tmp_path, capsys, monkeypatch):
    """Within seconds, where their client tries for minutes; a kind of path whose client is not installed."""
    begin = time.monotonic()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{free_port()}")
    paths._unreachable.cache_clear()
    run = [*TINY, "data.lanes=4", f"shards.dir={manifest.folder}"]
    for setting, name in (
        ("train.init_from=gs://b/run@10", "gs://b/run@10"),
        ("evaluate.sets=(('news', 'gs://b/news/shards'),)", "gs://b/news/shards"),
        ("tokenizer.path=nowhere://b/tokenizer", "nowhere://b/tokenizer"),
    ):
        settings = [*run, setting]
        check("train", tmp_path, settings, name, capsys=capsys, doctor="sets" in setting)
    scores = ["evaluate", f"--workdir={trained_workdir.root}", "--model=https://127.0.0.1:9/a"]
    for arguments in (
        ["predict", "--model=gs://b/run", "a"],
        ["report", "--workdir=gs://b/run"],
        scores,
    ):
        refuse(arguments, 2, "//", "can't be reached", capsys=capsys)
    paths._unreachable.cache_clear()
    assert time.monotonic() - begin < 20


def test_tables(trained_workdir, tmp_path, capsys, monkeypatch):
    """Columns of the first row, before any table is read as a whole."""
    forbid(monkeypatch, examples, "read_tables")
    start = f"train.init_from={trained_workdir.root}"
    good = labelled_texts.settings(tmp_path, str(trained_workdir.tokenizer), start)
    words = [f"the {number} words" for number in range(300)]
    other = train_tokenizer(words, tmp_path / "other", kind="bpe", vocab_size=280)
    bare = labelled_texts.write_csv(tmp_path / "bare.csv", [{"text": "a text", "topic": "x"}])
    texts = tmp_path / "texts"
    texts.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), texts / "train.parquet")
    for key, value, *words in (
        ("classify.validation", bare, "no column 'label'", "topic"),
        ("classify.test", f"hf:{texts}#train", "no column 'label'"),
        ("classify.predict", (("new", f"jsonl:{tmp_path}/none.jsonl"),), "none.jsonl"),
        ("train.init_from", "/no/such/model", " = /no/such/model"),
        ("classify.length", 40, " = 40", "32 tokens"),
        ("tokenizer.path", other, "train.init_from", other),
    ):
        settings = [*good, f"{key}={value}"]
        words = words if key == "tokenizer.path" else [key, *words]
        check("classify", tmp_path, settings, *words, capsys=capsys, doctor=False)
    pairs = write_jsonl(tmp_path / "pairs.jsonl", ["a text"], field="sentence_good")
    line = [*command("evaluate", trained_workdir.root), f"--pairs={pairs}"]
    refuse(line, 2, "--pairs", "sentence_bad", capsys=capsys)


def test_the_runs_of_a_sweep_are_checked_before_the_first(
    trained_workdir, manifest, tokenizer_folder, tmp_path, capsys
):
    data = (f"shards.dir={manifest.folder}", f"tokenizer.path={tokenizer_folder}", "data.lanes=4")
    line = command("train", tmp_path / "runs", *WITHOUT_SIZES, *data)
    vary = ("--vary", "train.seed=0,1", f"train.init_from={trained_workdir.root},/no/such/model")
    refuse(["sweep", *line, *vary], 2, "/no/such/model", capsys=capsys)
    assert not (tmp_path / "runs").exists()


# Sizes and tokenizer of the model ------------------------------------------------------------------------------------


@pytest.mark.standard
@pytest.mark.usefixtures("one_device")
def test_continued_pretraining_needs_no_sizes(good_folder, texts, tmp_path, capsys):
    """They, the vocabulary and the tokenizer are the model's; a finished run needs the model no more."""
    copy = shutil.copytree(good_folder, tmp_path / "model")
    workdir = Workdir(str(tmp_path / "run"))
    train = command(
        "train",
        workdir.root,
        *WITHOUT_SIZES,
        "data.lanes=4",
        "shards.count=4",
        "shards.validation_count=1",
        "shards.workers=1",
        "corpus.validation_fraction=0.1",
        f"corpus.sources={write_jsonl(tmp_path / 'corpus.jsonl', texts[:300])}",
        "train.steps=1",
        f"train.init_from={copy}",
    )
    assert __main__.main(["shards", *train[1:]]) == __main__.main(train) == 0
    err = capsys.readouterr().err
    assert f"from train.init_from = {copy}: " in err and "newly initialized" not in err
    saved = workdir.config.read_text()
    config = json.loads(saved)
    sizes = [config["model"][key] for key in ("family", "hidden_size", "layers")]
    assert sizes == ["roberta", 64, 2] and config["tokenizer"]["path"] == str(copy)
    assert config["shards"]["length"] == 32 and config["tokenizer"]["vocab_size"] == 1000
    assert tokenizer.fingerprint(str(copy)) == tokenizer.fingerprint(str(workdir.tokenizer))
    shutil.rmtree(copy)
    before = workdir.metrics.read_bytes()
    assert __main__.main(train) == 0, "it is finished"
    assert workdir.metrics.read_bytes() == before and workdir.config.read_text() == saved


DEEP = """
from configs.base import get_config as base
def get_config():
    config = base()
    config.model.layers, config.tokenizer.lowercase = 4, True
    return config
"""


def test_what_the_config_says_stays(good_folder, modernbert_folder, trained_workdir, tmp_path):
    """On the command line or in the file; a tiled model keeps all sizes of the config."""
    from mlm.commands import common

    def read(start: object, *settings: str, file: object = "configs/base.py"):
        line = ["run", f"--config={file}", f"--workdir={tmp_path}/run"]
        args = __main__.parser("run").parse_args(line)
        return common.read_config(args, [f"train.init_from={start}", *settings], starts=True)

    def sizes(config) -> tuple:
        return config.model.layers, config.model.hidden_size, config.tokenizer.path

    for settings, expected in (
        ([], (2, 64, str(good_folder))),
        (["tokenizer.kind=bpe"], (2, 64, "")),
        ([f"tokenizer.path={modernbert_folder}"], (2, 64, modernbert_folder)),
        (["model.init=tiled"], (12, 768, str(good_folder))),
    ):
        assert sizes(read(good_folder, *settings)) == expected
    longer = read(good_folder, "model.positions=64", "shards.length=48")
    assert (longer.model.positions, longer.shards.length, longer.model.layers) == (64, 48, 2)
    rotary = read(modernbert_folder).model
    rest = (rotary.family, rotary.global_rope_theta, rotary.local_attention)
    assert rest == ("modernbert", 9000, 8)
    file = tmp_path / "deep.py"
    file.write_text(DEEP)
    assert sizes(read(good_folder, file=file)) == (4, 64, "")
    # in the place of the file's own model
    own_start = read(good_folder, file="configs/continue_wikitext103.py")
    assert sizes(own_start) == (2, 64, str(good_folder))
    assert own_start.model.family == "roberta" and own_start.train.epochs == 3
    assert own_start.shards.length == own_start.model.positions == 32
    named = read(f"{trained_workdir.root}@5")
    assert sizes(named) == (2, 64, f"{trained_workdir.root}/tokenizer")
