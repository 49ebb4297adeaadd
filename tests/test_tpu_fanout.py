"""One call a host: each has its own result, time-out and tries, and a failure has a host's name on it."""

import sys
import time

import pytest
from pods import backend, fanout, gcloud, hosts, settings
from pods.backend import Call, Host
from pods.errors import PodError

HOSTS = [Host(i, f"10.0.0.{i}") for i in range(4)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fanout, "BACKOFF", (0.02, 0.02))


def python(program: str, *, direct: bool = True) -> Call:
    return Call((sys._base_executable, "-I", "-c", program), direct=direct)


def run(programs: dict[int, str], timeout: float = 20.0, **more) -> list[fanout.Answer]:
    calls = {host: python(programs.get(host.worker, "print('well')")) for host in HOSTS}
    return fanout.run(backend.Runner(), calls, timeout, **{"notify": lambda sentence: None, **more})


def test_results_are_those_of_their_hosts():
    found = run({i: f"import sys; print({i}, sys.stdin.read())" for i in range(4)})
    assert [(outcome.host.worker, outcome.result.stdout) for outcome in found] == [(i, f"{i} \n") for i in range(4)]
    assert not any(outcome.error for outcome in found)


def test_codes_and_signals_fail_and_are_named():
    found = run({1: "import sys; sys.exit('no such file')", 2: "import os; os.kill(os.getpid(), 9)", 3: "exit(5)"})
    errors = [outcome.error for outcome in found]
    assert errors == [
        "",
        "code 1: no such file",
        "the call was killed by signal 9: it said nothing",
        "code 5: it said nothing",
    ]


def test_a_silent_host_is_named_and_the_others_are_kept():
    begin = time.monotonic()
    found = run({2: "import time; print('half', flush=True); time.sleep(60)"}, timeout=3.0)
    assert time.monotonic() - begin < 12
    assert [outcome.error for outcome in found] == ["", "", "no answer within 3 s", ""]
    assert [outcome.result.stdout for outcome in found if not outcome.error] == ["well\n"] * 3


@pytest.mark.parametrize("code", fanout.SSH_FAILED)
def test_ssh_is_tried_again(tmp_path, code):
    program = (
        f"import pathlib, sys; p = pathlib.Path({str(tmp_path)!r}, 'n'); p.open('a').write('x')\n"
        f"sys.exit(0 if len(p.read_text()) == 3 else {code})"
    )
    said = []
    found = run({1: program}, notify=said.append)
    assert found[1].error == "" and found[1].tries == 3 and len(said) == 2 and said[0].startswith("host 1 (10.0.0.1)")
    (tmp_path / "n").unlink()
    call = {HOSTS[1]: python(program, direct=False)}  # gcloud's, which has tried ten times
    assert fanout.run(backend.Runner(), call, 20.0, notify=said.append)[0].tries == 1
    (tmp_path / "n").write_text("xxx")  # it never gets there
    assert run({1: program})[1].error == "ssh failed 3 times: it said nothing"


def test_another_code_is_never_tried_again(tmp_path):
    found = run({1: f"open({str(tmp_path / 'n')!r}, 'a').write('x'); exit(1)"})
    assert found[1].tries == 1 and (tmp_path / "n").read_text() == "x"


def test_what_a_call_has_started_goes_with_it(tmp_path):
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(tmp_path)!r}, 'late').touch()"
    program = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    run({0: program, 1: "pass", 2: "pass", 3: "pass"}, timeout=2.0)
    time.sleep(3.5)
    assert not (tmp_path / "late").exists()


def test_answers_are_found_among_banners():
    def answer(stdout: str, code: int | None = 0, error: str = "") -> fanout.Answer:
        return hosts._read(fanout.Answer(HOSTS[0], {}, error, backend.Result(code, stdout)))

    assert answer('Welcome\nmlm-host {"a": 1}\nbye\n').data == {"a": 1}
    assert answer("Welcome\n").error == "it ended well and gave no answer"
    assert answer('mlm-host {"a": ').error == "it ended well and gave no answer"
    assert answer('mlm-host {"error": "no code"}\n', 1, "code 1: x").error == "no code"
    assert answer('mlm-host {"a": 1}\n', None, "no answer within 3 s").error == "no answer within 3 s"


@pytest.mark.parametrize("rest", [b"", b"\x1f\x8b of an archive\nmore", b'"text" of the program'])
def test_a_host_given_only_the_rest_of_its_stdin_does_nothing(rest, tmp_path):
    """As when gcloud runs a command again by itself, after a connection that took a part of stdin."""
    argv = (sys._base_executable, "-S", "-c", hosts.BOOT, "host.py", "--root", str(tmp_path), "unpack", "0" * 64)
    assert backend.Runner().run(Call(argv, rest), 20).code == 254 in fanout.SSH_FAILED
    done = backend.Runner().run(Call(argv, hosts.program() + rest), 20)
    assert done.code == 1 and "the archive arrived damaged" in done.stdout


def test_require_names_all_that_failed():
    cloud = gcloud.TpuVm(settings.Settings("p", "my-project", "z", "v4-32"), backend.Runner())
    pod = hosts.Hosts(cloud, backend.Pod("p", "READY", tuple(HOSTS)))
    answers = [fanout.Answer(HOSTS[0], {}), fanout.Answer(HOSTS[1], {}, "one"), fanout.Answer(HOSTS[3], {}, "three")]
    with pytest.raises(PodError, match=r"sync failed on 2 of 3 hosts: host 1 \(10.0.0.1\): one; host 3 .*: three\."):
        pod.require(answers, "sync")


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(PodError, match="gclood isn't on this machine's PATH") as error:
        backend.Runner().run(Call(("gclood",)), 1)
    assert error.value.kind == "missing"
