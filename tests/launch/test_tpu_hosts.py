"""One call a host: each has its own result, time-out and tries, and a failure has a host's name on it."""

import sys
import types

import pytest
from pods import backend, hosts
from pods.backend import Host, Pod, Result

HOSTS = tuple(Host(i, f"10.0.0.{i}") for i in range(4))
WELL = "print('mlm-host {}')"
PROGRAM = "import sys; sys.stdin.readline(); exec(sys.argv[1])"  # the first line is host.py


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(hosts, "BACKOFF", (0.02, 0.02))


def ask(timeout: float = 20.0, programs=None):
    """Asks four hosts, of which each runs a program."""
    cloud = types.SimpleNamespace(
        ssh=lambda worker, argv: [
            sys._base_executable, "-I", "-c", PROGRAM, (programs or {}).get(worker, WELL), str(worker)
        ],
    )  # fmt: skip
    stdin = {host: str(host.worker).encode() for host in HOSTS}
    pod = hosts.Hosts(cloud, Pod("p", "READY", HOSTS))
    return pod.ask(["status"], stdin=stdin, timeout=timeout)


@pytest.mark.standard
def test_each_host_has_its_own_answer_and_a_silent_one_is_named():
    programs = {
        0: "print('Welcome\\nmlm-host {\"was\": %s}\\nbye' % sys.stdin.read())",
        1: "sys.exit('no such file')",
        2: "import os; os.kill(os.getpid(), 9)",
        3: "import time; time.sleep(60)",
    }
    answers = ask(3.0, programs)
    assert answers[0].data == {"was": 0}
    said = [
        "",
        "code 1: no such file",
        "code -9: it said nothing",
        "no answer within 3 s (it said nothing)",
    ]
    assert [answer.error.partition("): ")[2] for answer in answers] == said


@pytest.mark.parametrize(
    ("code", "times", "calls", "error"),
    [
        (255, 2, 3, ""),
        (255, 9, 3, "host 1 (10.0.0.1): ssh failed 3 times: broken pipe"),
        (1, 9, 1, "host 1 (10.0.0.1): code 1: broken pipe"),
    ],
)
def test_ssh_is_tried_again(monkeypatch, capsys, code, times, calls, error):
    well = Result(0, "mlm-host {}")
    results = [Result(code, "", "broken pipe")] * times + [well]

    def run(argv, *_):
        return results.pop(0) if argv[-1] == "1" else well

    monkeypatch.setattr(backend, "run", run)
    assert ask()[1].error == error and times + 1 - len(results) == calls
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (2 if code == 255 else 0)


@pytest.mark.standard
def test_a_host_whose_python_is_too_old_says_so():
    """As that of a TPU VM with Ubuntu 20.04: the program itself would end with a SyntaxError, or a TypeError."""
    old = "import sys; sys.version_info = (3, 8, 10); exec(sys.argv.pop(1))"
    argv = (sys._base_executable, "-S", "-c", old, hosts.BOOT, "host.py", "preflight", "")
    done = backend.run(argv, 20, hosts.program())
    assert (
        done.code == 1 and "python3 is 3.8 there" in done.stderr and "Traceback" not in done.stderr
    )
