"""host.py: a run's process is started once, kept, told of, and stopped, whatever dies around it."""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import stat
import subprocess
import time

import host_setup
import pytest
from host import processes

from tests.launch.host_folder import HOSTILE, LAUNCH, alive, keeper_of, wait_for

standard = pytest.mark.standard


def open_files(process: int) -> set[str]:
    found = set()
    for path in pathlib.Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(str(path.readlink()))
    return found


@standard
def test_start_and_end(host):
    answer = host.start("print('error', file=sys.stderr, flush=True); sys.exit(3)", argv=HOSTILE)
    assert answer["started"] and answer["attempt"] == 1
    assert host.ended()["code"] == 3 and host.ended()["signal"] is None
    wait_for(lambda: host.status()["state"] == "exited")
    assert host.status()["exit"]["code"] == 3 and host.status()["host"] == socket.gethostname()
    first, second = (host.folder() / "log").read_text().splitlines()
    assert json.loads(first) == HOSTILE and second == "error"
    assert not list(host.root.rglob("pwned"))


@standard
def test_the_keeper_holds_nothing_of_the_connection_and_a_secret_stays_in_memory(host):
    stub = "open(folder / 'got', 'w').write(os.environ['SECRET'][::-1]); time.sleep(60)"
    # returns, although the process has our pipes' descendants
    process = host.running(stub, SECRET="canary-1")
    keeper = keeper_of(process)
    # it has just started it
    wait_for(lambda: open_files(keeper) == {"/dev/null", str(host.folder() / "lock")})
    assert (
        len({os.getsid(keeper), os.getsid(process), os.getsid(0)}) == 3
        and os.getpgid(process) == process
    )
    assert str(host.folder() / "lock") not in open_files(process)
    os.kill(keeper, signal.SIGHUP)
    # a host that shuts down: the process is to save, and is to be seen
    os.kill(keeper, signal.SIGTERM)
    assert (
        wait_for(lambda: (host.folder() / "got").exists() and (host.folder() / "got").read_text())
        == "1-yranac"
    )
    assert host.status()["state"] == "running" and alive(keeper)
    job = host.folder() / "job.json"
    assert stat.S_IMODE(job.stat().st_mode) == 0o600 and json.loads(job.read_text())["env"] == [
        "SECRET",
        "STUB",
    ]
    files = [file for file in host.root.rglob("*") if file.is_file()]
    assert [file for file in files if b"canary-1" in file.read_bytes()] == []


@standard
def test_it_is_never_started_twice(host):
    racers = [host.popen("start") for _ in range(6)]
    for (
        racer
    ) in racers:  # all of them are past their imports, and read the job at about the same moment
        racer.stdin.write(host.job("time.sleep(60)"))
    for racer in racers:
        racer.stdin.close()
    answers = [json.loads(racer.stdout.read().removeprefix("mlm-host ")) for racer in racers]
    assert sum(answer["started"] for answer in answers) == 1
    assert {answer["state"] for answer in answers} == {"running"}
    assert wait_for(lambda: (host.folder() / "log").read_text().count("\n")) == 1
    assert host.start("sys.exit(0)", attempt=2)["started"] is True
    assert host.ended(attempt=2)["code"] == 0
    assert [path.name for path in host.folder().parent.iterdir() if path.name.startswith(".")] == []


def test_what_is_missing_is_named_before_anything_starts(host):
    job = host.job("time.sleep(60)")
    for text in ("", job[: len(job) // 2], "[]", '{"id": "a"}'):
        assert "not complete" in host.ask("start", stdin=text, code=1)["error"]
    (host.root / "venv" / "old").mkdir()
    host_setup.write(host.root / "venv" / "old" / "python.json", {"python": "/gone/bin/python"})
    for wrong in (
        {"code": "0" * 64},
        {"packages": "0" * 16},
        {"code": "../x"},
        {"packages": "old"},
    ):
        text = json.dumps(json.loads(host.job("")) | wrong)
        assert "sync first" in host.ask("start", stdin=text, code=1)["error"]
    for run in ("", "x" * 201, "ü" * 40):
        assert (
            "1 to 200 characters" in host.ask("start", stdin=host.job("", run=run), code=1)["error"]
        )
    assert host.status()["state"] == "absent" and not (host.root / "runs").exists()


@standard
def test_what_a_process_leaves(host):
    """A signal is told apart from a code, its children end with it, and it ignores no signal that its keeper does."""
    numbers = "(signal.SIGHUP, signal.SIGINT, signal.SIGTERM)"
    host.start(
        "print(__import__('subprocess').Popen(['sleep', '100']).pid, flush=True)\n"
        f"if not any(signal.getsignal(number) == signal.SIG_IGN for number in {numbers}):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert host.ended()["signal"] == 9 and host.ended()["code"] is None
    child = int((host.folder() / "log").read_text().splitlines()[1])
    wait_for(lambda: not alive(child))


SAVES = (
    "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(75)))\n"
    "print('up', flush=True)\n"
)


def up(host, run="a") -> None:
    wait_for(lambda: "up" in (host.folder(run) / "log").read_text())


@standard
def test_stop_lets_it_save(host):
    process = host.running(SAVES + "time.sleep(60)")
    bystander = host.running(SAVES + "time.sleep(60)", run="b")
    up(host), up(host, "b")
    os.kill(process, signal.SIGSTOP)  # even so
    assert host.ask("stop", "a", "1", "20")["exit"]["code"] == 75
    assert (host.folder() / "log").read_text().endswith("saved\n")
    assert alive(bystander) and host.status("b")["state"] == "running"
    assert host.ask("stop", "a", "1", "20")["state"] == "exited"  # again, and nothing happens


@standard
def test_a_full_disk_keeps_no_end_from_being_known(host):
    """It was full after the start: nothing new can be written, but what is there can be overwritten."""
    program = (
        "import os, sys; sys.path.insert(0, sys.argv.pop(1)); import host, host_setup\n"
        "def full(path, value): raise OSError(28, 'No space left on device')\n"
        "def keep(*words, keep=host._keep): host_setup.write = full; keep(*words)\n"
        "host._keep = keep; sys.exit(host.main(sys.argv[1:]))"
    )
    argv = [host.PYTHON, "-S", "-c", program, str(LAUNCH), "start", str(host.root)]
    subprocess.run(
        argv, input=host.job("sys.exit(75)"), text=True, check=True, capture_output=True, timeout=60
    )
    wait_for(lambda: host.status()["state"] != "running")
    assert host.status()["state"] == "exited" and host.status()["exit"]["code"] == 75


@standard
def test_a_start_that_comes_after_its_stop(host):
    assert host.ask("stop", "a", "1", "0")["state"] == "exited"
    # it was delayed on its way, and the launcher had given up
    answer = host.start("time.sleep(60)")
    assert answer["started"] is False and answer["job"] is None
    assert host.ask("preflight", host.code)["runs"] == []


@standard
def test_stop_kills_what_does_not_listen_with_children_in_sessions_of_their_own(host):
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True);"
    started = host.running(
        f"{ignore} __import__('subprocess').run(['sleep', '100'], start_new_session=True)"
    )
    up(host)
    children = wait_for(
        lambda: [process for process in processes(host.folder()) if process != started]
    )
    answer = host.ask("stop", "a", "1", "0.3")
    assert answer["state"] == "exited" and answer["exit"]["signal"] == 9
    assert not any(map(alive, children))


@standard
def test_without_its_keeper(host):
    process = host.running(SAVES + "time.sleep(60)")
    up(host)
    os.kill(keeper_of(process), signal.SIGKILL)
    assert host.status()["state"] == "running" and host.ask("preflight", host.code)["runs"] == [
        {"id": "a", "attempt": 1}
    ]
    assert host.start("print('second')")["started"] is False
    assert host.ask("clean")["removed"] == []
    assert host.ask("stop", "a", "1", "20")["state"] == "lost"
    assert not alive(process) and (host.folder() / "log").read_text().endswith("saved\n")
    assert host.status()["state"] == "lost" and host.ask("preflight", host.code)["runs"] == []


def leave(host, run: str, attempt: int = 1, log: bytes = b"") -> None:
    """Writes what a run that has ended leaves."""
    folder = host.root / "runs" / host_setup.folder_name(run) / str(attempt)
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "log").write_bytes(log)
    (folder / "exit.json").write_text(json.dumps({"code": 0, "signal": None, "ended": time.time()}))


def test_logs_come_in_parts(host):
    leave(host, "a", log=bytes(range(256)) * 4)
    found = b""
    offset = 0
    while (answer := host.ask("logs", "a", "1", str(offset), "700"))["data"]:
        found += base64.b64decode(answer["data"])
        offset = answer["offset"]
    assert found == bytes(range(256)) * 4 and answer["size"] == len(found)
    assert answer["state"] == "exited" and answer["exit"]["code"] == 0


def test_clean_names_what_it_can_not_remove_and_removes_the_rest(host, monkeypatch):
    def refuse(folder, rmtree=shutil.rmtree):
        if folder.parent.name == "a":
            raise OSError(1, "Operation not permitted", "log")
        rmtree(folder)

    leave(host, "a"), leave(host, "b")
    monkeypatch.setattr(shutil, "rmtree", refuse)
    said = host.ask("clean", code=1)["error"]
    assert said == f"{host.folder('a')} can't be removed (log: Operation not permitted)"
    assert not host.folder("b").exists()
