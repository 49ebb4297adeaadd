"""One call a host: each has its own result, time-out and tries, and a failure has a host's name on it."""

import sys
import time
import types

import pytest
from pods import backend, hosts, settings
from pods.backend import Host, Pod, Result

HOSTS = tuple(Host(i, f"10.0.0.{i}") for i in range(4))
WELL = "print('mlm-host {}')"
PROGRAM = "import sys; sys.stdin.readline(); exec(sys.argv[1])"  # the first line is host.py


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(hosts, "BACKOFF", (0.02, 0.02))


def ask(runner, timeout: float = 20.0, *, direct: bool = True, retry: bool = True, programs=None):
    """Asks four hosts, of which each runs a program."""
    cloud = types.SimpleNamespace(
        dry=False, runner=runner, settings=settings.Settings(), forget=lambda: None,
        ssh=lambda worker, argv: [
            *([] if direct else ["gcloud"]), sys._base_executable, "-I", "-c", PROGRAM,
            (programs or {}).get(worker, WELL), str(worker),
        ],
    )  # fmt: skip
    pod = hosts.Hosts(cloud, Pod("p", "READY", HOSTS), retry=retry)
    return pod.ask(
        ["status"], stdin={host: str(host.worker).encode() for host in HOSTS}, timeout=timeout
    )


@pytest.mark.standard
def test_each_host_has_its_own_answer_and_a_silent_one_is_named(tmp_path):
    """What a call has started goes with it."""
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(tmp_path)!r}, 'late').touch()"
    programs = {
        0: "print('Welcome\\nmlm-host {\"was\": %s}\\nbye' % sys.stdin.read())",
        1: "sys.exit('no such file')",
        2: "import os; os.kill(os.getpid(), 9)",
        3: f"import subprocess, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)",
    }
    begin = time.monotonic()
    answers = ask(backend.Runner(), 3.0, programs=programs)
    assert time.monotonic() - begin < 12
    assert answers[0].data == {"was": 0}
    said = ["", "code 1: no such file", "code -9: it said nothing", "no answer within 3 s"]
    assert [answer.error for answer in answers] == said
    time.sleep(2)
    assert not (tmp_path / "late").exists()


class Failing(backend.Runner):
    """A runner to whose second host ssh fails with a code, so many times."""

    def __init__(self, code: int, times: int = 100):
        super().__init__()
        self.code = code
        self.times = times
        self.calls = 0

    def run(self, argv, timeout, stdin=b""):
        if argv[-1] != "1":
            return Result(0, "mlm-host {}")
        self.calls += 1
        return (
            Result(0, "mlm-host {}")
            if self.calls > self.times
            else Result(self.code, "mlm-host {}", "broken pipe")
        )


@pytest.mark.parametrize("code", hosts.SSH_FAILED)
def test_ssh_is_tried_again(code, capsys):
    twice = Failing(code, times=2)
    assert ask(twice)[1].error == "" and twice.calls == 3
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and said[0].startswith("host 1 (10.0.0.1): ssh failed (broken pipe)")
    always = Failing(code)
    assert ask(always)[1].error == "ssh failed 3 times: broken pipe" and always.calls == 3
    for once in ({"retry": False}, {"direct": False}):  # gcloud's own, which has tried ten times
        runner = Failing(code)
        assert ask(runner, **once)[1].error == "ssh failed: broken pipe" and runner.calls == 1
    other = Failing(1)
    assert ask(other)[1].error == "code 1: broken pipe" and other.calls == 1


@pytest.mark.standard
@pytest.mark.parametrize("rest", [b"", b'"text" of the program', b"\x1f\x8b of an archive\nmore"])
def test_a_host_given_only_the_rest_of_its_stdin_does_nothing(rest, tmp_path):
    """As when gcloud runs a command again by itself, after a connection that took a part of stdin."""
    argv = (
        sys._base_executable,
        "-S",
        "-c",
        hosts.BOOT,
        "host.py",
        "unpack",
        str(tmp_path),
        "0" * 64,
    )
    assert backend.Runner().run(argv, 20, rest).code == 254 in hosts.SSH_FAILED
    done = backend.Runner().run(argv, 20, hosts.program() + rest)
    assert done.code == 1 and "the archive arrived damaged" in done.stdout


@pytest.mark.standard
def test_a_host_whose_python_is_too_old_says_so():
    """As that of a TPU VM with Ubuntu 20.04: the program itself would end with a SyntaxError, or a TypeError."""
    old = "import sys; sys.version_info = (3, 8, 10); exec(sys.argv.pop(1))"
    argv = (sys._base_executable, "-S", "-c", old, hosts.BOOT, "host.py", "preflight", "~", "")
    done = backend.Runner().run(argv, 20, hosts.program())
    assert (
        done.code == 1 and "python3 is 3.8 there" in done.stderr and "Traceback" not in done.stderr
    )
