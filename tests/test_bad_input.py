"""Bad input: one sentence that names the culprit, the right exit code, soon, and nothing that was there is lost."""

import fcntl
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from mlm import __main__
from mlm.pretrained import checkpoint_files
from tests import ROOT
from tests.support.corpora import train_tokenizer
from tests.support.processes import environment, run, seconds_of_children, start, train_arguments
from tests.support.refusals import foreign, refuse, snapshot

CONFIGS = [
    (["--config.optimizer.lr=1"], "optimizer.lr", "no such key"),
    (["--config.optimizer.learning_rate=nan"], "optimizer.learning_rate = nan", "finite"),
    (["--config.train.steps=-5"], "train.steps = -5", "from 0 up"),
    (["--config.shards.length=128", "--config.model.positions=64"], "shards.length = 128", "model.positions = 64"),
    (["--config.model.local_attention=9", "--config.model.family=modernbert"], "model.local_attention = 9", "even"),
    (["--config.model.heads=256", "--config.model.family=modernbert"], "model.heads = 256", "rotary positions"),
    (["--config.data.global_batch=30"], "data.global_batch = 30", "data.lanes = 8"),
    (["--config.corpus.sources=wiki"], "corpus.sources", "hf:NAME"),
    (["--config=configs/none.py"], "configs/none.py", "no such file"),
    (["--workdir=requirements.txt/below"], "requirements.txt/below", "can't be written"),
    (["--config.shards.dir=/nowhere/shards"], "/nowhere/shards", "holds no shards"),
]


@pytest.mark.standard
@pytest.mark.parametrize(("arguments", "culprit", "words"), CONFIGS, ids=[case[0][0] for case in CONFIGS])
def test_config_is_refused_in_three_seconds(tmp_path, arguments, culprit, words):
    command = ["train", "--config=configs/base.py", f"--workdir={tmp_path / 'run'}", *arguments]
    before = seconds_of_children()
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mlm", *command],
        cwd=ROOT,
        env=environment(1),
        capture_output=True,
        text=True,
    )
    seconds = seconds_of_children() - before
    sentences = [line for line in process.stderr.splitlines() if not line.startswith("import time:")]
    assert process.returncode == 2, process.stderr
    assert len(sentences) == 1
    assert sentences[0].startswith("mlm train: ")
    assert culprit in sentences[0]
    assert words in sentences[0]
    assert not re.search(r"\| +jax$|\| +tensorflow$", process.stderr, re.MULTILINE), "jax was imported"
    assert seconds < 3, f"{seconds:.1f} s"


@pytest.fixture
def shards(manifest, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(manifest.folder, tmp_path / "shards"))


def truncate(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def cut_at_record(file: pathlib.Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: 16 + int.from_bytes(data[:8], "little")])


def flip(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "truncated": (truncate, "bytes where"),
    "cut at a record": (cut_at_record, "bytes where"),
    "bit flipped": (flip, "SHA-256"),
    "empty": (lambda file: file.write_bytes(b""), "0 bytes"),
    "missing": (lambda file: file.unlink(), "is missing"),
    "extra": (lambda file: shutil.copy(file, file.with_name("dataset-9-1.tfrecord")), "not in manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shards(shards, tmp_path, capsys, damage):
    file = sorted((shards / "train").iterdir())[2]
    change, words = DAMAGES[damage]
    change(file)
    name = "dataset-9-1.tfrecord" if damage == "extra" else file.name
    arguments = train_arguments(tmp_path / "run", str(shards))
    begin = time.process_time()
    refuse(arguments, 4, name, words, capsys=capsys)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (["special_ids"], 3, "special_ids is 3, but must be an object"),
        (["vocab_size"], "600", 'vocab_size is "600"'),
        (["splits", "train", "shards", 0, "records"], "12", 'splits.train.shards[0].records is "12"'),
        (["special_ids", "mask"], {}, "special_ids.mask is an object"),
        (["splits", "train", "shards", 0, "file"], "/etc/hostname", 'shards[0].file is "/etc/hostname"'),
    ],
)
def test_a_hostile_manifest_ends_every_command_in_a_sentence(shards, tmp_path, capsys, place, value, words):
    content = json.loads((shards / "manifest.json").read_text())
    target = content
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    (shards / "manifest.json").write_text(json.dumps(content))
    arguments = train_arguments(tmp_path, str(shards))
    for command in ("train", "evaluate"):
        refuse([command, *arguments[1:]], 4, "manifest.json: ", words, "write the shards again", capsys=capsys)
    assert __main__.main(["doctor", *arguments[1:], "--json"]) == 2
    out, err = capsys.readouterr()
    (finding,) = json.loads(out)["findings"]
    assert finding["level"] == "error" and words in finding["what"] and "manifest.json: " in finding["what"]
    assert "Traceback" not in err


def test_shards_of_another_tokenizer(shards, texts, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    train_tokenizer(texts, tmp_path / "run" / "tokenizer", "bpe")
    refuse(train_arguments(tmp_path / "run", str(shards)), 2, str(shards), "tokenizer", capsys=capsys)


def test_length_lanes_and_splits(shards, tmp_path, capsys):
    arguments = train_arguments(tmp_path / "run", str(shards))
    refuse([*arguments, "--config.shards.length=64"], 2, "shards.length = 64", "32", capsys=capsys)
    wide = ["--config.data.lanes=8", "--config.shards.count=16"]
    refuse([*arguments, *wide], 2, "6 shards", "data.lanes asks for 8", capsys=capsys)
    for file in (shards / "validation").iterdir():
        file.unlink()
    text = (shards / "manifest.json").read_text()
    content = json.loads(text)
    content["splits"]["validation"]["shards"] = []
    (shards / "manifest.json").write_text(json.dumps(content))
    refuse(arguments, 2, "validation split has 0 shards", capsys=capsys)


def test_batch_does_not_fit_the_devices(manifest, tmp_path, capsys):
    arguments = train_arguments(tmp_path / "run", manifest.folder, "data.global_batch=12")
    refuse(arguments, 2, "data.global_batch", "12 rows", "8 devices", capsys=capsys)
    arguments = train_arguments(tmp_path / "run", manifest.folder, "mesh.fsdp=3")
    refuse(arguments, 2, "config.mesh", "8 devices", capsys=capsys)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The functions that jax has compiled, or read from its cache, since the test began."""
    names: list[str] = []

    def listen(event: str, seconds: float, **about: str) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1)(1)
        assert names, "jax no longer reports compilations like this: the test would prove nothing"
        names.clear()
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("length", "settings", "words"),
    [
        (32, ("model.attention=fused",), "rows of 32 tokens"),
        (32, ("model.attention=cudnn",), "a CPU"),
        (1024, ("model.attention=fused", "model.local_attention=258"), "windows of 129 tokens to each side"),
    ],
)
def test_a_kernel_that_can_not_compute_the_model(tokenizer_folder, tmp_path, capsys, compiled, length, settings, words):
    foreign(tmp_path / "shards", np.random.default_rng(0).integers(5, 600, (64, length)))
    shutil.copytree(tokenizer_folder, tmp_path / "run" / "tokenizer")
    sizes = (f"shards.length={length}", f"model.positions={length}", "model.family=modernbert", "model.layers=2")
    arguments = train_arguments(tmp_path / "run", str(tmp_path / "shards"), *sizes, *settings)
    key = settings[0].replace("=", " = ")
    refuse(arguments, 2, f"{key}: the kernel does not support {words}", capsys=capsys)
    assert compiled == []


def test_token_id_over_the_vocabulary(tokenizer_folder, tmp_path, capsys):
    ids = np.random.default_rng(0).integers(5, 600, (64, 32))
    ids[13, 7] = 600  # the vocabulary has 600 entries
    foreign(tmp_path / "shards", ids)
    shutil.copytree(tokenizer_folder, tmp_path / "run" / "tokenizer")
    arguments = train_arguments(tmp_path / "run", str(tmp_path / "shards"))
    refuse(arguments, 4, "dataset-1-16.tfrecord", "record 4", "600", capsys=capsys)


def test_foreign_shard_cut_at_a_record(tokenizer_folder, tmp_path, capsys):
    foreign(tmp_path / "shards", np.random.default_rng(0).integers(5, 600, (64, 32)))
    cut_at_record(tmp_path / "shards" / "train" / "dataset-2-16.tfrecord")
    shutil.copytree(tokenizer_folder, tmp_path / "run" / "tokenizer")
    arguments = train_arguments(tmp_path / "run", str(tmp_path / "shards"))
    refuse(arguments, 4, "dataset-2-16.tfrecord", "has 1 records, but 16 were written", capsys=capsys)


@pytest.fixture(scope="module")
def trained_workdir(manifest, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("trained")
    settings = ("train.steps=6", "checkpoint.every=3", "evaluate.every=0")
    assert __main__.main(train_arguments(workdir, manifest.folder, *settings)) == 0
    return workdir


@pytest.fixture
def workdir(trained_workdir, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(trained_workdir, tmp_path / "workdir"))


@pytest.mark.standard
@pytest.mark.parametrize("family", ["roberta_prelayernorm", "modernbert"])
def test_a_start_from_another_family(trained_workdir, manifest, tmp_path, capsys, compiled, family):
    settings = (f"train.init_from={trained_workdir}", f"model.family={family}")
    sentence = f"model.family = {family}: train.init_from = {trained_workdir} is a roberta"
    refuse(train_arguments(tmp_path, manifest.folder, *settings), 2, sentence, capsys=capsys)
    assert compiled == []


def arguments_for(workdir: pathlib.Path, manifest, *overrides: str) -> list[str]:
    settings = ("train.steps=6", "checkpoint.every=3", "evaluate.every=0")
    return train_arguments(workdir, manifest.folder, *settings, *overrides)


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.standard
def test_damaged_checkpoint(workdir, manifest, capsys):
    file = largest_file(workdir / "checkpoints" / "6" / "state")
    flip(file)
    before = snapshot(workdir / "checkpoints")
    refuse(arguments_for(workdir, manifest), 4, "checkpoints/6", file.name, "on_damage=fallback", capsys=capsys)
    assert snapshot(workdir / "checkpoints") == before

    # Only when told so: from the newest good one, the damaged one kept aside, and the same end as before.
    log = (workdir / "metrics.jsonl").read_text()
    assert __main__.main(arguments_for(workdir, manifest, "checkpoint.on_damage=fallback")) == 0
    assert (workdir / "checkpoints" / "damaged.6").is_dir()
    assert checkpoint_files.complete_steps(workdir / "checkpoints") == [3, 6]
    assert (workdir / "metrics.jsonl").read_text() == log


def test_folder_that_only_looks_like_a_checkpoint(workdir, manifest, capsys):
    (workdir / "checkpoints" / "999999").mkdir()
    log = (workdir / "metrics.jsonl").read_text()
    assert __main__.main(arguments_for(workdir, manifest)) == 0
    assert (workdir / "metrics.jsonl").read_text() == log
    assert (workdir / "checkpoints" / "incomplete.999999").is_dir()


def test_checkpoint_of_another_model_or_config_or_data(workdir, manifest, tmp_path, capsys):
    before = snapshot(workdir)
    err = refuse(
        arguments_for(workdir, manifest, "model.hidden_size=64", "data.seed=1"), 2, "another config", capsys=capsys
    )
    assert "model.hidden_size: 32 -> 64" in err
    assert "data.seed: 0 -> 1" in err
    other = pathlib.Path(shutil.copytree(manifest.folder, tmp_path / "other"))
    text = (other / "manifest.json").read_text()
    content = json.loads(text)
    shard = content["splits"]["train"]["shards"]
    shard[0], shard[1] = shard[1], shard[0]  # the same files in another order are other data
    (other / "manifest.json").write_text(json.dumps(content))
    arguments = train_arguments(workdir, str(other), "train.steps=6", "checkpoint.every=3", "evaluate.every=0")
    refuse(arguments, 2, "other shards", capsys=capsys)
    after = snapshot(workdir)
    assert {k: v for k, v in after.items() if ".lock" not in k} == {k: v for k, v in before.items() if ".lock" not in k}


def test_two_runs_in_one_workdir(workdir, manifest, capsys):
    with (workdir / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refuse(arguments_for(workdir, manifest), 2, str(workdir), "another process", capsys=capsys)


@pytest.mark.slow
def test_disk_full_while_saving(manifest, tmp_path):
    settings = ("train.steps=6", "checkpoint.every=3", "model.hidden_size=64")
    arguments = train_arguments(tmp_path, manifest.folder, *settings)
    _, err = run(arguments, devices=1, program="-m tests.programs.small_disk_train", code=2)
    sentence = next(line for line in err.splitlines() if line.startswith("mlm train: "))
    for words in ("mlm train: ", "checkpoints", "could not be written", "make room"):
        assert words in sentence, err
    assert "Traceback" not in err
    assert checkpoint_files.complete_steps(tmp_path / "checkpoints") == []
    run(arguments, devices=1)  # with room, the same command goes on
    assert checkpoint_files.complete_steps(tmp_path / "checkpoints")[-1] == 6


def test_guard_stops_with_code_3(manifest, tmp_path, capsys):
    settings = ("optimizer.learning_rate=1e30", "train.guard_limit=3", "train.steps=40", "checkpoint.every=0")
    err = refuse(train_arguments(tmp_path, manifest.folder, *settings), 3, "not finite", "guard_limit", capsys=capsys)
    assert "Traceback" not in err
    assert checkpoint_files.complete_steps(tmp_path / "checkpoints") == []


@pytest.mark.standard
def test_terminated_before_the_first_step(manifest, tmp_path):
    process = start(train_arguments(tmp_path, manifest.folder))
    while not (tmp_path / ".lock").exists():  # the data has been checked, jax is being imported
        assert process.poll() is None
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "before it trained a step" in err
