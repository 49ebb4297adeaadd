"""The writing of shards, killed again and again: the same bytes, and nothing that was done is done twice."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mlm.workdir import work_folder
from tests import ROOT
from tests.support import processes
from tests.support.corpora import contents, write_jsonl

pytestmark = pytest.mark.standard

LAST = (".blocks", ".dropped", ".json")  # of the files of a task, the one that is written last


def start(workdir: pathlib.Path, source: str, largest: int = 2**40) -> subprocess.Popen:
    """Runs the command in a process group of its own, which can't write a file beyond `largest` bytes."""
    workers = 2 if largest == 2**40 else 1  # of whose tasks the first is done before the second begins
    settings = (
        f"corpus.sources='{source}'",
        "corpus.validation_fraction=0.1",
        f"tokenizer.path={workdir}/tokenizer",
        f"shards.workers={workers}",
        "shards.count=7",
        "shards.validation_count=2",
        "shards.length=32",
        "data.lanes=2",
    )
    command = ["shards", "--config=configs/base.py", f"--workdir={workdir}", *(f"--config.{each}" for each in settings)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.programs.delayed_results", *command],
        cwd=ROOT,
        env=processes.environment(1) | {"MLM_TEST_LARGEST": str(largest)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workdir(folder: pathlib.Path, tokenizer_folder: str) -> pathlib.Path:
    shutil.copytree(tokenizer_folder, folder / "tokenizer")
    (folder / "tokenizer" / "recipe.json").write_text(json.dumps({"path": f"{folder}/tokenizer"}))
    return folder


def whole(workdir: pathlib.Path) -> dict[str, int]:
    """The files that are whole, and when they were written."""
    found = {}
    for path in work_folder(str(workdir / "shards")).rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.name.startswith("."):
                found[str(path)] = path.stat().st_mtime_ns
    return found


def done(files: dict[str, int]) -> dict[str, int]:
    """Those of tasks that are done."""
    keys = {str(pathlib.Path(file).with_suffix("")) for file in files if file.endswith(LAST) and "/tasks/" in file}
    found = {file: when for file, when in files.items() if str(pathlib.Path(file).with_suffix("")) in keys}
    shards = {json.loads(pathlib.Path(file).read_text())["shard"][0] for file in found if is_note(file)}
    return found | {file: when for file, when in files.items() if any(file.endswith(name) for name in shards)}


def is_note(file: str) -> bool:
    return file.endswith(".json") and pathlib.Path(file).with_suffix(".counts").exists()


@pytest.mark.slow
def test_killed_it_goes_on(texts, tokenizer_folder, tmp_path):
    source = write_jsonl(tmp_path / "texts.jsonl", texts[:400] + texts[:50])
    alone, killed = (workdir(tmp_path / name, tokenizer_folder) for name in ("alone", "killed"))
    processes.finish(start(alone, source))
    total, seen, moments = len(whole(alone)), {}, []
    for moment in (0.15, 0.5, 0.9):
        process = start(killed, source)
        while len(whole(killed)) < moment * total:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        now = done(whole(killed))
        assert {file: now[file] for file in seen} == seen, "what was done was done again"
        assert not (killed / "shards").exists()
        seen = now
        moments.append(len(now))
    assert moments[0] < moments[-1] and any(file.endswith(".tfrecord") for file in seen)
    processes.finish(start(killed, source))
    left = whole(killed)
    assert {file: left[file] for file in seen if "/tasks/" in file} == {f: seen[f] for f in seen if "/tasks/" in f}
    files = {f"{p.parent.name}/{p.name}": p.stat().st_mtime_ns for p in (killed / "shards").rglob("*.tfrecord")}
    kept = {"/".join(file.split("/")[-2:]): when for file, when in seen.items() if file.endswith(".tfrecord")}
    assert {name: files[name] for name in kept} == kept
    assert contents(killed / "shards") == contents(alone / "shards")


def test_no_room_for_a_file(texts, tokenizer_folder, tmp_path):
    """On a worker: one sentence and code 2; what is done stays, and the next start goes on."""
    write_jsonl(tmp_path / "a.jsonl", [text[:50] for text in texts[:300]])  # the first part has few tokens
    write_jsonl(tmp_path / "b.jsonl", texts[:900])
    source, folder = f"jsonl:{tmp_path}/?.jsonl", workdir(tmp_path / "run", tokenizer_folder)
    process = start(folder, source, largest=20_000)
    _, words = processes.finish(process, code=2)
    assert "Traceback" not in words, words
    (line,) = [line for line in words.splitlines() if line.startswith("mlm shards: ")]
    assert ".tokens: can't be written on" in line and "(File too large); make room there" in line
    seen = done(whole(folder))
    assert seen, "none was done before"
    (work_folder(str(folder / "shards")) / "tasks" / ".0123.tmp").write_text("of a task that was killed")
    processes.finish(start(folder, source))
    left = whole(folder)
    assert {file: left[file] for file in seen} == seen
    assert not list(work_folder(str(folder / "shards")).rglob(".*.tmp")), "it would take room"
