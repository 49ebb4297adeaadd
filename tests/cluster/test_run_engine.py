"""The data of a run of several processes: made on the cores of all of them, and the same as by one."""

import contextlib
import hashlib
import os
import pathlib
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest

from mlm.__main__ import main
from mlm.cluster import certificates
from tests.support import processes
from tests.support.dask_cluster import Cluster, free_port, greeted, until, written
from tests.support.tiny import slow

DELAYED = "tests/programs/delayed_tasks.py"
FILES = 12


def contents(folder: pathlib.Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def arguments(texts, tokenizer_folder, tmp_path_factory) -> Callable[..., list[str]]:
    """Of the command, for a workdir."""
    folder = tmp_path_factory.mktemp("corpus")
    files = [folder / f"{number}.txt" for number in range(FILES)]
    for number, file in enumerate(files):
        file.write_text("\n".join(" ".join(text.split()) for text in texts[number:600:FILES]))
    sources = tuple(f"text:{file}" for file in files)  # small files of one source would be one part
    settings = (f"corpus.sources={sources!r}", f"corpus.weights={(1.0,) * FILES}", "corpus.validation_fraction=0.1")
    settings += (f"tokenizer.path={tokenizer_folder}", "shards.count=7", "shards.validation_count=2")
    settings += ("shards.length=32", "shards.workers=1", "model.positions=64", "data.lanes=2")
    settings += ("pod.heartbeat=20", "pod.start_timeout=250")

    def of(workdir: pathlib.Path, *more: str) -> list[str]:
        keys = [f"--config.{text}" for text in settings]
        return ["shards", "--config=configs/base.py", f"--workdir={workdir}", *keys, *more]

    return of


@pytest.fixture(scope="module")
def alone(arguments, tmp_path_factory) -> pathlib.Path:
    """What one process writes."""
    workdir = tmp_path_factory.mktemp("alone")
    processes.run(arguments(workdir))
    return workdir


class Started:
    """The processes of a run."""

    def __init__(self, arguments: list[str], count: int, program: str = DELAYED):
        self.port, self.engine_port = free_port(), self.free_engine_port()
        line = [*arguments, f"--coordinator=127.0.0.1:{self.port}", f"--config.pod.engine_port={self.engine_port}"]
        line.append(f"--processes={count}")
        self.all = [processes.start([*line, f"--process-id={index}"], program=program) for index in range(count)]

    def free_engine_port(self) -> int:
        return free_port()

    def ends(self) -> list[tuple[int, str]]:
        """The exit code and the stderr of each."""
        errors = [process.communicate(timeout=280)[1] for process in self.all]
        return [(process.returncode, error) for process, error in zip(self.all, errors, strict=True)]

    def finish(self) -> list[str]:
        ends = self.ends()
        assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {error}" for code, error in ends)
        return [error for _, error in ends]


@pytest.mark.slow
def test_three_processes_write_what_one_does(alone, arguments, tmp_path):
    started = Started(arguments(tmp_path), 3, program="-m mlm")
    errors = started.finish()
    assert contents(tmp_path / "shards") == contents(alone / "shards")
    assert ["tokens/s" in error for error in errors] == [True, False, False], "process 0 alone reports"
    assert not any("distributed" in error or "Traceback" in error for error in errors), errors
    assert (tmp_path / "hosts" / "certificates" / "key.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("before", "after", "victim"), [slow(2, 3, 1), slow(3, 2, 0), slow(2, 1, 0)])
def test_killed_in_mid_run_only_what_is_missing_is_done_again(
    alone, arguments, tmp_path, monkeypatch, before, after, victim
):
    monkeypatch.setenv("MLM_TEST_DELAY", "5")  # so that it is missed before the others have done its tasks, too
    started = Started(arguments(tmp_path), before)
    monkeypatch.delenv("MLM_TEST_DELAY")
    processes.kill_when(started.all[victim], lambda: len(written(tmp_path)) >= 4)
    for process in started.all:
        if process is not started.all[victim]:
            _, words = process.communicate(timeout=200)
            assert process.returncode == 1 and f"host {victim} " in words, words
    kept = written(tmp_path)
    assert 4 <= len(kept) < FILES and not (tmp_path / "shards").exists()
    again, seen = Started(arguments(tmp_path), after), {}
    while any(process.poll() is None for process in again.all):
        seen |= written(tmp_path)
        time.sleep(0.02)
    again.finish()
    assert contents(tmp_path / "shards") == contents(alone / "shards")
    assert {name: seen[name] for name in kept} == kept, "a task that was done was done again"


@pytest.mark.slow
def test_a_killed_worker_ends_all_with_the_code_to_start_again(arguments, tmp_path):
    started = Started(arguments(tmp_path), 2)
    until(lambda: len(written(tmp_path)) >= 2)
    workers = [p for p in psutil.Process(started.all[1].pid).children() if "spawn_main" in " ".join(p.cmdline())]
    assert len(workers) == 1
    os.kill(workers[0].pid, signal.SIGKILL)
    for code, error in started.ends():
        assert code == 75 and "a worker process was killed" in error, (code, error)


@pytest.mark.slow
def test_bad_input_ends_all_with_its_code(arguments, tmp_path):
    started = Started(arguments(tmp_path, "--config.shards.count=99999"), 2, program="-m mlm")
    (first, own), (second, told) = started.ends()
    assert first == second == 2
    assert "mlm shards: config.shards.count = 99999" in own and "host 0" in told and "99999" in told
    assert "Traceback" not in own + told


@pytest.mark.slow
def test_strangers_are_refused_by_the_scheduler_and_the_workers_of_a_run(arguments, tmp_path, monkeypatch):
    certificates.make(tmp_path / "other")
    monkeypatch.setenv("MLM_TEST_DELAY", "100")  # of every task, so that all of it is there while we look
    started = Started(arguments(tmp_path), 2)
    folder, contexts = tmp_path / "hosts" / "certificates", {}
    with processes_ended(started.all):
        until((folder / "key.pem").exists)
        for name, own in (("proven", folder), ("stranger", tmp_path / "other")):
            contexts[name] = ssl.create_default_context(cafile=str(folder / "ca.pem"))
            contexts[name].check_hostname = False
            contexts[name].load_cert_chain(own / "cert.pem", own / "key.pem")

        def engine_ports() -> list[int]:
            found = [psutil.Process(process.pid).net_connections("tcp") for process in started.all]
            local = [each.laddr for own in found for each in own if each.status == psutil.CONN_LISTEN]
            ips = {each.ip.removeprefix("::ffff:") for each in local}
            assert ips == {"127.0.0.1"}, "something listens elsewhere than the coordinator does"
            return [each.port for each in local if greeted(each.port, contexts["proven"])]

        until(lambda: len(engine_ports()) == 3)  # a scheduler and two workers
        ports = engine_ports()
        assert started.engine_port in ports
        for port in ports:
            assert not greeted(port, contexts["stranger"]) and not greeted(port, None)


@pytest.mark.slow
def test_a_host_that_never_starts_is_named(arguments, tmp_path):
    line = [*arguments(tmp_path, "--config.pod.start_timeout=4"), f"--coordinator=127.0.0.1:{free_port()}"]
    _, words = processes.run([*line, "--processes=2", "--process-id=0"], code=1)
    assert "within 4 s (config.pod.start_timeout) 1 of 2 hosts (all but 127.0.0.1) never connected" in words


@pytest.mark.slow
def test_a_command_that_was_started_twice_is_refused(arguments, tmp_path):
    started = Started(arguments(tmp_path), 2)
    with processes_ended(started.all):
        until(lambda: written(tmp_path))
        _, words = processes.run([*arguments(tmp_path), "--processes=1"], code=2)
        assert "another process" in words


@contextlib.contextmanager
def processes_ended(all_of_them: list[subprocess.Popen]):
    try:
        yield
    finally:
        for process in all_of_them:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_the_cluster_of_an_address_is_used_by_process_0(alone, arguments, tmp_path):
    (tmp_path / "cluster").mkdir()
    with Cluster(tmp_path / "cluster") as found:
        found.add(workers=2)
        flags = [f"--engine={found.address}", f"--engine-certificates={found.certificates}", "--engine-timeout=250"]
        processes.run([*arguments(tmp_path), *flags])
        assert contents(tmp_path / "shards") == contents(alone / "shards")
        shutil.rmtree(tmp_path / "shards")
        Started([*arguments(tmp_path), *flags], 2, program="-m mlm").finish()
        assert contents(tmp_path / "shards") == contents(alone / "shards")
    processes.run([*arguments(tmp_path), *flags])  # nothing to do: the cluster may be gone


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engine=host:8786"], "must be tls://HOST:PORT"),
        (["--engine=tcp://10.0.0.1:8786"], "--engine-insecure"),
        (["--engine=tls://127.0.0.1:8786"], "hosts/certificates/ca.pem: can't be read"),
        (["--engine=tcp://127.0.0.1:8786", "--engine-timeout=0"], "--engine-timeout=0.0: must be above 0"),
    ],
)
def test_flags_of_the_engine_are_checked(arguments, tmp_path, capfd, flags, words):
    assert main([*arguments(tmp_path), *flags]) == 2
    assert words in capfd.readouterr().err


@pytest.mark.slow
def test_the_port_is_named_when_it_is_taken(arguments, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(Started, "free_engine_port", lambda started: port)
        ends = Started(arguments(tmp_path, "--config.pod.start_timeout=60"), 2, program="-m mlm").ends()
    for code, words in ends:
        assert code == 1 and f"port {port} of 127.0.0.1 is held by" in words and "config.pod.engine_port" in words
