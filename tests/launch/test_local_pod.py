"""launch/local_pod.py: what it does with processes that do well, fail, hang or don't answer. They are no trainers."""

import errno
import io
import os
import pathlib
import signal
import subprocess
import sys

import local_pod
import pytest

from tests import ROOT
from tests.launch.host_folder import wait_for

pytestmark = pytest.mark.standard
HEAD = "import os, signal, sys, time\ni = [a for a in sys.argv if '--process-id=' in a][0][-1]\n"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(local_pod, "GRACE", 1.0)


def started(folder, body: str, processes: int = 3, **changes) -> local_pod.Pod:
    """A pod whose processes run a text of Python."""
    program = ("-S", "-c", HEAD + body)  # starts in a third of the time: no site-packages
    pod = local_pod.Pod(processes, [], folder, devices=2, program=program)
    pod.start(**changes)
    return pod


def test_each_has_its_place_its_folder_and_its_log(tmp_path, capfd):
    """The log goes on where another run's has ended; its cause is gone."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "cause.json").write_text(
        '{"kind": "exception", "time": 1, "code": 4, "what": "old"}'
    )
    (tmp_path / "0" / "log").write_text("old\n")
    body = "print('place', *sys.argv[1:], os.environ['MLM_HOST_DIR'], os.environ['XLA_FLAGS'])"
    assert started(tmp_path, body, changes={1: ["--config.a=$(b) 'c'"]}).wait() is None
    lines = {line[0]: line for line in capfd.readouterr().out.splitlines() if "place" in line}
    ports = set()
    for index in range(3):
        text = (tmp_path / str(index) / "log").read_text()
        assert text.startswith("old\n") == (index == 0)
        assert lines[str(index)] == f"{index}| {text.removeprefix('old').strip()}"
        assert (
            f"--process-id={index}" in text
            and "--processes=3" in text
            and f" {tmp_path / str(index)} " in text
        )
        assert text.strip().endswith("--xla_force_host_platform_device_count=2")
        assert ("$(b) 'c'" in text) == (index == 1)
        ports.add(text.partition("--coordinator=127.0.0.1:")[2].split()[0])
    assert len(ports) == 1


def test_any_text_of_a_process_is_shown_and_kept(tmp_path, monkeypatch):
    """On a terminal, or through a pipe, of a locale that lacks its letters."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    local_pod.host_setup.prepare_streams()
    assert (
        started(
            tmp_path, "sys.stdout.buffer.write('東京\\n'.encode() + b'\\xff\\n')", processes=1
        ).wait()
        is None
    )
    assert sys.stdout.buffer.getvalue().decode() == "0| 東京\n0| \ufffd\n"
    assert (tmp_path / "0" / "log").read_text(encoding="utf-8") == "東京\n\ufffd\n"


def test_where_nobody_reads_what_is_shown_the_processes_end(tmp_path, monkeypatch, capsys):
    """As in `| head`: threads ended in a traceback."""

    def closed(text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    stdout = io.StringIO()
    stdout.write = closed
    monkeypatch.setattr(sys, "stdout", stdout)
    body = "try:\n  while True: print('a' * 1000, flush=True)\nexcept BrokenPipeError: os._exit(1)"
    assert started(tmp_path, body, processes=2).wait().code == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.endswith("Broken pipe") for line in said), said


def test_a_full_disk_that_keeps_neither_log_nor_cause_hides_no_reason(tmp_path, monkeypatch):
    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    pod = started(tmp_path, "print('mlm run: w can\\'t be written\\n'); sys.exit(2)", processes=1)
    monkeypatch.setattr(pathlib.Path, "open", full)
    cause = pod.wait()
    assert cause.code == 2 and cause.sentence.endswith(": mlm run: w can't be written")


def test_one_is_stopped_and_jax_aborts_the_others(tmp_path):
    """What is stopped can't end, and is killed; it is the cause, where it last was. A torn file is none."""
    body = "time.sleep(1 if i != '1' else 60)\nos.kill(os.getpid(), signal.SIGABRT)"
    pod = started(tmp_path, body)
    (tmp_path / "0" / "progress.json").write_text('{"step": 1')
    (tmp_path / "1" / "progress.json").write_text('{"step": 8, "phase": "step", "time": 1}')
    assert pod.reports()[0].progress is None
    os.kill(pod.children[1].pid, signal.SIGSTOP)
    cause = pod.wait()
    assert (cause.process, cause.kind, cause.code, cause.step) == (1, "lost", 1, 8)
    assert [end.ended_by_us for end in pod.reports()] == [False, True, False]


def test_one_is_killed(tmp_path):
    body = "time.sleep(1 if i != '2' else 60)\nos.kill(os.getpid(), signal.SIGABRT)"
    pod = started(tmp_path, body)
    os.kill(pod.children[2].pid, signal.SIGKILL)
    cause = pod.wait()
    assert (cause.process, cause.kind, cause.code) == (
        2,
        "signal",
        137,
    ) and "SIGKILL" in cause.sentence


@pytest.mark.parametrize("stubborn", [False, True])
def test_asked_to_end(tmp_path, stubborn):
    """The processes get SIGTERM; the second time those that do not listen are killed."""
    handler = "signal.SIG_IGN" if stubborn else "lambda *_: os._exit(75)"
    pod = started(
        tmp_path,
        f"signal.signal(signal.SIGTERM, {handler})\nprint('up', flush=True)\ntime.sleep(60)",
    )
    # each is made when its process says something
    logs = [tmp_path / str(index) / "log" for index in range(3)]
    wait_for(lambda: all(log.exists() and log.read_text() == "up\n" for log in logs))
    pod.ask(signal.SIGTERM)
    if stubborn:
        assert pod.poll()
        pod.ask(signal.SIGTERM)
    assert pod.wait().code == (137 if stubborn else 75)


def test_command_line(tmp_path):
    """By a file in the place of mlm, from where the command is; it may import what is beside it, and mlm."""
    (tmp_path / "my files").mkdir()
    (tmp_path / "my files" / "beside.py").write_text("WORD = 'imported'\n")
    text = "import os, signal, sys, time\nimport mlm.errors\nfrom beside import WORD\nprint(WORD, *sys.argv[1:3])\n"
    text += "signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\nprint('up', flush=True)\ntime.sleep(60)\n"
    (tmp_path / "my files" / "rare.py").write_text(text)
    command = [sys.executable, ROOT / "launch" / "local_pod.py", "2", "a.py", "--command=train"]
    flags = ["--program=my files/rare.py", f"--workdir={tmp_path}/run"]
    with subprocess.Popen(
        [*command, *flags], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        lines = [process.stdout.readline().rstrip() for _ in range(4)]
        process.send_signal(signal.SIGINT)  # Ctrl-C at the terminal, which comes to it alone
        assert process.wait(30) == 75
    said = f"imported train --config={tmp_path}/a.py"
    assert set(lines) == {f"{index}| {text}" for index in range(2) for text in (said, "up")}
    assert {path.name for path in (tmp_path / "run" / "hosts").iterdir()} == {".lock", "0", "1"}
    refused = subprocess.run([*command[:2], "0", "x.py"], cwd=ROOT, capture_output=True, text=True)
    assert "N and --devices must be at least 1" in refused.stderr


@pytest.fixture
def signals():
    """What `main` does on signals is this process's until the test ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_workdir_must_be_a_folder_of_this_machine(tmp_path, capsys):
    (tmp_path / "file").touch()
    refused = {
        "gs://bucket/x": "of this machine",
        f"{tmp_path}/file": "Not a directory",
        "~nobody-here/x": "~nobody-here",
    }
    for workdir, words in refused.items():
        with pytest.raises(SystemExit) as end:
            local_pod.main(["1", "x.py", f"--workdir={workdir}"])
        assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.usefixtures("signals")
def test_nothing_of_the_config_is_overridden(tmp_path, capfd):
    """A heartbeat in two words is handed on in one."""
    program = tmp_path / "program.py"
    program.write_text("import sys; print(*sys.argv[1:])")
    line = [
        "1",
        "x.py",
        f"--program={program}",
        f"--workdir={tmp_path}",
        "--config.pod.heartbeat",
        "7",
    ]
    assert local_pod.main(line) == 0
    said = capfd.readouterr().out.split()
    assert [word for word in said if "--config." in word] == ["--config.pod.heartbeat=7"]


@pytest.mark.usefixtures("signals")
def test_two_in_one_workdir(tmp_path, capsys):
    """The second would put its causes in the place of the first one's."""
    with local_pod.host_setup.alone(tmp_path / "hosts" / ".lock"), pytest.raises(SystemExit) as end:
        local_pod.main(["1", "x.py", f"--workdir={tmp_path}"])
    assert end.value.code == 2 and "another local_pod" in capsys.readouterr().err


@pytest.mark.usefixtures("signals")
def test_without_locks_it_runs(tmp_path, monkeypatch):
    """On a network file system, which the workdirs of mlm may lie on."""

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(local_pod.host_setup.fcntl, "flock", no_locks)
    (tmp_path / "program.py").write_text("")
    assert (
        local_pod.main(["1", "x.py", f"--program={tmp_path}/program.py", f"--workdir={tmp_path}"])
        == 0
    )
