"""host.py: a run's process is started once, kept, told of, and stopped, whatever dies around it."""

import base64
import contextlib
import json
import os
import pathlib
import signal
import socket
import stat
import time

import pytest
from host_keeper import processes

from tests.launch.pod import HOSTILE, alive, keeper_of, wait_for

pytestmark = pytest.mark.standard


def status(host, run="a", attempt=1) -> dict:
    return host.ask("status", "--", run, str(attempt))


def open_files(process: int) -> set[str]:
    found = set()
    for path in pathlib.Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(str(path.readlink()))
    return found


def test_start_and_end(host):
    answer = host.start("print('error', file=sys.stderr, flush=True); sys.exit(3)", argv=HOSTILE, SECRET="canary-1")
    assert answer["started"] and answer["attempt"] == 1
    assert host.ended()["code"] == 3 and host.ended()["signal"] is None
    wait_for(lambda: status(host)["state"] == "exited")
    found = status(host)
    assert found["exit"]["code"] == 3 and found["host"] == socket.gethostname()
    first, second = (host.folder() / "log").read_text().splitlines()
    assert json.loads(first) == HOSTILE
    assert second == "error"
    assert not list(host.root.rglob("pwned"))


def test_a_file_in_the_place_of_mlm(host):
    """It finds the code's modules, though Python looks in the file's folder."""
    files = {"requirements.txt": b"", "mlm/__init__.py": b"NAME = 'mlm'", "research/beside.py": b"import mlm"}
    files["research/rare.py"] = b"import sys, beside; print(beside.mlm.NAME, *sys.argv[1:])"
    archive, host.code = host.pack(files)
    host.unpack(host.code, archive)
    host.ask("start", stdin=json.dumps(json.loads(host.job("", argv=HOSTILE[:2])) | {"program": "research/rare.py"}))
    assert host.ended()["code"] == 0
    assert (host.folder() / "log").read_text() == "mlm a b --flag=$(touch pwned)\n"


def test_secrets_stay_in_memory(host):
    host.start("open(folder / 'got', 'w').write(os.environ['SECRET'][::-1]); time.sleep(60)", SECRET="canary-1")
    assert wait_for(lambda: (host.folder() / "got").exists() and (host.folder() / "got").read_text()) == "1-yranac"
    job = host.folder() / "job.json"
    assert stat.S_IMODE(job.stat().st_mode) == 0o600
    assert json.loads(job.read_text())["env"] == ["SECRET", "STUB"]
    for file in host.root.rglob("*"):
        assert not file.is_file() or b"canary-1" not in file.read_bytes(), file
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert b"canary-1" not in (process / "cmdline").read_bytes()


def test_the_keeper_holds_nothing_of_the_connection(host):
    begin = time.monotonic()
    process = host.start("time.sleep(60)")["process"]  # returns, although the process has our pipes' descendants
    assert time.monotonic() - begin < 15
    keeper = keeper_of(process)
    assert open_files(keeper) == {"/dev/null", str(host.folder() / "lock")}
    assert len({os.getsid(keeper), os.getsid(process), os.getsid(0)}) == 3
    assert os.getpgid(process) == process
    assert str(host.folder() / "lock") not in open_files(process)
    os.kill(keeper, signal.SIGHUP)
    os.kill(keeper, signal.SIGTERM)  # a host that shuts down: the process is to save, and is to be seen
    time.sleep(0.3)
    assert status(host)["state"] == "running" and alive(keeper)


def test_it_is_never_started_twice(host):
    racers = [host.popen("start") for _ in range(6)]
    for racer in racers:  # all of them are past their imports, and read the job at about the same moment
        racer.stdin.write(host.job("time.sleep(60)"))
    for racer in racers:
        racer.stdin.close()
    answers = [json.loads(racer.stdout.read().removeprefix("mlm-host ")) for racer in racers]
    assert sum(answer["started"] for answer in answers) == 1
    assert {answer["state"] for answer in answers} == {"running"}
    assert wait_for(lambda: (host.folder() / "log").read_text().count("\n")) == 1
    assert host.start("print('second')")["started"] is False
    assert host.start("sys.exit(0)", attempt=2)["started"] is True
    assert host.ended(attempt=2)["code"] == 0
    assert [path.name for path in host.folder().parent.iterdir() if path.name.startswith(".")] == []


def test_a_torn_job_starts_nothing(host):
    job = host.job("time.sleep(60)")
    for text in ("", job[: len(job) // 2], "[]", '{"id": "a"}'):
        assert "not complete" in host.ask("start", stdin=text, code=1)["error"]
    assert not (host.root / "runs").exists()


def test_what_is_missing_is_named_before_anything_starts(host):
    job = json.loads(host.job(""))
    assert "sync first" in host.ask("start", stdin=json.dumps({**job, "code": "0" * 64}), code=1)["error"]
    assert "sync first" in host.ask("start", stdin=json.dumps({**job, "requirements": "0" * 16}), code=1)["error"]
    assert "sync first" in host.ask("start", stdin=json.dumps({**job, "code": "../x"}), code=1)["error"]
    assert status(host)["state"] == "absent"


def test_a_signal_is_told_apart_from_a_code(host):
    host.start("os.kill(os.getpid(), signal.SIGKILL)")
    assert host.ended()["signal"] == 9 and host.ended()["code"] is None


def test_children_do_not_outlive_the_process(host):
    host.start("print(__import__('subprocess').Popen(['sleep', '100']).pid, flush=True)")
    host.ended()
    child = int((host.folder() / "log").read_text().splitlines()[1])
    wait_for(lambda: not alive(child))


def test_stop_ends_children_in_sessions_of_their_own(host):
    started = host.start("__import__('subprocess').run(['sleep', '100'], start_new_session=True)")
    children = wait_for(lambda: [process for process in processes(host.folder()) if process != started["process"]])
    assert host.ask("stop", "a", "1", "0")["exit"]["signal"] in (signal.SIGTERM, signal.SIGKILL)
    assert not any(map(alive, children))


def test_the_process_ignores_no_signal_that_its_keeper_does(host):
    numbers = "(signal.SIGHUP, signal.SIGINT, signal.SIGTERM)"
    host.start(f"sys.exit(any(signal.getsignal(number) == signal.SIG_IGN for number in {numbers}))")
    assert host.ended()["code"] == 0


SAVES = (
    "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(75))); print('up', flush=True)\n"
)


def up(host, run="a") -> None:
    wait_for(lambda: "up" in (host.folder(run) / "log").read_text())


def test_stop_lets_it_save(host):
    process = host.start(SAVES + "time.sleep(60)")["process"]
    bystander = host.start(SAVES + "time.sleep(60)", run="b")["process"]
    up(host), up(host, "b")
    os.kill(process, signal.SIGSTOP)  # even so
    assert host.ask("stop", "a", "1", "20")["exit"]["code"] == 75
    assert (host.folder() / "log").read_text().endswith("saved\n")
    assert alive(bystander) and status(host, "b")["state"] == "running"
    assert host.ask("stop", "a", "1", "20")["state"] == "exited"  # again, and nothing happens


def test_a_start_that_comes_after_its_stop(host):
    assert host.ask("stop", "a", "1", "0")["state"] == "exited"
    answer = host.start("time.sleep(60)")  # it was delayed on its way, and the launcher had given up
    assert answer["started"] is False and answer["job"] is None
    assert host.ask("preflight")["runs"] == []
    assert host.start("sys.exit(0)", attempt=2)["started"] is True


def test_stop_kills_what_does_not_listen(host):
    host.start("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)")
    up(host)
    answer = host.ask("stop", "a", "1", "0.3")
    assert answer["state"] == "exited" and answer["exit"]["signal"] == 9


def test_without_its_keeper(host):
    process = host.start(SAVES + "time.sleep(60)")["process"]
    up(host)
    os.kill(keeper_of(process), signal.SIGKILL)
    assert status(host)["state"] == "running" and host.ask("preflight")["runs"] == [{"id": "a", "attempt": 1}]
    assert host.start("print('second')")["started"] is False
    assert host.ask("clean")["removed"] == []
    assert host.ask("stop", "a", "1", "20")["state"] == "lost"
    assert not alive(process)
    assert (host.folder() / "log").read_text().endswith("saved\n")
    assert status(host)["state"] == "lost" and host.ask("preflight")["runs"] == []


def test_logs_come_in_parts(host):
    host.start("sys.stdout.buffer.write(bytes(range(256)) * 4); sys.stdout.flush()")
    host.ended()
    found, offset = b"", 0
    while True:
        answer = host.ask("logs", "a", "1", str(offset), "700")
        if not answer["data"]:
            break
        found += base64.b64decode(answer["data"])
        offset = answer["offset"]
    assert found == b"[]\n" + bytes(range(256)) * 4 and answer["size"] == len(found)
    assert answer["state"] == "exited" and answer["exit"]["code"] == 0


def test_ids_of_any_kind(host):
    ids = [*filter(None, HOSTILE), ".", "..", "a/../../b", "%2e"]
    for run in ids:
        host.start("sys.exit(0)", run=run)
    for run in ids:
        wait_for(lambda run=run: status(host, run)["state"] == "exited")
        assert status(host, run)["job"]["id"] == run
    assert len(list((host.root / "runs").iterdir())) == len(ids) and not (host.root / "1").exists()
    assert host.ask("clean", *(f"--keep={run}" for run in ids))["removed"] == []
    assert set(host.ask("clean")["removed"]) == {f"run {run} attempt 1" for run in ids}


def test_ids_that_can_not_be(host):
    for run in ("", "x" * 201, "ü" * 40):
        assert "1 to 200 characters" in host.ask("start", stdin=host.job("", run=run), code=1)["error"]


def test_clean_keeps_what_runs(host):
    host.start("time.sleep(60)")
    host.start("sys.exit(0)", run="b")
    wait_for(lambda: status(host, "b")["state"] == "exited")
    assert host.ask("clean")["removed"] == ["run b attempt 1"]
    assert status(host)["state"] == "running" and host.ask("preflight")["code"] == [host.code]
