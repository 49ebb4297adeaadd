"""gs:// against an emulator: shards, tokenizer, checkpoints, logs, report, export and the lock.

What reads shards in training, tf.data, has a client that can't be pointed at an emulator: here the shards of a run are
local, and those in the bucket are read by everything else.
"""

import json
import pathlib
import platform
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import gcsfs.retry
import jax.numpy as jnp
import numpy as np
import pytest

from mlm import lease as leases
from mlm import logs
from mlm.data import shards
from mlm.data.manifest import holds_foreign_shards, load_manifest, verify
from mlm.data.write_shard import find_documents
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, children, local_folder, replacing, sizes, write_text
from mlm.pretrained import checkpoint_files
from mlm.training import checkpoint
from mlm.workdir import Workdir, lock, work_folder
from tests.support import processes
from tests.support.corpora import contents, corpus_of, write_jsonl, write_shards
from tests.support.tiny import tiny_config


def test_a_listing_is_not_kept(bucket, emulator):
    folder = UPath(bucket)
    write_text(folder / "x.json", "{}")
    (folder / "b" / "deep.txt").write_text("deep")
    assert sizes(folder) == {"x.json": 2} and sizes(folder / "absent") == {}
    name = (folder / "later").path.partition("/")[2]
    query = urllib.parse.urlencode({"uploadType": "media", "name": name})
    url = f"{emulator}/upload/storage/v1/b/bucket/o?{query}"
    urllib.request.urlopen(url, data=b"by another host").close()
    assert [path.name for path in children(folder)] == ["b", "later", "x.json"]
    with pytest.raises(FileNotFoundError):
        local_folder(f"{bucket}/nowhere")


def test_a_replacement_that_was_cut_short_is_known_as_one(bucket, monkeypatch):
    folder = UPath(bucket) / "export"
    names = ("a", "proof", "z")
    for text in ("old", "new"):
        with replacing(folder, last="proof") as new:
            new.mkdir()
            for name in names:
                (new / name).write_text(text)
        found = {path.name: path.read_text() for path in children(folder)}
        assert found == dict.fromkeys(names, text)
    monkeypatch.setattr("mlm.paths.put_file", lambda file, target: 1 / 0)
    with pytest.raises(ZeroDivisionError), replacing(folder, last="proof") as new:
        new.mkdir()
        (new / "a").write_text("newest")
    assert {path.name for path in children(folder)} == {"a", "proof.begun", "z"}


@pytest.mark.standard
def test_shards_in_a_bucket(bucket, texts, tokenizer_folder, tmp_path, monkeypatch):
    """Read from a bucket and written to it: what a disk holds. Stopped midway, it goes on where it was."""
    folder = f"{bucket}/shards"
    local = write_jsonl(tmp_path / "texts.jsonl", texts[:400])
    remote = f"jsonl:{bucket}/texts*.jsonl"
    UPath(f"{bucket}/texts.jsonl").write_bytes((tmp_path / "texts.jsonl").read_bytes())
    write_shards(corpus_of((local,)), tmp_path / "shards", tokenizer_folder)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(shards, "summarize", lambda *_, **__: 1 / 0)
        write_shards(corpus_of((remote,)), folder, tokenizer_folder)
    kept = modified(work_folder(folder) / "tasks") | modified(UPath(folder))
    assert len(kept) > 15
    # What a kill in the middle of the shards leaves is not taken for the shards of another program.
    assert not holds_foreign_shards(folder)
    with pytest.raises(InputError, match="not complete"):
        load_manifest(folder, tokenizer_folder=tokenizer_folder)
    with pytest.raises(InputError, match="something else"):
        write_shards(corpus_of((remote,)), folder, tokenizer_folder, source="others")
    made = write_shards(corpus_of((remote,)), folder, tokenizer_folder)
    again = modified(UPath(folder))
    both = [name for name in kept if name in again and "parts.json" not in name]
    assert len(both) >= 11, "those of the training split"
    assert all(again[name] == kept[name] for name in both), "a whole shard was written again"
    found = contents(folder)
    expected = contents(tmp_path / "shards")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == ["/documents/parts.json"]
    assert children(work_folder(folder)) == []
    verify(load_manifest(folder))
    assert find_documents(made, "train", 3)[0][0] == remote
    shard = UPath(folder) / made.splits["train"].shards[1].file
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(DamageError, match="dataset-1-"):
        verify(load_manifest(folder))


def modified(folder: UPath) -> dict[str, object]:
    """When each file below a folder was written."""
    return {str(path): path.stat().st_mtime for path in folder.rglob("*") if path.is_file()}


@pytest.mark.standard
def test_checkpoints_in_a_bucket(bucket):
    folder = UPath(bucket) / "checkpoints"
    state = {"a": jnp.arange(1000.0)}
    with checkpoint.Checkpoints(folder, keep=2) as checkpoints:
        for step, score in ((1, 0.1), (2, 0.9), (3, 0.8), (4, 0.7)):
            meta = {"format": checkpoint_files.FORMAT, "step": step, "config": tiny_config()}
            checkpoints.save(step, {"a": state["a"] * step}, meta, score)
    assert checkpoint_files.complete_steps(folder) == [1, 3, 4], "two of the newest, and the best"
    assert checkpoint_files.read_meta(folder, 4) == meta
    file = next(path for path in (folder / "4" / "state" / "d").iterdir() if path.is_file())
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DamageError, match=file.name):
        checkpoint_files.choose(folder, on_damage="stop")
    assert checkpoint_files.choose(folder, on_damage="fallback") == 3
    write_text(folder / "9" / "state" / "d" / "abc", "half")  # of a kill while orbax wrote it
    with checkpoint.Checkpoints(folder, keep=2) as checkpoints:
        restored = checkpoint.restore(folder, 3, state)
        checkpoints.save(6, restored, {"step": 6}, None)
    assert np.array_equal(restored["a"], 3 * np.arange(1000.0))
    assert checkpoint_files.complete_steps(folder) == [1, 3, 6]
    names = {path.name for path in children(folder)}
    assert "damaged.4" in names and not {"4", "9"} & names


def test_a_log_is_put_anew_now_and_then(bucket, monkeypatch):
    path = UPath(bucket) / "metrics.jsonl"
    log = logs.Lines(path)
    for step in range(100):
        log.append({"step": step, "kind": "train"})
    assert not path.exists(), "an object may be replaced about once a second"
    log.flush()
    put = path.stat().st_mtime
    log.flush()
    assert path.stat().st_mtime == put
    assert [line["step"] for line in logs.read(path)] == list(range(100))
    monkeypatch.setattr(logs, "EVERY", 0.0)
    log.append({"step": 100, "kind": "train"})
    logs.cut(path, 50)
    again = logs.Lines(path)
    again.append({"step": 51, "kind": "train"})
    assert [line["step"] for line in logs.read(path)] == list(range(52))


@pytest.mark.standard
def test_one_process_at_a_time(bucket, monkeypatch):
    monkeypatch.setattr(leases, "RENEW", 0.3)
    monkeypatch.setattr(leases, "STALE", 3.0)
    folder = UPath(bucket)
    with lock(folder), pytest.raises(InputError, match="another process"), lock(folder):
        pass
    assert children(folder) == []
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for host, least in (("another", 3.0), (platform.node(), 0.0)):
        write_text(folder / ".lock", json.dumps({"host": host, "process": gone.pid}))
        begin = time.monotonic()
        with lock(folder):
            assert time.monotonic() - begin >= least
        assert children(folder) == []


@pytest.mark.standard
def test_a_lease_is_renewed_and_deleted_if_it_is_still_the_same(bucket, monkeypatch):
    """By a condition of each request, which the emulator does not read; what a slower process has seen is gone."""
    lease = leases.Lease(UPath(bucket) / ".lock")
    generation = lease.create({"host": "here"})
    assert lease.renew(generation, 1) and lease.read()[0] == generation
    with pytest.raises(FileExistsError):
        lease.create({"host": "another"})
    asked = []

    def refuse(method, *_, **kwargs):
        asked.append((method, kwargs["ifGenerationMatch"]))
        raise gcsfs.retry.HttpError({"code": 412, "message": "conditionNotMet"})

    monkeypatch.setattr(lease.path.fs, "call", refuse)
    assert not lease.renew("7", 2)
    with pytest.raises(FileNotFoundError):  # the takeover waits on
        lease.delete("7")
    assert asked == [("PATCH", "7"), ("DELETE", "7")]


def test_a_bucket_that_is_not_there_is_told(emulator):
    with pytest.raises(InputError, match="gs://nowhere/run"):
        Workdir("gs://nowhere/run")


@pytest.mark.slow
def test_a_run_in_a_bucket_is_the_run_on_a_disk(bucket, manifest, tokenizer_folder, tmp_path):
    settings = (
        "train.steps=20",
        "checkpoint.every=7",
        "evaluate.every=10",
        "log.every=2",
        "log.tensorboard=true",
    )
    local = tmp_path / "run"
    for workdir in (str(local), f"{bucket}/run"):
        arguments = processes.train_arguments(workdir, manifest.folder, *settings)
        if workdir != str(local):
            started = processes.start(arguments, program=processes.DELAYED)
            path = UPath(workdir) / "checkpoints" / "7" / "hashes.json"
            processes.kill_when(started, path.is_file)
        processes.run(arguments)
    run = UPath(f"{bucket}/run")
    assert (run / "metrics.jsonl").read_text() == (local / "metrics.jsonl").read_text()
    saved, expected = (json.loads((at / "config.json").read_text()) for at in (run, local))
    assert saved == expected
    starts = [line for line in logs.read(run / "timing.jsonl") if line["kind"] == "start"]
    assert [line["step"] for line in starts] == [0, 7], (
        "the first start's lines came before its checkpoint"
    )
    assert len(children(run / "tensorboard")) == 2 and not pathlib.Path("gs:").exists()
    for folder in (local, run):
        with replacing(UPath(folder) / "tokenizer", last="tokenizer.json") as new:
            new.mkdir()
            for file in pathlib.Path(tokenizer_folder).iterdir():
                (new / file.name).write_bytes(file.read_bytes())
    assert checkpoint_files.choose(run / "checkpoints", on_damage="stop") == 20
    for workdir in (str(local), str(run)):
        processes.run(["export", f"--workdir={workdir}"])
        processes.run(["report", f"--workdir={workdir}"])
    assert "<html" in (run / "report.html").read_text()
    there, here = (contents(folder / "export") for folder in (run, UPath(local)))
    assert there.keys() == here.keys()
    for name in there:
        if name.endswith((".safetensors", ".msgpack", "proof.json")):
            assert there[name] == here[name]
    out, _ = processes.run(["predict", f"--model={run}/export", "It is the <mask>."])
    assert "It is the" in out
