"""Tasks on a process pool."""

import errno
import functools
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import psutil
import pytest

from mlm.cluster import engine, watch
from mlm.errors import DamageError, InputError, NumericsError, PreemptedError, StopError
from tests import ROOT
from tests.support.engine_tasks import die, fail, mark, process_of, square
from tests.support.processes import environment


@pytest.mark.parametrize("error", [StopError, InputError, NumericsError, DamageError, PreemptedError])
def test_errors_cross_processes(error: type[StopError]) -> None:
    again = pickle.loads(pickle.dumps(error("one, sentence")))
    assert type(again) is error and again.args == ("one, sentence",)


@pytest.mark.standard
@pytest.mark.parametrize("workers", [1, 3])
def test_all_results_come_once(workers: int) -> None:
    with engine.open_pool(workers=workers) as opened:
        assert opened.workers == workers
        found = dict(opened.each(square, range(50), label="square"))
        assert found == {number: number * number for number in range(50)}
        assert list(opened.each(square, [], label="nothing")) == []


def test_no_process_starts_without_a_task() -> None:
    before = set(psutil.Process().children())
    with engine.open_pool(workers=4) as opened:
        assert list(opened.each(square, [], label="nothing")) == []
        assert set(psutil.Process().children()) <= before


@pytest.mark.standard
def test_workers_are_light_processes_of_one_thread() -> None:
    with engine.open_pool(workers=1) as opened:
        (_, (pid, parallel, heavy)), *_ = opened.each(process_of, [0], label="where")
    assert pid != os.getpid() and parallel == "false" and heavy == []


@pytest.mark.standard
@pytest.mark.parametrize(("what", "error"), [("input", InputError), ("damage", DamageError)])
def test_an_error_arrives_as_it_was_and_cancels_the_rest(tmp_path: pathlib.Path, what: str, error: type) -> None:
    begin = time.monotonic()
    with pytest.raises(error, match=rf"^{what}: bad, mend it\.$"), engine.open_pool(workers=2) as opened:
        list(opened.each(fail, [what] * 10, label="fail"))
    with pytest.raises(InputError), engine.open_pool(workers=2) as opened:
        for _ in opened.each(functools.partial(mark, tmp_path, 0.1), range(1000), label="mark"):
            raise InputError("the caller stops")
    assert time.monotonic() - begin < 30
    assert len(list(tmp_path.iterdir())) < 20


@pytest.mark.standard
def test_a_killed_worker_is_a_reason_to_start_again() -> None:
    with pytest.raises(PreemptedError, match="start the same command again"), engine.open_pool(workers=2) as opened:
        list(opened.each(die, range(4), label="die"))


def test_semaphores_that_processes_cannot_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without a writable /dev/shm."""

    def refuse(context: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(engine.Spawn, "Lock", refuse)
    with pytest.raises(InputError, match=r"\(Read-only file system\).*/dev/shm"), engine.open_pool(workers=1):
        pass


class Counted:
    """Items that count how far they are read."""

    def __init__(self, count: int):
        self.count, self.read = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        self.read = max(self.read, number + 1)
        return number


@pytest.mark.standard
def test_a_bounded_number_is_submitted_ahead() -> None:
    items = Counted(250_000)
    with engine.open_pool(workers=2) as opened:
        for done, _ in enumerate(opened.each(square, items, label="square")):
            assert items.read <= done + 1 + engine.AHEAD * 2
            if done == 100:
                break


@pytest.mark.standard
def test_finished_tasks_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = []
    monkeypatch.setattr(watch, "current", watch.Watch("shards", None))
    monkeypatch.setattr(watch.Watch, "progress", lambda self, phase, step=None: phases.append(phase))
    with engine.open_pool(workers=1) as opened:
        list(opened.each(square, range(3), label="square"))
    assert phases == ["tasks"] * 4 + ["data"]


PROGRAM = """
import functools, pathlib, sys
from mlm.cluster import engine
from tests.support.engine_tasks import mark
if __name__ == "__main__":
    with engine.open_pool(workers=2) as opened:
        for number, _ in opened.each(functools.partial(mark, pathlib.Path(sys.argv[1]), 0.5), range(99), label="mark"):
            print(number, flush=True)
"""


@pytest.mark.standard
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path: pathlib.Path, how: signal.Signals) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "out").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, str(program), str(tmp_path / "out")]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(how)
        assert process.wait(20) != 0
        psutil.wait_procs(children, timeout=10)
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.standard
def test_workers_do_not_run_the_script_again(tmp_path) -> None:
    """A researcher's file calls `main` at its end, without asking whether it is the script that was started."""
    script = tmp_path / "mine.py"
    script.write_text(
        "from mlm.cluster import engine\nfrom tests.support.engine_tasks import square\nprint('started')\n"
        "with engine.open_pool(workers=1) as opened:\n"
        "    print(*opened.each(square, [3], label='square'))\n"
    )
    done = subprocess.run([sys.executable, str(script)], env=environment(1), capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("started\n(0, 9)\n", 0), done.stderr
