"""A run on the hosts of a pod: started once and everywhere, seen, stopped, whatever the connections do."""

import json
import os
import pathlib
import shutil
import signal
import threading

import pytest
from pods.causes import HostReport
from pods.runs import RunStatus, records

from tests.launch.pod import RUN, WAITS, alive, kill_marked, wait_for
from tests.launch.test_host import HOSTILE

pytestmark = pytest.mark.standard


def up(pod) -> list[int]:
    """Waits until both processes of a run listen to signals; returns their numbers."""
    logs = [pod.host_folder(worker) / "log" for worker in range(2)]
    wait_for(lambda: all(log.exists() and "up\n" in log.read_text() for log in logs))
    return pod.processes()


def test_mistakes_are_found_before_anybody_is_asked(pod, monkeypatch):
    monkeypatch.setenv("SECRET", "canary-4a7f")
    for words, said in {
        ("run", "configs/b.py"): "configs/b.py",
        (*RUN, "--program=research/rara.py"): "research/rara.py",
        (*RUN, "--workdir=runs/x"): "'runs/x': it must be absolute or gs://",
        (*RUN, "--id=../x"): "run id '../x'",
        (*RUN, "--env=SECRET=canary-4a7f"): "--env SECRET: give the name",
        (*RUN, "--env=NOT_SET_HERE"): "--env NOT_SET_HERE",
        ("status", "--config.x=1", "a"): "--config.x=1",
    }.items():
        found = pod.tpu(*words, code=2)
        assert said in found and "canary" not in found
    pod.settings(bucket="")
    assert "--workdir" in pod.tpu(*RUN, code=2)
    assert pod.cloud.calls == []


def test_the_same_command_on_every_host_word_for_word(ready_pod):
    ready_pod.ready("print(os.environ['MLM_COMMIT'])")
    words = [f"--config.y{i}={word}" for i, word in enumerate(HOSTILE)]
    text = " ".join(HOSTILE)
    said = ready_pod.tpu(*RUN, f"--workdir=/tmp/{text}", "--config.x", text, *words, "--split=test")
    for worker in range(2):
        argv, commit = pathlib.Path(f"runs/pods/a/1/{worker}.log").read_text().splitlines()
        assert json.loads(argv) == [
            "run", "--config=configs/a.py", f"--workdir=/tmp/{text}", f"--config.x={text}", *words,
            "--split=test", "--coordinator=127.0.0.1", "--processes=2", f"--process-id={worker}",
        ]  # fmt: skip
        assert len(commit) == 40, "for the card of an export"
        assert f"[{worker}] {argv}\n" in said
        assert f"host {worker} (127.0.0.{worker + 1}): exited, exit code 0" in said
    assert not list(ready_pod.cloud.folder.rglob("pwned"))


def test_a_file_in_the_place_of_mlm(ready_pod):
    ready_pod.ready("sys.exit(1)")
    said = ready_pod.tpu(*RUN, "--command=train", "--program=research/rare.py")
    assert all(f"[{worker}] imported train --config=configs/a.py" in said for worker in range(2))


def test_a_second_run_attaches(ready_pod):
    ready_pod.ready(WAITS)
    assert "attempt 1: started on 2 hosts" in ready_pod.tpu(*RUN, "--detach")
    first = up(ready_pod)
    assert "is alive already" in ready_pod.tpu(*RUN, "--detach")
    assert ready_pod.processes() == first and ready_pod.starts() == 2
    assert ready_pod.tpu("status", "a").count("running") == 2
    assert "run 'a' (attempt 1) is alive there" in ready_pod.tpu("sync", code=1)
    said = ready_pod.tpu("run", "configs/a.py", "--id=b", code=1)  # the accelerators are taken
    assert "run 'a' (attempt 1) is alive there" in said and ready_pod.starts() == 2
    assert ready_pod.tpu("stop", "a").count("exit code 75") >= 2
    assert not any(map(alive, first))
    assert "first cause: " in ready_pod.tpu("status", "a")
    assert "attempt 2: started" in ready_pod.tpu(*RUN, "--detach")


def test_a_start_that_was_cut_off_is_told(ready_pod):
    """By Ctrl-C, after the first host; what never ran has no exit code."""
    ready_pod.ready(WAITS)
    ready_pod.tpu(*RUN, "--detach")
    up(ready_pod)
    kill_marked(str(ready_pod.cloud.home(1)))
    shutil.rmtree(ready_pod.host_folder(1))
    said = ready_pod.tpu(*RUN, "--detach")
    assert "is alive already" in said and "not started on host 1: if it stays so" in said
    said = ready_pod.tpu("stop", "a")
    assert "exit code 75" in said and "never started" in said


def test_what_is_alive_with_other_arguments_or_code_is_said(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.tpu(*RUN, "--command=shards", "--config.x=1", "--detach")
    for asked in ((*RUN, "--config.x=2"), ("supervise", "configs/a.py")):
        said = ready_pod.tpu(*asked, code=1)
        assert "alive with other arguments: shards --config=" in said and ready_pod.starts() == 2
    pathlib.Path("configs/a.py").write_text("# changed")
    said = ready_pod.tpu(*RUN, "--command=shards", "--config.x=1", "--detach")
    assert "is alive already" in said and "is alive with code" in said
    ready_pod.git("checkout", "-q", "configs/a.py")


def test_two_who_start_at_once(ready_pod):
    ready_pod.ready(WAITS)
    import tpu

    codes = []
    threads = [
        threading.Thread(target=lambda: codes.append(tpu.main([*RUN, "--detach"])))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0, 0] and ready_pod.starts() == 2
    jobs = [ready_pod.host_folder(worker) / "job.json" for worker in range(2)]
    assert len({json.loads(job.read_text())["launch"] for job in jobs}) == 1


def test_a_connection_that_fails_starts_nothing_twice(ready_pod):
    ready_pod.ready("print('one more', flush=True); time.sleep(0.3)")
    ready_pod.cloud.ssh_faults += [("after", 1, "host.py start")] * 2
    assert "host 1 (127.0.0.2): ssh failed (client_loop" in ready_pod.tpu(*RUN)
    for worker in range(2):
        assert (ready_pod.host_folder(worker) / "log").read_text().count("one more") == 1
    assert ready_pod.starts() == 2


def test_a_silent_host(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.cloud.ssh_faults.append(("silent", 1, "host.py status"))
    said = ready_pod.tpu(*RUN, code=1)
    assert "nothing was started: host 1 (127.0.0.2): no answer within 60 s" in said
    assert ready_pod.starts() == 0
    ready_pod.cloud.ssh_faults.append(("silent", 1, "host.py start"))
    said = ready_pod.tpu(*RUN, code=1)
    assert "started on all hosts (host 1 (127.0.0.2): no answer within 60 s" in said
    assert ready_pod.tpu("status", "a").count("running") == 0 and ready_pod.processes() == []
    ready_pod.cloud.ssh_faults += [("before", 1, "host.py preflight")] * 3
    said = ready_pod.tpu("sync", code=1)
    assert "sync failed on 1 of 2 hosts: host 1 (127.0.0.2): ssh failed 3 times" in said


def test_the_code_comes_with_a_run(ready_pod):
    ready_pod.ready("print(pathlib.Path('configs/a.py').read_text())")
    pathlib.Path("configs/a.py").write_text("# changed")
    said = ready_pod.tpu(*RUN)
    assert "copied to 2 of 2 hosts" in said and said.count("] # changed") == 2
    ready_pod.git("checkout", "-q", "configs/a.py")
    assert "copied to 0 of 2" in ready_pod.tpu("sync")


def test_the_first_cause_is_told(ready_pod):
    ready_pod.ready("time.sleep(60 if sys.argv[-1] == '--process-id=0' else 0.1); sys.exit(3)")
    ready_pod.tpu(*RUN, "--detach")
    wait_for((ready_pod.host_folder(1) / "exit.json").exists)
    os.kill(wait_for(ready_pod.processes)[0], signal.SIGABRT)  # as jax ends its peers
    said = ready_pod.tpu("logs", "a", code=3)
    assert "first cause: host 1 " in said and "ended with exit code 3" in said
    assert "host 0 (127.0.0.1): exited, signal 6" in said


def test_an_end_that_no_host_confirms_is_no_success():
    report = HostReport(0, "h", "exited", {"code": 0, "signal": None, "ended": 1.0})
    assert RunStatus(1, (report,)).code == 0
    assert RunStatus(1, ()).code == RunStatus(1, (report,), ("host 1: no answer",)).code == 1


def test_a_secret_is_nowhere_but_in_the_process(ready_pod, monkeypatch):
    canary = "canary-4a7f"
    monkeypatch.setenv("WANDB_API_KEY", canary)
    ready_pod.ready("(folder / 'got').write_text(os.environ['WANDB_API_KEY'][::-1])\n" + WAITS)
    said = ready_pod.tpu(*RUN, "--env=WANDB_API_KEY", "--detach")
    up(ready_pod)
    assert (ready_pod.host_folder(1) / "got").read_text() == canary[::-1]
    for number in ready_pod.processes():
        assert canary not in pathlib.Path(f"/proc/{number}/cmdline").read_text()
    assert canary not in said + ready_pod.tpu("status", "a") + str(ready_pod.cloud.calls)
    for root in (ready_pod.cloud.folder, ready_pod.repository):
        for file in root.rglob("*"):
            assert not file.is_file() or canary.encode() not in file.read_bytes(), file


def test_logs_go_on_where_they_were(ready_pod):
    ready_pod.ready(
        "[print(i, flush=True) or time.sleep(0.01) for i in range(50)]; sys.stdout.buffer.write(b'\\xff')"
    )
    ready_pod.tpu(*RUN, "--detach")
    ready_pod.cloud.ssh_faults += [("before", 1, "host.py logs")] * 3
    said = ready_pod.tpu("logs", "a")
    shown = [line.removeprefix("[1] ") for line in said.splitlines() if line.startswith("[1]")]
    assert shown[1:] == [*map(str, range(50)), "\ufffd"]
    assert "host 1 (127.0.0.2): ssh failed 3 times" in said
    assert not [line for line in ready_pod.tpu("logs", "a").splitlines() if line.startswith("[")]
    for worker in range(2):
        kept = pathlib.Path(f"runs/pods/a/1/{worker}.log").read_bytes()
        assert kept == (ready_pod.host_folder(worker) / "log").read_bytes()


def soon(pod, then) -> None:
    """Does something once a run is up."""
    threading.Thread(target=lambda: (up(pod), then())).start()


def test_ctrl_c_leaves_the_run_alone(ready_pod):
    ready_pod.ready(WAITS)
    logs = set(records("a").glob("*/0.log"))

    def interrupt():
        wait_for(lambda: set(records("a").glob("*/0.log")) > logs)  # it follows the run
        os.kill(os.getpid(), signal.SIGINT)

    soon(ready_pod, interrupt)
    said = ready_pod.tpu(*RUN, code=130)  # it is not done: nothing is to follow by &&
    assert "python launch/tpu.py logs a" in said and len(ready_pod.processes()) == 2


def test_a_preempted_pod_ends_the_following(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.tpu(*RUN, "--detach")
    soon(ready_pod, lambda: ready_pod.cloud.preempt("my-pod"))
    assert "my-pod is PREEMPTED: launch/tpu.py supervise" in ready_pod.tpu("logs", "a", code=1)
    ready_pod.tpu("down")  # the next test makes another
    ready_pod.synced = False
