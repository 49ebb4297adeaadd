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

import numpy as np
import pytest

from mlm.data.manifest import work_folder
from tests import processes
from tests.fixtures import slow
from tests.fixtures_data import contents, write_jsonl

LAST = (".blocks", ".dropped", ".json")  # of the files of a task, the one that is written last


def start(workdir: pathlib.Path, source: str) -> subprocess.Popen:
    settings = (f"corpus.sources='{source}'", "corpus.validation_fraction=0.1", "shards.workers=2", "shards.count=7")
    settings += (f"tokenizer.path={workdir}/tokenizer", "shards.validation_count=2", "shards.length=32", "data.lanes=2")
    command = ["shards", "--config=configs/base.py", f"--workdir={workdir}", *(f"--config.{each}" for each in settings)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.delayed_results", *command],
        cwd=processes.ROOT,
        env=processes.environment(1),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> None:
    _, words = process.communicate(timeout=280)
    assert process.returncode == 0, words


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
    shards = {json.loads(pathlib.Path(file).read_text())["shard"]["file"] for file in found if is_note(file)}
    return found | {file: when for file, when in files.items() if any(file.endswith(name) for name in shards)}


def is_note(file: str) -> bool:
    return file.endswith(".json") and pathlib.Path(file).with_suffix(".counts").exists()


@pytest.mark.parametrize("kills", [2, slow(10)])
def test_killed_it_goes_on(texts, tokenizer_folder, tmp_path, kills):
    source = write_jsonl(tmp_path / "texts.jsonl", texts[:900] + texts[:50])
    for name in ("alone", "killed"):
        shutil.copytree(tokenizer_folder, tmp_path / name / "tokenizer")
        (tmp_path / name / "tokenizer" / "recipe.json").write_text(json.dumps({"path": f"{tmp_path}/{name}/tokenizer"}))
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    finish(start(alone, source))
    total, seen, moments = len(whole(alone)), {}, []
    for moment in np.linspace(0.1, 0.95, kills):
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
    finish(start(killed, source))
    left = whole(killed)
    assert {file: left[file] for file in seen if "/tasks/" in file} == {f: seen[f] for f in seen if "/tasks/" in f}
    files = {f"{p.parent.name}/{p.name}": p.stat().st_mtime_ns for p in (killed / "shards").rglob("*.tfrecord")}
    kept = {"/".join(file.split("/")[-2:]): when for file, when in seen.items() if file.endswith(".tfrecord")}
    assert {name: files[name] for name in kept} == kept
    assert contents(killed / "shards") == contents(alone / "shards")
