"""The data of a run of several processes: made on the cores of all of them, and the same as by one."""

import pathlib
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from mlm.__main__ import main
from tests.support import processes
from tests.support.corpora import contents
from tests.support.dask_cluster import free_port, written
from tests.support.refusals import refuse
from tests.support.tiny import command

DELAYED = "tests/programs/delayed_tasks.py"
FILES = 12


@pytest.fixture(scope="module")
def arguments(texts, tokenizer_folder, tmp_path_factory) -> Callable[..., list[str]]:
    """Of the command, for a workdir."""
    folder = tmp_path_factory.mktemp("corpus")
    files = [folder / f"{number}.txt" for number in range(FILES)]
    for number, file in enumerate(files):
        file.write_text("\n".join(" ".join(text.split()) for text in texts[number:600:FILES]))
    sources = tuple(f"text:{file}" for file in files)  # small files of one source would be one part
    settings = (
        f"corpus.sources={sources!r}",
        f"corpus.weights={(1.0,) * FILES}",
        "corpus.validation_fraction=0.1",
        f"tokenizer.path={tokenizer_folder}",
        "shards.count=7",
        "shards.validation_count=2",
        "shards.length=32",
        "shards.workers=1",
        "model.positions=64",
        "data.lanes=2",
        "pod.heartbeat=20",
        "pod.start_timeout=250",
    )

    def of(workdir: pathlib.Path, *more: str) -> list[str]:
        return [*command("shards", workdir, *settings), *more]

    return of


@pytest.fixture(scope="module")
def alone(arguments, tmp_path_factory) -> pathlib.Path:
    """What one process writes."""
    workdir = tmp_path_factory.mktemp("alone")
    assert main(arguments(workdir)) == 0
    return workdir


def start(arguments: list[str], count: int) -> list[subprocess.Popen]:
    """Starts the processes of a run."""
    line = [*arguments, f"--coordinator=127.0.0.1:{free_port()}", f"--processes={count}"]
    lines = ([*line, f"--process-id={index}"] for index in range(count))
    return [processes.start(line, program=DELAYED) for line in lines]


@pytest.mark.slow
def test_killed_in_mid_run_other_hosts_do_what_is_missing(alone, arguments, tmp_path, monkeypatch):
    """And write what one process does."""
    # so that it is missed before the other has done its tasks, too
    monkeypatch.setenv("MLM_TEST_DELAY", "5")
    first, second = start(arguments(tmp_path), 2)
    monkeypatch.delenv("MLM_TEST_DELAY")
    processes.kill_when(second, lambda: len(written(tmp_path)) >= 4)
    _, error = first.communicate(timeout=200)
    # jax names who is lost
    assert first.returncode == -signal.SIGABRT and "\n1\n" in error
    kept = written(tmp_path)
    assert 4 <= len(kept) < FILES and not (tmp_path / "shards").exists()
    again = start(arguments(tmp_path), 3)
    seen = {}
    while any(process.poll() is None for process in again):
        seen |= written(tmp_path)
        time.sleep(0.02)
    errors = [process.communicate(timeout=280)[1] for process in again]
    assert [process.returncode for process in again] == [0, 0, 0], errors
    assert ["tokens/s" in error for error in errors] == [True, False, False], "process 0 reports"
    assert not any("distributed" in error or "Traceback" in error for error in errors), errors
    assert contents(tmp_path / "shards") == contents(alone / "shards")
    assert {name: seen[name] for name in kept} == kept, "a task that was done was done again"
    assert (tmp_path / "hosts" / "certificates" / "key.pem").stat().st_mode & 0o777 == 0o600


def test_certificates_of_an_engine_that_are_not_there(arguments, tmp_path, capsys):
    line = arguments(tmp_path, "--engine=tls://127.0.0.1:8786")
    refuse(line, 2, "hosts/certificates/ca.pem: can't be read", capsys=capsys)
