"""Shards written by several hosts that share a folder: the same bytes, and only what is missing is done again."""

import contextlib
import hashlib
import itertools
import json
import pathlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from mlm.data import blocks, corpus, hosts, shards, work
from mlm.data.hosts import Hosts
from mlm.data.manifest import load_manifest, work_folder
from mlm.errors import DamageError, InputError, PreemptedError
from tests import processes
from tests.fixtures import slow
from tests.fixtures_data import COUNTS, LENGTH

DELAYED = "tests/delayed_shards.py"  # small blocks, and time to kill it in


def contents(folder: pathlib.Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def arguments(texts, tokenizer_folder, tmp_path_factory) -> Callable[..., list[str]]:
    """Of the command, for a workdir."""
    file = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:600]))
    settings = (f"corpus.sources='jsonl:{file}'", "corpus.validation_fraction=0.1", "shards.workers=1")
    settings += (f"tokenizer.path={tokenizer_folder}", "shards.count=7", "shards.validation_count=2")
    settings += ("shards.length=32", "model.positions=64", "data.lanes=2")

    def of(workdir: pathlib.Path, *more: str) -> list[str]:
        keys = [f"--config.{text}" for text in settings]
        return ["shards", "--config=configs/base.py", f"--workdir={workdir}", *keys, *more]

    return of


@pytest.fixture(scope="module")
def alone(arguments, tmp_path_factory) -> pathlib.Path:
    """What one host writes."""
    workdir = tmp_path_factory.mktemp("alone")
    processes.run(arguments(workdir))
    return workdir


def start_hosts(arguments: list[str], count: int, program: str = DELAYED) -> list[subprocess.Popen]:
    places = ([f"--processes={count}", f"--process-id={index}"] for index in range(count))
    return [processes.start([*arguments, *place], program=program) for place in places]


def finish(started: list[subprocess.Popen]) -> list[str]:
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(errors)
    return errors


def written(workdir: pathlib.Path) -> dict[str, int]:
    """The blocks that are whole, and when they were written; those that are gone while we look are left out."""
    found = {}
    for path in work_folder(str(workdir / "shards")).glob("blocks-*/*"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.stat().st_mtime_ns
    return found


@pytest.fixture
def workdir(alone, tmp_path) -> pathlib.Path:
    """With the tokenizer: what makes it takes longer than the shards."""
    shutil.copytree(alone / "tokenizer", tmp_path / "tokenizer")
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after"),
    [slow(1, 1), (2, 3), slow(3, 2)],
)
def test_killed_in_mid_run_it_does_only_what_is_missing(alone, arguments, workdir, before, after):
    tmp_path = workdir
    started = start_hosts(arguments(tmp_path), before)
    processes.kill_when(started[-1], lambda: len(written(tmp_path)) >= 6)
    for process in started[:-1]:
        process.kill()
        process.communicate()
    kept = written(tmp_path)
    assert not (tmp_path / "shards").exists()
    again = start_hosts(arguments(tmp_path), after)
    seen: dict[str, int] = {}
    while any(process.poll() is None for process in again):
        seen |= written(tmp_path)
        time.sleep(0.01)
    finish(again)
    assert contents(tmp_path / "shards") == contents(alone / "shards")
    assert {name: seen[name] for name in kept} == kept, "a block that was whole was written again"
    assert len(seen) > len(kept), "it was killed too late"


@pytest.mark.slow
def test_killed_after_the_blocks_it_keeps_the_shards_that_are_whole(alone, arguments, workdir):
    tmp_path = workdir

    def whole() -> dict[str, int]:
        """The shards that have a note, and when they were written."""
        found = {}
        for note in work_folder(str(tmp_path / "shards")).glob("*/notes/*"):
            split, shard, records, *_ = note.name.split("-")
            file = note.parents[1] / "shards" / split / f"dataset-{shard}-{records}.tfrecord"
            found[f"{split}/{file.name}"] = file.stat().st_mtime_ns
        return found

    [process] = start_hosts(arguments(tmp_path), 1)
    processes.kill_when(process, lambda: len(whole()) >= 3)
    kept = whole()
    assert 3 <= len(kept) < 9, "the test means to kill it between two shards"
    finish(start_hosts(arguments(tmp_path), 1))
    assert contents(tmp_path / "shards") == contents(alone / "shards")
    files = {f"{p.parent.name}/{p.name}": p.stat().st_mtime_ns for p in (tmp_path / "shards").rglob("*.tfrecord")}
    assert {name: files[name] for name in kept} == kept, "a shard that was whole was written again"


def test_a_command_that_was_started_twice_is_refused(arguments, workdir):
    tmp_path = workdir
    started = start_hosts(arguments(tmp_path), 2)
    processes.kill_when(started[1], lambda: len(written(tmp_path)) >= 1)
    _, words = processes.run([*arguments(tmp_path), "--processes=2", "--process-id=0"], code=2)
    assert "another process" in words
    started[0].kill()
    started[0].communicate()


# In this process: two hosts as two threads, which share the folder alone.


def write(texts: list[str], folder: pathlib.Path, tokenizer_folder: str, place: Hosts, **settings):
    stream = (corpus.Document(text, "train" if n % 10 else "validation") for n, text in enumerate(texts))
    fixed = {"length": LENGTH, "counts": COUNTS, "source": "texts", "workers": 1}
    return shards.write(
        stream, tokenizer_folder=tokenizer_folder, folder=str(folder), hosts=place, **(fixed | settings)
    )


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_DOCUMENTS", 25)
    monkeypatch.setattr(hosts, "REPORT_EVERY", 0.2)
    monkeypatch.setattr(work, "RESTART_TIME", 0.5)


def run_hosts(count: int, texts: list[str], folder: pathlib.Path, tokenizer_folder: str, **settings) -> list:
    """What each of the hosts returns or raises."""
    ends: dict[int, object] = {}

    def host(index: int) -> None:
        try:
            ends[index] = write(texts, folder, tokenizer_folder, Hosts(count, index, timeout=60.0), **settings)
        except Exception as error:
            ends[index] = error

    threads = [threading.Thread(target=host, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    return [ends[index] for index in range(count)]


@pytest.mark.parametrize("count", [2, 3])
def test_several_hosts_write_what_one_writes(small, texts, tokenizer_folder, tmp_path, count):
    """The manifest included."""
    few = texts[:200]
    one = write(few, tmp_path / "one", tokenizer_folder, Hosts())
    made = run_hosts(count, few, tmp_path / "several", tokenizer_folder)
    assert [manifest.fingerprint for manifest in made] == [one.fingerprint] * count
    assert contents(tmp_path / "several") == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "several"]


def test_a_host_that_does_not_come_is_named(small, texts, tokenizer_folder, tmp_path, capfd):
    with pytest.raises(PreemptedError) as error:
        write(texts[:400], tmp_path / "shards", tokenizer_folder, Hosts(3, 1, timeout=2.0))
    for words in ("blocks of host 0", "blocks of host 2", "no sign of host 0, 2", "config.shards.patience"):
        assert words in str(error.value)
    assert "host 1," not in str(error.value)
    assert 1 <= capfd.readouterr().err.count("waiting for") <= 12
    assert not (tmp_path / "shards").exists()


def test_hosts_that_read_different_documents_are_told_apart(small, monkeypatch, texts, tokenizer_folder, tmp_path):
    def write_own(stream, **settings):
        return real(stream if settings["hosts"].index == 0 else itertools.chain(stream, [extra]), **settings)

    real, extra = shards.write, corpus.Document("something else", "train")
    monkeypatch.setattr(shards, "write", write_own)
    ends = run_hosts(2, texts[:200], tmp_path / "shards", tokenizer_folder)
    assert "host 1" in str(ends[0]) and "reads other documents" in str(ends[0])
    assert isinstance(ends[1], InputError)
    assert not (tmp_path / "shards").exists()


def test_a_corpus_that_was_changed_after_a_kill_is_read_anew(small, texts, tokenizer_folder, tmp_path):
    """What is left of the old one is never mixed in, though the config says the same."""

    def stopped(some):
        yield from some
        raise InputError("stop")

    with pytest.raises(InputError, match="stop"):
        shards.write(
            stopped([corpus.Document(text, "train") for text in texts[:300]]),
            tokenizer_folder=tokenizer_folder,
            folder=str(tmp_path / "one"),
            length=LENGTH,
            counts=COUNTS,
            source="texts",
            workers=1,
        )
    old = list(work_folder(str(tmp_path / "one")).glob("blocks-*/*"))
    assert len(old) == 12
    changed = texts[:50] + texts[100:400]
    made = [write(changed, tmp_path / name, tokenizer_folder, Hosts()) for name in ("one", "two")]
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert made[0].fingerprint == made[1].fingerprint


def test_blocks_are_used_for_other_rows_but_not_for_another_tokenizer(small, texts, tokenizer_folder, tmp_path):
    with pytest.raises(InputError, match=r"shards\.count"):
        write(texts[:400], tmp_path / "shards", tokenizer_folder, Hosts(), counts={"train": 99_999, "validation": 1})
    before = {path: path.stat().st_mtime_ns for path in work_folder(str(tmp_path / "shards")).glob("blocks-*/*")}
    with pytest.raises(InputError, match=r"shards\.count"):
        write(texts[:400], tmp_path / "shards", tokenizer_folder, Hosts(), counts={"train": 99_998, "validation": 1})
    after = {path: path.stat().st_mtime_ns for path in work_folder(str(tmp_path / "shards")).glob("blocks-*/*")}
    assert before == after and before
    with pytest.raises(InputError, match=r"shards\.count"):
        fixed = {"counts": {"train": 99_999, "validation": 1}, "source": "others"}
        write(texts[:400], tmp_path / "shards", tokenizer_folder, Hosts(), **fixed)
    assert len(list(work_folder(str(tmp_path / "shards")).glob("blocks-*"))) == 2
    write(texts[:400], tmp_path / "shards", tokenizer_folder, Hosts())
    assert not work_folder(str(tmp_path / "shards")).exists()


def test_a_block_that_was_cut_is_found(small, texts, tokenizer_folder, tmp_path):
    """A power cut may leave a file with its name and without its end: it counts as missing."""
    with pytest.raises(InputError, match=r"shards\.count"):
        write(texts[:400], tmp_path / "shards", tokenizer_folder, Hosts(), counts={"train": 99_999, "validation": 1})
    file = sorted(work_folder(str(tmp_path / "shards")).glob("blocks-*/*"))[3]
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])
    with pytest.raises(DamageError, match=file.name):
        blocks.read(str(file), np.dtype(np.uint16))
    made = write(texts[:400], tmp_path / "shards", tokenizer_folder, Hosts())
    assert made == load_manifest(made.folder)
    assert made.fingerprint == write(texts[:400], tmp_path / "other", tokenizer_folder, Hosts()).fingerprint
