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
from tests.launch.pod import wait_for

pytestmark = pytest.mark.standard
HEAD = "import os, signal, sys, time\ni = [a for a in sys.argv if '--process-id=' in a][0][-1]\n"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(local_pod, "GRACE", 1.0)
    monkeypatch.setattr(local_pod, "TICK", 0.1)


def make(folder, body: str, processes: int = 3) -> local_pod.Pod:
    """A pod whose processes run a text of Python."""
    program = ("-S", "-c", HEAD + body)  # starts in a third of the time: no site-packages
    return local_pod.Pod(processes, [], folder, devices=2, program=program)


def started(folder, body: str, processes: int = 3) -> local_pod.Pod:
    pod = make(folder, body, processes)
    pod.start()
    return pod


def test_each_has_its_place_its_folder_and_its_log(tmp_path, monkeypatch):
    """The log goes on where another run's has ended; its cause is gone. What is shown is UTF-8 in any locale."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    local_pod.host_setup.prepare_streams()
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "cause.json").write_text('{"kind": "exception", "code": 4, "what": "old"}')
    (tmp_path / "0" / "log").write_text("old\n")
    body = "sys.stdout.buffer.write('東京 '.encode() + b'\\xff ')\n"
    body += "print(*sys.argv[1:], os.environ['MLM_HOST_DIR'], os.environ['XLA_FLAGS'])"
    pod = make(tmp_path, body)
    pod.arguments[1] = ["--config.a=$(b) 'c'"]
    pod.start()
    assert pod.wait() is None
    shown = sys.stdout.buffer.getvalue().decode()
    ports = set()
    for index in range(3):
        text = (tmp_path / str(index) / "log").read_text(encoding="utf-8")
        assert text.startswith("old\n") == (index == 0)
        line = text.removeprefix("old\n")
        assert line.startswith("東京 \ufffd ") and f"{index}| {line}" in shown
        assert f" --processes=3 --process-id={index} {tmp_path / str(index)} " in line
        assert line.strip().endswith("--xla_force_host_platform_device_count=2")
        assert ("$(b) 'c'" in line) == (index == 1)
        ports.add(line.partition("--coordinator=127.0.0.1:")[2].split()[0])
    assert len(ports) == 1


def test_a_full_disk_that_keeps_neither_log_nor_cause_hides_no_reason(tmp_path, monkeypatch):
    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    pod = started(tmp_path, "print('mlm run: w can\\'t be written\\n'); sys.exit(2)", processes=1)
    monkeypatch.setattr(pathlib.Path, "open", full)
    cause = pod.wait()
    assert cause.code == 2 and cause.sentence.endswith(": mlm run: w can't be written")


@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGSTOP, ("lost", 1, 8)), (signal.SIGKILL, ("signal", 137, 8))]
)
def test_one_is_stopped_or_killed_and_jax_aborts_the_others(tmp_path, number, end):
    """What is stopped can't end, and is killed; it is the cause, where it last was. A torn file is none."""
    pod = started(
        tmp_path, "time.sleep(1 if i != '1' else 60)\nos.kill(os.getpid(), signal.SIGABRT)"
    )
    (tmp_path / "0" / "progress.json").write_text('{"step": 1')
    (tmp_path / "1" / "progress.json").write_text('{"step": 8, "phase": "step", "time": 1}')
    assert pod.reports()[0].progress is None
    os.kill(pod.children[1].pid, number)
    cause = pod.wait()
    assert (cause.process, cause.kind, cause.code, cause.step) == (1, *end)
    killed = [report.process for report in pod.reports() if report.ended_by_us]
    assert killed == ([1] if number == signal.SIGSTOP else []), "what is stopped can't end"


@pytest.mark.parametrize("stubborn", [False, True])
def test_asked_to_end(tmp_path, stubborn):
    """The processes get SIGTERM; the second time those that do not listen are killed."""
    handler = "signal.SIG_IGN" if stubborn else "lambda *_: os._exit(75)"
    body = f"signal.signal(signal.SIGTERM, {handler})\nprint('up', flush=True)\ntime.sleep(60)"
    pod = started(tmp_path, body)
    # each is made when its process says something
    logs = [tmp_path / str(index) / "log" for index in range(3)]
    wait_for(lambda: all(log.exists() and log.read_text() == "up\n" for log in logs))
    pod.ask(signal.SIGTERM)
    if stubborn:
        assert pod.poll()
        pod.ask(signal.SIGTERM)
    assert pod.wait().code == (137 if stubborn else 75)


def test_command_line(tmp_path):
    """By a file in the place of mlm, from where the command is; it may import what is beside it, and mlm.

    Nothing of the config is overridden; a key in two words is handed on in one.
    """
    (tmp_path / "my files").mkdir()
    (tmp_path / "my files" / "beside.py").write_text("WORD = 'imported'\n")
    text = "import os, signal, sys, time\nimport mlm.errors\nfrom beside import WORD\n"
    text += "signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\n"
    text += "place = ('--coordinator=', '--processes=', '--process-id=')\n"
    text += "print(WORD, *[a for a in sys.argv[1:] if not a.startswith(place)], flush=True)\n"
    text += "time.sleep(60)\n"
    (tmp_path / "my files" / "rare.py").write_text(text)
    command = [sys.executable, ROOT / "launch" / "local_pod.py", "2", "a.py", "--command=train"]
    flags = ["--program=my files/rare.py", f"--workdir={tmp_path}/run", "--config.pod.hang", "7"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *flags], cwd=tmp_path, stdout=pipe, text=True) as process:
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)  # Ctrl-C at the terminal, which comes to it alone
        assert process.wait(30) == 75
    said = f"imported train --config={tmp_path}/a.py --workdir={tmp_path}/run --config.pod.hang=7\n"
    assert set(lines) == {f"{index}| {said}" for index in range(2)}


def test_a_workdir_must_be_a_folder_of_this_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
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
