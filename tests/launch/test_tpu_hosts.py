"""One call a host: each has its own result, time-out and tries, and a failure has a host's name on it."""

import sys
import time
import types

import pytest
from pods import backend, gcloud, hosts, settings
from pods.backend import Host, Pod
from pods.errors import PodError

HOSTS = tuple(Host(i, f"10.0.0.{i}") for i in range(4))
WELL = "print('mlm-host {}')"
PROGRAM = "import sys; sys.stdin.readline(); exec(sys.argv[1])"  # the first line is host.py


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(hosts, "BACKOFF", (0.02, 0.02))


def run(
    programs: dict[int, str], timeout: float = 20.0, *, direct: bool = True, retry: bool = True, said=None
) -> list[hosts.Answer]:
    """Asks four hosts, of which each runs a program."""
    cloud = types.SimpleNamespace(
        dry=False, runner=backend.Runner(), settings=settings.Settings(), forget=lambda: None,
        ssh=lambda worker, argv: [
            *([] if direct else ["gcloud"]), sys._base_executable, "-I", "-c", PROGRAM, programs.get(worker, WELL)
        ],
    )  # fmt: skip
    notify = (said if said is not None else []).append
    pod = hosts.Hosts(cloud, Pod("p", "READY", HOSTS), notify=notify, retry=retry)
    return pod.ask(["status"], stdin={host: str(host.worker).encode() for host in HOSTS}, timeout=timeout)


@pytest.mark.standard
def test_answers_are_those_of_their_hosts():
    program = "import sys; print('mlm-host {\"was\": %s}' % sys.stdin.read())"
    answers = run(dict.fromkeys(range(4), program))
    assert [(answer.host.worker, answer.data, answer.error) for answer in answers] == [
        (i, {"was": i}, "") for i in range(4)
    ]


@pytest.mark.standard
def test_codes_and_signals_fail_and_are_named():
    answers = run({1: "import sys; sys.exit('no such file')", 2: "import os; os.kill(os.getpid(), 9)", 3: "exit(5)"})
    expected = ["", "code 1: no such file", "code -9: it said nothing", "code 5: it said nothing"]
    assert [answer.error for answer in answers] == expected


@pytest.mark.standard
def test_a_silent_host_is_named_and_the_others_are_kept():
    begin = time.monotonic()
    answers = run({2: "import time; print('mlm-host {}', flush=True); time.sleep(60)"}, timeout=3.0)
    assert time.monotonic() - begin < 12
    assert [answer.error for answer in answers] == ["", "", "no answer within 3 s", ""]


@pytest.mark.standard
@pytest.mark.parametrize("code", hosts.SSH_FAILED)
def test_ssh_is_tried_again(tmp_path, monkeypatch, code):
    program = (
        f"import pathlib, sys; p = pathlib.Path({str(tmp_path)!r}, 'n'); p.open('a').write('x')\n"
        f"print('mlm-host {{}}'); sys.exit(0 if len(p.read_text()) == 3 else {code})"
    )
    answers, file = run({1: program}, said=(said := [])), tmp_path / "n"
    assert answers[1].error == "" and len(said) == 2 and said[0].startswith("host 1 (10.0.0.1): ssh failed")
    file.unlink()
    assert run({1: program}, retry=False)[1].error == "ssh failed: it said nothing" and file.read_text() == "x"
    file.unlink()
    gcloud_ = tmp_path / "gcloud"
    gcloud_.write_text('#!/bin/sh\nexec "$@"\n')
    gcloud_.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    answers = run({1: program}, direct=False)  # gcloud's, which has tried ten times
    assert answers[1].error == "ssh failed: it said nothing" and file.read_text() == "x"
    file.write_text("xxx")  # it never gets there
    assert run({1: program})[1].error == "ssh failed 3 times: it said nothing"


@pytest.mark.standard
def test_another_code_is_never_tried_again(tmp_path):
    answers = run({1: f"open({str(tmp_path / 'n')!r}, 'a').write('x'); exit(1)"})
    assert answers[1].error and (tmp_path / "n").read_text() == "x"


@pytest.mark.standard
def test_what_a_call_has_started_goes_with_it(tmp_path):
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(tmp_path)!r}, 'late').touch()"
    program = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    run({0: program, 1: "pass", 2: "pass", 3: "pass"}, timeout=2.0)
    time.sleep(3.5)
    assert not (tmp_path / "late").exists()


def test_answers_are_found_among_banners():
    def read(stdout: str, code: int | None = 0) -> tuple[dict, str]:
        answer = hosts._read(HOSTS[0], backend.Result(code, stdout), 3.0)
        return answer.data, answer.error

    assert read('Welcome\nmlm-host {"a": 1}\nbye\n') == ({"a": 1}, "")
    assert read("Welcome\n") == ({}, "it ended well and gave no answer")
    assert read('mlm-host {"a": ') == ({}, "it ended well and gave no answer")
    assert read('mlm-host {"error": "no code"}\n', 1) == ({"error": "no code"}, "no code")
    assert read('mlm-host {"a": 1}\n', None) == ({}, "no answer within 3 s")


@pytest.mark.standard
@pytest.mark.parametrize("rest", [b"", b"\x1f\x8b of an archive\nmore", b'"text" of the program'])
def test_a_host_given_only_the_rest_of_its_stdin_does_nothing(rest, tmp_path):
    """As when gcloud runs a command again by itself, after a connection that took a part of stdin."""
    argv = (sys._base_executable, "-S", "-c", hosts.BOOT, "host.py", "--root", str(tmp_path), "unpack", "0" * 64)
    assert backend.Runner().run(argv, 20, rest).code == 254 in hosts.SSH_FAILED
    done = backend.Runner().run(argv, 20, hosts.program() + rest)
    assert done.code == 1 and "the archive arrived damaged" in done.stdout


def test_require_names_all_that_failed():
    cloud = gcloud.TpuVm(settings.Settings("p", "my-project", "z", "v4-32"), backend.Runner())
    pod = hosts.Hosts(cloud, Pod("p", "READY", HOSTS))
    answers = [hosts.Answer(HOSTS[0], {}), hosts.Answer(HOSTS[1], {}, "one"), hosts.Answer(HOSTS[3], {}, "three")]
    with pytest.raises(PodError, match=r"sync failed on 2 of 3 hosts: host 1 \(10.0.0.1\): one; host 3 .*: three\."):
        pod.require(answers, "sync")


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(PodError, match=r"gclood can't be started .* PATH") as error:
        backend.Runner().run(["gclood"], 1)
    assert error.value.kind == "missing"
