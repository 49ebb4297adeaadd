"""The logs of all hosts: brought here once, in order, whatever the connections do; who follows them changes nothing."""

import os
import pathlib
import signal
import threading
import time

import pytest

from tests.launch.pod import RUN, WAITS, alive, processes, wait_for

pytestmark = pytest.mark.standard


def test_logs_go_on_where_they_were(ready_pod):
    ready_pod.ready("[print(i, flush=True) or time.sleep(0.02) for i in range(50)]")
    ready_pod.tpu(*RUN, "--detach")
    ready_pod.fault("ssh", "ssh255_before", worker=1, match="host.py logs", times=3)
    said = ready_pod.tpu("logs", "a", "--every=0.01", "--only=1")
    lines = [line for line in said.splitlines() if line.startswith("[")]
    assert lines[1:] == [f"[1] {i}" for i in range(50)]
    assert "does not answer: ssh failed" in said and "host 1 (127.0.0.2) answers again" in said
    assert not [line for line in ready_pod.tpu("logs", "a", "--every=0.01").splitlines() if line.startswith("[")]
    for worker in range(2):
        kept = pathlib.Path(f"runs/pods/a/1/{worker}.log").read_bytes()
        assert kept == (ready_pod.host_folder(worker) / "log").read_bytes()


def test_ctrl_c_leaves_the_run_alone(ready_pod):
    ready_pod.ready(WAITS)

    def interrupt() -> None:
        wait_for(pathlib.Path("runs/pods/it%27s/1/1.log").exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    begin = time.monotonic()
    said = ready_pod.tpu(*RUN, "--id=it's", code=130)  # it is not done: nothing is to follow by &&
    assert time.monotonic() - begin < 30
    assert "detached; the run goes on. Come back: python launch/tpu.py logs 'it'\"'\"'s'" in said
    assert all(map(alive, processes(ready_pod, "it%27s")))


def test_a_preempted_pod_ends_the_following(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.tpu(*RUN, "--detach")

    def preempt() -> None:
        wait_for(pathlib.Path("runs/pods/a/1").exists)
        ready_pod.preempt()

    threading.Thread(target=preempt).start()
    assert "my-pod is PREEMPTED: launch/tpu.py supervise" in ready_pod.tpu("logs", "a", "--every=0.05", code=1)
    assert "my-pod is PREEMPTED, not ready" in ready_pod.tpu("logs", "a", code=1)
    ready_pod.tpu("down")  # the next test makes another
    ready_pod.synced = False
