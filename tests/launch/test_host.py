"""host.py: a run's process is started once, kept, told of, and stopped, whatever dies around it."""

import hashlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile

import host
import host_setup
import pytest
from host import processes

from tests.launch import LAUNCH
from tests.launch.pod import PYTHON, STUB, alive, kill_marked, wait_for

pytestmark = pytest.mark.standard
HOSTILE = ["a b", "--flag=$(touch pwned)", "'\"\\", "line\nline", "ü-语-\u202e", "-x", "", "*", "~"]
SAVES = (
    "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(75)))\n"
    "print('up', flush=True)\n"
    "time.sleep(60)"
)
FILES = {
    "requirements.txt": b"",
    "launch/environment.sh": b"exit 2",
    "mlm/__main__.py": STUB.encode(),
}


def pack(files: dict[str, bytes], links: dict[str, str] | None = None) -> tuple[bytes, str]:
    """Returns an archive, and its SHA-256; links: {name: what it points to}."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE
            info.linkname = target
            tar.addfile(info)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest()


class Machine:
    """host.py on this machine, with a home and code of its own."""

    def __init__(self, home: pathlib.Path):
        self.home = home
        self.root = home / ".mlm-pod"
        archive, self.code = pack(FILES)
        self.ask("unpack", self.code, stdin=archive)
        self.ask("install", self.code, PYTHON)

    def popen(self, *argv: str) -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        variables = os.environ | {"HOME": str(self.home)}
        return subprocess.Popen([PYTHON, "-S", LAUNCH / "host.py", *argv], env=variables, **pipes)

    def ask(self, *argv: str, stdin: bytes = b"", code: int = 0) -> dict:
        process = self.popen(*argv)
        out, err = process.communicate(stdin, timeout=60)
        assert process.returncode == code, (out, err)
        (line,) = [line for line in out.splitlines() if line.startswith(b"mlm-host ")]
        return json.loads(line.removeprefix(b"mlm-host "))

    def job(self, stub: str, run: str = "a", attempt: int = 1, argv=(), **env: str) -> bytes:
        job = {"id": run, "attempt": attempt, "code": self.code, "argv": list(argv)}
        job |= {"program": "", "place": [], "launch": "x", "env": {"STUB": stub, **env}}
        return json.dumps(job).encode()

    def start(self, stub: str, **more) -> dict:
        return self.ask("start", stdin=self.job(stub, **more))

    def running(self, stub: str, run: str = "a", **more) -> int:
        """Starts a process, and returns its number once it says "up"."""
        assert self.start(stub, run=run, **more)["started"]
        wait_for(lambda: "up\n" in (self.folder(run) / "log").read_text())
        return min(processes(self.folder(run)))

    def status(self, run: str = "a", attempt: int = 1) -> dict:
        return self.ask("status", run, str(attempt))

    def folder(self, run: str = "a", attempt: int = 1) -> pathlib.Path:
        return self.root / "runs" / run / str(attempt)

    def ended(self, attempt: int = 1) -> dict:
        file = self.folder(attempt=attempt) / "exit.json"
        wait_for(file.exists)
        return json.loads(file.read_text())


@pytest.fixture
def machine(tmp_path):
    found = Machine(tmp_path / "some home")
    yield found
    kill_marked(str(found.root))  # which stands in the environment of all that runs there


def keeper_of(process: int) -> int:
    """Its parent."""
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_start_and_end(machine):
    """A process is started with its words as they are; its children end with it."""
    child = "print(__import__('subprocess').Popen(['sleep', '100']).pid, flush=True)\n"
    answer = machine.start(f"{child}os.kill(os.getpid(), signal.SIGKILL)", argv=HOSTILE)
    assert answer["started"] and answer["attempt"] == 1
    end = machine.ended()
    assert (end["code"], end["signal"]) == (None, 9)
    first, second = (machine.folder() / "log").read_text().splitlines()
    assert json.loads(first) == HOSTILE
    wait_for(lambda: not alive(int(second)))
    assert machine.start("sys.exit(3)", attempt=2)["started"]
    assert machine.ended(2)["code"] == 3 and machine.status(attempt=0)["exit"]["code"] == 3


def test_the_keeper_holds_nothing_of_the_connection_and_a_secret_stays_in_memory(machine):
    stub = "open(folder / 'got', 'w').write(os.environ['SECRET'][::-1]); print('up', flush=True); time.sleep(60)"
    # returns, although the process has our pipes' descendants
    process = machine.running(stub, SECRET="canary-1")
    keeper = keeper_of(process)
    held = {str(path.readlink()) for path in pathlib.Path(f"/proc/{keeper}/fd").iterdir()}
    assert held == {"/dev/null", str(machine.folder() / "lock")}
    assert len({os.getsid(keeper), os.getsid(process), os.getsid(0)}) == 3
    os.kill(keeper, signal.SIGHUP)
    # a host that shuts down: the process is to save, and is to be seen
    os.kill(keeper, signal.SIGTERM)
    assert (machine.folder() / "got").read_text() == "1-yranac"
    assert machine.status()["state"] == "running" and alive(keeper)
    files = [file for file in machine.root.rglob("*") if file.is_file()]
    assert [file for file in files if b"canary-1" in file.read_bytes()] == []


def test_it_is_never_started_twice(machine):
    racers = [machine.popen("start") for _ in range(6)]
    for racer in racers:  # all are past their imports, and read the job at about the same moment
        racer.stdin.write(machine.job("time.sleep(60)"))
    for racer in racers:
        racer.stdin.close()
    answers = [json.loads(racer.stdout.read().removeprefix(b"mlm-host ")) for racer in racers]
    assert sum(answer["started"] for answer in answers) == 1
    assert {answer["state"] for answer in answers} == {"running"}
    assert len(processes(machine.folder())) == 1
    assert [path.name for path in machine.folder().parent.iterdir()] == ["1"]


def test_a_job_that_is_cut_off_starts_nothing(machine):
    machine.ask("start", stdin=machine.job("time.sleep(60)")[:40], code=1)
    assert machine.status()["state"] == "absent" and not (machine.root / "runs").exists()


def test_stop_lets_it_save(machine):
    process = machine.running(SAVES)
    bystander = machine.running(SAVES, run="b")
    os.kill(process, signal.SIGSTOP)  # even so
    assert machine.ask("stop", "a", "1", "20")["exit"]["code"] == 75
    assert (machine.folder() / "log").read_text().endswith("saved\n")
    assert alive(bystander) and machine.status("b")["state"] == "running"
    assert machine.ask("stop", "a", "1", "20")["state"] == "exited"  # again, and nothing happens


def test_a_start_that_comes_after_its_stop(machine):
    assert machine.ask("stop", "a", "1", "0")["state"] == "exited"
    # it was delayed on its way, and the launcher had given up
    answer = machine.start("time.sleep(60)")
    assert answer["started"] is False and answer["job"] is None


def test_stop_kills_what_does_not_listen_with_children_in_sessions_of_their_own(machine):
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True);"
    child = "__import__('subprocess').run(['sleep', '100'], start_new_session=True)"
    machine.running(f"{ignore} {child}")
    both = wait_for(lambda: len(found := processes(machine.folder())) == 2 and found)
    answer = machine.ask("stop", "a", "1", "0.3")
    assert answer["state"] == "exited" and answer["exit"]["signal"] == 9
    assert not any(map(alive, both))


def test_without_its_keeper_it_is_still_seen(machine):
    process = machine.running(SAVES)
    os.kill(keeper_of(process), signal.SIGKILL)
    assert machine.status()["state"] == "running"
    assert "'a' (attempt 1) is alive" in machine.ask("preflight", machine.code)["problems"][0]
    assert machine.start("print('second')")["started"] is False
    assert machine.ask("stop", "a", "1", "20")["state"] == "lost"
    assert not alive(process) and (machine.folder() / "log").read_text().endswith("saved\n")
    assert machine.ask("preflight", machine.code)["problems"] == []


def test_preflight_turns_huge_pages_on_where_a_tpu_is(tmp_path, monkeypatch):
    """Where sudo asks for no password; jax says it where they are off."""
    pages = tmp_path / "enabled"
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # of the driver, as on every host of v5e and v6e
    (tmp_path / "sudo").write_text(
        f"#!/bin/sh\n[ \"$1 $2\" = '-n tee' ] && echo '[always]' >{pages}\n"
    )
    (tmp_path / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(host, "DEVICES", tmp_path)
    monkeypatch.setattr(host, "HUGE_PAGES", pages)
    for count in (0, 1):
        pages.write_text("always [madvise] never\n")
        assert host.preflight(tmp_path, "c")["accelerators"] == count
        assert pages.read_text().startswith("[always]") == bool(count)
        (tmp_path / "vfio" / "0").touch()


def test_a_torn_archive_is_not_taken_for_the_code(machine):
    archive, code = pack({"a/x": b"1"}, {"z/link": "../a/x"})
    for torn in (archive[:-5], b""):
        assert "arrived damaged" in machine.ask("unpack", code, stdin=torn, code=1)["error"]
    assert not machine.ask("preflight", code)["has_code"]
    machine.ask("unpack", code, stdin=archive)
    folder = machine.root / "code" / code
    assert (folder / "z" / "link").resolve() == folder / "a" / "x"
    assert machine.ask("preflight", code)["has_code"]


@pytest.mark.parametrize(
    ("files", "links", "named"),
    [
        (["../x"], {}, "../x"),
        ([], {"etc": "/etc"}, "etc"),
        # inside by its words, outside by where they lead
        ([], {"a/b/top": "../..", "out": "a/b/top/.."}, "out"),
        (["a/b/top/mlm-through-a-link"], {"a/b/top": "/tmp"}, "a/b/top"),
    ],
)
def test_nothing_leaves_the_folder(tmp_path, files, links, named):
    archive, code = pack(dict.fromkeys(files, b""), links)
    with pytest.raises(host_setup.HostError, match=f"'{named}' "):
        host_setup.unpack(tmp_path, code, archive)
    assert list((tmp_path / "code").iterdir()) == []
    assert not pathlib.Path("/tmp/mlm-through-a-link").exists()


def test_packages_are_those_of_the_code_s_own_script(machine):
    """One environment for each version of them; what fails says why."""
    makes = b'mkdir -p "$MLM_VENV/bin"; ln -sf %s "$MLM_VENV/bin/python"' % sys.executable.encode()
    pythons = []
    for requirements in (b"six", b"six", b"attrs"):
        files = {"requirements.txt": requirements, "launch/environment.sh": makes}
        archive, code = pack(files | {"x": os.urandom(4)})
        machine.ask("unpack", code, stdin=archive)
        assert machine.ask("install", code, "")["python"].startswith("Python 3.")
        pythons.append(json.loads((machine.root / "code" / f"{code}.json").read_text())["python"])
    assert pythons[0] == pythons[1] != pythons[2]
    archive, code = pack(FILES | {"launch/environment.sh": b"echo 'launch: no pip' >&2; exit 2"})
    machine.ask("unpack", code, stdin=archive)
    assert "no pip" in machine.ask("install", code, "", code=1)["error"]
