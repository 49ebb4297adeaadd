"""Tasks on a process pool."""

import errno
import functools
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from mlm.cluster import watch
from mlm.engine import engine
from mlm.errors import DamageError, InputError, PreemptedError
from tests.support.engine_tasks import die, fail, mark, process_of, square
from tests.support.processes import environment


@pytest.mark.standard
def test_all_results_come_once(monkeypatch):
    """From light processes of one thread; each finished task is progress."""
    phases = []
    monkeypatch.setattr(watch, "current", watch.Watch("shards", None))
    monkeypatch.setattr(watch.Watch, "progress", lambda _, phase, step=None: phases.append(phase))
    with engine.open_pool(workers=2) as opened:
        assert opened.workers == 2
        assert dict(opened.each(square, range(50), label="square")) == {n: n * n for n in range(50)}
        assert phases == ["tasks"] * 51 + ["data"]
        (_, (pid, parallel, heavy)), *_ = opened.each(process_of, [0], label="where")
    assert pid != os.getpid() and parallel == "false" and heavy == []


@pytest.mark.standard
def test_an_error_arrives_as_it_was_and_cancels_the_rest(tmp_path):
    begin = time.monotonic()
    with (
        pytest.raises(DamageError, match=r"^bad, mend it\.$"),
        engine.open_pool(workers=2) as opened,
    ):
        list(opened.each(fail, range(10), label="fail"))
    with pytest.raises(InputError), engine.open_pool(workers=2) as opened:
        for _ in opened.each(functools.partial(mark, tmp_path, 0.1), range(1000), label="mark"):
            raise InputError("the caller stops")
    assert time.monotonic() - begin < 30
    assert len(list(tmp_path.iterdir())) < 20


@pytest.mark.standard
def test_a_killed_worker_is_a_reason_to_start_again():
    with (
        pytest.raises(PreemptedError, match="start the same command again"),
        engine.open_pool(workers=2) as opened,
    ):
        list(opened.each(die, range(4), label="die"))


def test_semaphores_that_processes_cannot_share_are_refused(monkeypatch):
    """As in a container without a writable /dev/shm."""

    def refuse(context):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(engine.Spawn, "Lock", refuse)
    refused = pytest.raises(InputError, match=r"\(Read-only file system\).*/dev/shm")
    with refused, engine.open_pool(workers=1):
        pass


# A researcher's file calls `main` at its end, without asking whether it is the script that was started.
SCRIPT = """
import functools, pathlib, sys
from mlm.engine import engine
from tests.support.engine_tasks import mark
print("started", flush=True)
with engine.open_pool(workers=2) as opened:
    for number, _ in opened.each(functools.partial(mark, pathlib.Path(sys.argv[1]), 0.5), range(99), label="mark"):
        print(number, flush=True)
"""


@pytest.mark.standard
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_do_not_run_the_script_again_and_end_with_it(tmp_path, how):
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    line = [sys.executable, str(tmp_path / "mine.py"), str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(line, env=environment(1), **pipes) as process:
        assert process.stdout.readline() == "started\n"
        assert process.stdout.readline().strip().isdecimal()
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(how)
        assert process.wait(20) != 0
        psutil.wait_procs(children, timeout=10)
        running = [child for child in children if child.is_running()]
        assert {child.status() for child in running} <= {psutil.STATUS_ZOMBIE}
        assert "started" not in process.stdout.read()
