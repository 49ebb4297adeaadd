"""The writing of shards, ended anywhere: the same bytes, and nothing that was done is done twice."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mlm.data import results
from mlm.errors import InputError
from mlm.workdir import work_folder
from tests import ROOT
from tests.support import processes
from tests.support.corpora import contents, write_jsonl, write_shards, written_texts

LAST = (".blocks", ".dropped", ".json")  # of the files of a task, the one that is written last


@pytest.fixture
def corpus(small, texts, tmp_path):
    return written_texts(texts[:150], tmp_path / "corpus")


def test_ended_at_any_file_it_goes_on(corpus, tokenizer_folder, tmp_path, monkeypatch):
    write_shards(corpus, tmp_path / "alone", tokenizer_folder)
    put, written, limit = results.put_file, [], 0

    def put_file(file, target):
        if len(written) == limit:
            raise KeyboardInterrupt
        put(file, target)
        written.append(str(target))

    monkeypatch.setattr(results, "put_file", put_file)
    for limit in range(3, 200, 7):  # noqa: B007
        try:
            write_shards(corpus, tmp_path / "ended", tokenizer_folder)
            break
        except KeyboardInterrupt:
            assert not (tmp_path / "ended").exists()
    assert contents(tmp_path / "ended") == contents(tmp_path / "alone")
    of_tasks = [file.rpartition(".")[0] for file in written if "/tasks/" in file and file.endswith(LAST)]
    assert len(of_tasks) == len(set(of_tasks)) > 10, "what was done was done again"


def test_a_full_disk_leaves_what_is_done(corpus, tokenizer_folder, tmp_path, monkeypatch):
    put, written = results.put_file, []

    def put_file(file, target):
        if len(written) == 9:
            raise OSError(28, os.strerror(28))
        put(file, target)
        written.append(target)

    with monkeypatch.context() as patch, pytest.raises(InputError, match=r"tasks/.*No space left on device"):
        patch.setattr(results, "put_file", put_file)
        write_shards(corpus, tmp_path / "shards", tokenizer_folder)
    assert all(target.is_file() for target in written)
    leftover = work_folder(str(tmp_path / "shards")) / "tasks" / ".0123.tmp"
    leftover.write_text("of a task that was killed")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(results, "put_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        write_shards(corpus, tmp_path / "shards", tokenizer_folder)
    assert not leftover.exists(), "it would take room"


def start(workdir: pathlib.Path, source: str) -> subprocess.Popen:
    """Runs the command in a process group of its own."""
    settings = (
        f"corpus.sources='{source}'",
        "corpus.validation_fraction=0.1",
        f"tokenizer.path={workdir}/tokenizer",
        "shards.workers=2",
        "shards.count=7",
        "shards.validation_count=2",
        "shards.length=32",
        "data.lanes=2",
    )
    command = ["shards", "--config=configs/base.py", f"--workdir={workdir}", *(f"--config.{each}" for each in settings)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.programs.delayed_results", *command],
        cwd=ROOT,
        env=processes.environment(1),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_killed_it_goes_on(texts, tokenizer_folder, tmp_path):
    source, seen = write_jsonl(tmp_path / "texts.jsonl", texts[:400] + texts[:50]), {}
    alone, killed = (tmp_path / name for name in ("alone", "killed"))
    for folder in (alone, killed):
        shutil.copytree(tokenizer_folder, folder / "tokenizer")
        (folder / "tokenizer" / "recipe.json").write_text(json.dumps({"path": f"{folder}/tokenizer"}))
    processes.finish(start(alone, source))

    def done(folder: pathlib.Path) -> dict[str, int]:
        """The tasks that are done, and when."""
        files = (work_folder(str(folder / "shards")) / "tasks").glob("*")
        return {file.name: file.stat().st_mtime_ns for file in files if file.suffix in LAST}

    total = len(done(alone))
    for moment in (0.1, 0.4, 0.9):
        process = start(killed, source)
        while len(done(killed)) < moment * total:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert seen.items() <= done(killed).items(), "what was done was done again"
        assert not (killed / "shards").exists()
        seen = done(killed)
    processes.finish(start(killed, source))
    assert seen.items() <= done(killed).items()
    assert contents(killed / "shards") == contents(alone / "shards")
