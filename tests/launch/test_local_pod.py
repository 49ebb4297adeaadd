"""launch/local_pod.py: what it does with processes that do well, fail, hang or don't answer. They are no trainers."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import local_pod
import pytest

from tests import ROOT

HEAD = "import os, signal, sys, time\ni = [a for a in sys.argv if '--process-id=' in a][0][-1]\n"
DELAY = ("--config.pod.heartbeat=1",)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(local_pod, "GRACE", 1.0)


def pod(folder, body: str, processes: int = 3) -> local_pod.Pod:
    return local_pod.Pod(processes, [*DELAY], folder, devices=2, program=("-c", HEAD + body))


@pytest.mark.standard
def test_each_has_its_place_its_folder_and_its_log(tmp_path, capfd):
    body = "print('place', *sys.argv[1:], os.environ['MLM_HOST_DIR'], os.environ['XLA_FLAGS'])"
    one = pod(tmp_path, body)
    one.start(changes={1: ["--config.a=$(b) 'c'"]})
    assert one.wait() is None
    lines = {line[0]: line for line in capfd.readouterr().out.splitlines() if "place" in line}
    ports = set()
    for index in range(3):
        text = (tmp_path / str(index) / "log").read_text()
        assert lines[str(index)] == f"{index}| {text.strip()}"
        assert f"--process-id={index}" in text
        assert "--processes=3" in text
        assert f" {tmp_path / str(index)} " in text
        assert text.strip().endswith("--xla_force_host_platform_device_count=2")
        assert ("$(b) 'c'" in text) == (index == 1)
        ports.add(text.partition("--coordinator=127.0.0.1:")[2].split()[0])
    assert len(ports) == 1


def test_any_text_of_a_process_is_shown_and_kept(tmp_path, monkeypatch):
    """On a terminal, or through a pipe, of a locale that lacks its letters."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    local_pod.host_setup.prepare_streams()
    one = pod(tmp_path, "sys.stdout.buffer.write('東京\\n'.encode() + b'\\xff\\n')", processes=1)
    one.start()
    assert one.wait() is None
    assert sys.stdout.buffer.getvalue().decode() == "0| 東京\n0| \ufffd\n"
    assert (tmp_path / "0" / "log").read_text(encoding="utf-8") == "東京\n\ufffd\n"


@pytest.mark.standard
def test_the_exit_code_is_that_of_the_first_cause(tmp_path):
    body = "time.sleep(float(i) / 2)\nos._exit(4 if i == '1' else 0 if i == '0' else 134)"
    one = pod(tmp_path, body)
    one.start()
    cause = one.wait()
    assert (cause.process, cause.code) == (1, 4)


@pytest.mark.standard
def test_one_is_killed_and_the_others_do_not_notice(tmp_path):
    one = pod(tmp_path, "time.sleep(60)")
    one.start()
    time.sleep(0.5)
    begin = time.monotonic()
    os.kill(one.children[2].pid, signal.SIGKILL)
    cause = one.wait()
    assert (cause.process, cause.kind, cause.code) == (2, "signal", 137)
    assert 1.5 < time.monotonic() - begin < 10
    assert "was killed by SIGKILL" in cause.sentence


@pytest.mark.standard
def test_one_is_stopped_and_another_says_so(tmp_path):
    """Whose service has missed it; what is stopped cannot end, and is killed."""
    lost = {"kind": "lost", "time": 1, "code": 1, "what": "is lost", "process": 1, "host": "h", "step": 2, "phase": ""}
    cause = {"kind": "peer", "time": 1, "code": 1, "what": "", "of": lost}
    file = "open(os.environ['MLM_HOST_DIR'] + '/cause.json', 'w')"
    one = pod(tmp_path, f"if i == '1': time.sleep(60)\n{file}.write({json.dumps(cause)!r})\ntime.sleep(1)\nsys.exit(1)")
    one.start()
    os.kill(one.children[1].pid, signal.SIGSTOP)
    cause = one.wait()
    assert (cause.process, cause.kind, cause.code) == (1, "lost", 1)
    assert [end.ended_by_us for end in one.reports()] == [False, True, False]


def test_a_torn_file_is_none(tmp_path):
    one = pod(tmp_path, "time.sleep(1)", processes=1)
    one.start()
    (tmp_path / "0" / "progress.json").write_text('{"step": 1')
    assert one.reports()[0].progress is None
    assert one.wait() is None


def test_what_an_earlier_run_left_is_gone(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "cause.json").write_text('{"kind": "exception", "time": 1, "code": 4, "what": "old"}')
    (tmp_path / "0" / "log").write_text("old\n")
    one = pod(tmp_path, "print('new')", processes=1)
    one.start()
    assert one.wait() is None
    assert (tmp_path / "0" / "log").read_text() == "old\nnew\n"


@pytest.mark.standard
@pytest.mark.parametrize(
    ("number", "stubborn", "code"), [("SIGTERM", False, 75), ("SIGINT", False, 75), ("SIGINT", True, 137)]
)
def test_asked_to_end(tmp_path, number, stubborn, code):
    """Ctrl-C reaches the processes as SIGTERM; a second one kills those that do not listen."""
    handler = "signal.SIG_IGN" if stubborn else "lambda *_: os._exit(75)"
    child = (
        "import signal, os, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"signal.signal(signal.SIGTERM, {handler})\nprint(1)\ntime.sleep(60)"
    )
    program = (
        f"import pathlib, signal, sys\nsys.path.insert(0, {str(ROOT / 'launch')!r})\nimport local_pod\n"
        f"folder, arguments = pathlib.Path({str(tmp_path)!r}), ['--config.pod.heartbeat=5']\n"
        f"one = local_pod.Pod(2, arguments, folder, devices=1, program=('-c', {child!r}))\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n    signal.signal(number, one.ask)\n"
        "one.start()\ncause = one.wait()\nprint(cause.sentence)\nsys.exit(cause.code)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert {process.stdout.readline(), process.stdout.readline()} == {"0| 1\n", "1| 1\n"}
    process.send_signal(getattr(signal, number))
    if stubborn:
        time.sleep(0.5)
        process.send_signal(getattr(signal, number))
    process.communicate(timeout=30)
    assert process.returncode == code


@pytest.mark.standard
def test_command_line(tmp_path):
    """It starts the command for real: a config that is bad on all ends all with code 2, and says so."""
    command = [sys.executable, "launch/local_pod.py", "2", "configs/quickstart.py", f"--workdir={tmp_path}"]
    done = subprocess.run([*command, "--config.train.steps=-3"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "local_pod: host" in done.stderr
    assert "config.train.steps = -3: must be" in done.stderr.splitlines()[-1]
    assert done.stdout.count("mlm run: config.train.steps = -3") >= 1
    assert {path.name for path in (tmp_path / "hosts").iterdir()} == {"0", "1"}
    refused = subprocess.run([*command[:2], "0", "x.py"], cwd=ROOT, capture_output=True, text=True)
    assert "N and --devices must be at least 1" in refused.stderr


@pytest.mark.standard
def test_a_file_in_the_place_of_mlm(tmp_path):
    """By a path from the folder where the command is; the file may import what is beside it, and mlm."""
    (tmp_path / "my files").mkdir()
    (tmp_path / "my files" / "beside.py").write_text("WORD = 'imported'\n")
    text = "import sys\nimport mlm.errors\nfrom beside import WORD\nprint(WORD, *sys.argv[1:3])\n"
    (tmp_path / "my files" / "rare.py").write_text(text)
    command = [sys.executable, ROOT / "launch" / "local_pod.py", "2", "a.py", "--command=train"]
    for file, code in (("rare.py", 0), ("rara.py", 2)):
        flags = [f"--program=my files/{file}", f"--workdir={tmp_path}/run"]
        done = subprocess.run([*command, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert ("can't open file" in done.stdout) == (code == 2)
        said = f"imported train --config={tmp_path}/a.py"
        assert [f"{index}| {said}" in done.stdout.splitlines() for index in range(2)] == [code == 0] * 2
    assert f"my files/{file}" in done.stdout
