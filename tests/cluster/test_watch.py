"""What a process leaves behind: where it was, why it ended, its stacks. In processes of their own, without jax."""

import dataclasses
import json
import os
import pathlib
import pty
import signal
import subprocess
import sys
import time

import pytest

from mlm.cluster import watch
from mlm.cluster.termination import Termination
from mlm.errors import DamageError, PreemptedError
from tests import ROOT

HEAD = """
import ctypes, os, signal, sys, time, types
from mlm.errors import DamageError
from mlm.cluster import watch
from mlm.cluster.detect import Cluster
w = watch.begin("test")
w.join(Cluster(processes=int(sys.argv[2])), sys.argv[1], types.SimpleNamespace(hang=0.0))
"""


def run(
    folder: pathlib.Path, body: str, *, host_dir: str | None = None, processes: int = 1
) -> tuple[int, str]:
    host_dir = str(folder) if host_dir is None else host_dir
    environment = {key: value for key, value in os.environ.items() if key != "MLM_HOST_DIR"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"MLM_HOST_DIR": host_dir} if host_dir else {})
    command = [sys.executable, "-c", HEAD + body, str(folder), str(processes)]
    done = subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


def cause_of(folder: pathlib.Path) -> dict:
    return json.loads((folder / "cause.json").read_text())


def test_progress_and_a_good_end(tmp_path):
    one = watch.Watch("test", tmp_path)
    one.progress("input", 7)
    one.progress("save", 7)
    assert one.end(0) == 0
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert (progress["step"], progress["phase"]) == (7, "done")
    assert abs(progress["time"] - time.time()) < 60
    assert not (tmp_path / "cause.json").exists()


BARE = "w.join(Cluster(processes=2), 'gs://bucket/run', types.SimpleNamespace(hang=0.5))\n"


@pytest.mark.standard
def test_a_hang_before_the_first_step_with_a_workdir_in_a_bucket(tmp_path):
    """The bare line on a pod: there is no folder for the stacks, and nothing was compiled yet."""
    code, err = run(tmp_path, f"{BARE}time.sleep(30)", host_dir="")
    assert code == 1
    assert "no progress for 2 s (4 times config.pod.hang), in start; see the stacks above" in err
    assert "most recent call first" in err


@pytest.mark.parametrize(
    ("error", "number", "code", "kind", "what"),
    [
        (DamageError("x: is damaged"), 0, 4, "exception", "x: is damaged"),
        (ValueError("broken\nfor good"), 0, 1, "exception", "ValueError: broken"),
        (KeyboardInterrupt(), 0, 75, "signal", "Ctrl-C: KeyboardInterrupt"),
        (PreemptedError("saved"), signal.SIGUSR1, 75, "signal", "SIGUSR1: saved"),
    ],
)
def test_the_first_reason_stays(tmp_path, error, number, code, kind, what):
    one = watch.Watch("test", tmp_path)
    one.progress("input", 4)
    when = time.time()
    if number:
        one.signaled(number)
        time.sleep(0.2)
    assert one.failed(error, code) == code
    one.failed(DamageError("second"), 4)
    cause = cause_of(tmp_path)
    found = [cause[key] for key in ("kind", "code", "what", "step", "phase")]
    assert found == [kind, code, what, 4, "input"]
    assert when - 1 < cause["time"] < when + (0.1 if number else 60), "that of the signal"


def test_who_was_not_asked_to_stop_gives_no_reason(tmp_path):
    """All stop after the same step; the one that was asked says why."""
    assert watch.Watch("test", tmp_path).failed(PreemptedError("saved"), 75) == 75
    assert not (tmp_path / "cause.json").exists()


@pytest.mark.standard
def test_a_hang_leaves_all_stacks_whatever_the_clock_says(tmp_path):
    """It was set back meanwhile."""
    body = """
def waits_for_input():
    time.sleep(60)
w.set_limits(hang=1.0, heartbeat=0)
w.progress('input', 9)
now = time.time
time.time = lambda: now() - 3600
waits_for_input()
"""
    code, err = run(tmp_path, body)
    assert code == 1 and "no progress for 1 s (1 times config.pod.hang), in input" in err
    assert cause_of(tmp_path)["kind"] == "hang"
    assert "in waits_for_input" in err


@pytest.mark.standard
def test_progress_is_no_hang_and_slow_phases_have_more_time(tmp_path):
    body = """
w.set_limits(hang=1.0, heartbeat=0)
for _ in watch.with_progress(range(4)):
    time.sleep(0.6)
w.progress('compile', 1)
time.sleep(2.5)
w.progress(watch.UNTIMED)  # tokenizer and shards may take as long as they need
time.sleep(2.5)
sys.exit(w.end(0))
"""
    assert run(tmp_path, body)[0] == 0
    assert not (tmp_path / "cause.json").exists()


@pytest.mark.standard
def test_no_thread_of_python_runs(tmp_path):
    """A library that keeps Python's lock: C notices, and writes the stacks."""
    body = "w.set_limits(hang=0, heartbeat=1.5)\ntime.sleep(1)\nctypes.PyDLL(None).sleep(30)"
    code, err = run(tmp_path, body)
    assert code == 1 and 'File "<string>", line' in err


@pytest.mark.standard
def test_a_fatal_signal_leaves_stacks(tmp_path):
    code, err = run(tmp_path, "w.progress('step', 3)\ntime.sleep(0.8)\nos.abort()")
    assert code == -signal.SIGABRT
    assert json.loads((tmp_path / "progress.json").read_text())["step"] == 3, (
        "written while it works"
    )
    assert "Fatal Python error: Aborted" in err


@pytest.mark.standard
def test_who_leaves_files(tmp_path):
    """A single process leaves none, several use the workdir, once it is there, and remove those of an earlier run."""
    body = "w.set_limits(hang=0.5, heartbeat=0)\ntime.sleep(2)\nw.failed(DamageError('x'), 4)"
    assert run(tmp_path, body, host_dir="")[0] == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "hosts" / "0").mkdir(parents=True)
    (tmp_path / "hosts" / "0" / "cause.json").write_text("{}")
    assert run(tmp_path, "time.sleep(0.7)\nsys.exit(w.end(0))", host_dir="", processes=2)[0] == 0
    assert [path.name for path in (tmp_path / "hosts" / "0").iterdir()] == ["progress.json"]
    run(tmp_path / "absent", "time.sleep(0.7)\nw.end(0)", host_dir="", processes=2)
    assert not (tmp_path / "absent").exists()


def test_an_end_is_read_as_it_was_written_or_is_a_strangers():
    end = Termination(3, "w-3", "hang", 1, "no progress", 1.5, 7, "save")
    assert Termination.read(end.text) == end
    assert "\x1b" not in Termination.read(dataclasses.replace(end, host="\x1b[2J").text).sentence
    changes = ({"code": 0}, {"code": 256}, {"code": "x"}, {"kind": "peer"})
    texts = [json.dumps(json.loads(end.text) | change) for change in changes]
    for text in (*texts, end.text[:-9], "[" * 100_000, "", "\x1b[2J"):
        read = Termination.read(text)
        assert (read.process, read.code) == (-1, 1) and read.sentence.isprintable()


@pytest.mark.standard
def test_ctrl_c_before_all_have_met_ends_at_once(tmp_path):
    """Python's own exit would wait in jax for the others, and print that they did not come."""
    body = "w.failed(KeyboardInterrupt(), 75)\nsys.exit(3)"
    assert run(tmp_path, body, processes=2) == (75, "")
    assert cause_of(tmp_path)["kind"] == "signal"


STOPS = """
import fcntl, os, sys, termios, time
from mlm.cluster import distributed, watch
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
w = watch.begin("test")
with distributed.StopSignal() as stop:
    print("up", flush=True)
    while not stop.requested(1):
        time.sleep(0.05)
    print("saving", flush=True)
    open(sys.argv[1], "w").write(w._signal[0])
sys.exit(75)
"""


@pytest.mark.standard
def test_a_terminal_that_is_gone_is_a_signal_to_save(tmp_path):
    """ssh drops: what is printed from then on is an error."""
    terminal, end = pty.openpty()
    pipes = {"stdin": end, "stdout": end, "stderr": end, "start_new_session": True}
    with subprocess.Popen(
        [sys.executable, "-c", STOPS, str(tmp_path / "saved")], cwd=ROOT, **pipes
    ) as process:
        os.close(end)
        assert os.read(terminal, 2) == b"up"
        os.close(terminal)
        process.wait(timeout=60)
    assert process.returncode == 75 and (tmp_path / "saved").read_text() == "SIGHUP"


@pytest.mark.standard
def test_nohup_stays_so(tmp_path):
    command = ["nohup", sys.executable, "-c", STOPS, str(tmp_path / "saved")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR1)
        process.communicate()
    assert process.returncode == 75 and (tmp_path / "saved").read_text() == "SIGUSR1"
