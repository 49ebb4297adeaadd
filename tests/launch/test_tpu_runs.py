"""A run on the hosts of the fake cloud: started once and everywhere, seen, stopped, whatever the connections do."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import threading

import pytest

from tests.launch.fake_gcloud.cloud import kill_marked
from tests.launch.host_folder import HOSTILE, alive, wait_for
from tests.launch.pod import RUN, WAITS

pytestmark = pytest.mark.standard


def test_the_same_command_on_every_host_word_for_word(ready_pod):
    ready_pod.ready("sys.exit(0)")
    words = [word for word in HOSTILE if word]
    text = " ".join(words)
    said = ready_pod.tpu(
        "run", "configs/a.py", "--every=0.02", f"--id={text}", f"--workdir=/tmp/{text}", "--config.x", text,
        *(f"--config.y{i}={word}" for i, word in enumerate(words)), "--", *words,
    )  # fmt: skip
    for worker in range(2):
        (log,) = pathlib.Path("runs/pods").glob(f"*/1/{worker}.log")
        assert json.loads(log.read_text()) == [
            "run", "--config=configs/a.py", f"--workdir=/tmp/{text}", f"--config.x={text}",
            *(f"--config.y{i}={word}" for i, word in enumerate(words)), *words,
            "--coordinator=127.0.0.1", "--processes=2", f"--process-id={worker}",
        ]  # fmt: skip
        assert f"[{worker}] {log.read_text()}" in said
        assert f"host {worker} (127.0.0.{worker + 1}): exited, exit code 0" in said
    ready_pod.tpu(*RUN, "--id=-x")
    assert "exit code 0" in ready_pod.tpu("status", "--", "-x")
    job = json.loads((ready_pod.host_folder(0, "-x") / "job.json").read_text())
    assert job["argv"][2] == "--workdir=gs://my-bucket/runs/-x"
    assert not list(ready_pod.state.rglob("pwned")) and not list(
        ready_pod.repository.rglob("pwned")
    )


def test_a_file_in_the_place_of_mlm(ready_pod):
    ready_pod.ready("sys.exit(1)")
    said = ready_pod.tpu(*RUN, "--command=train", "--program=research/rare.py")
    assert all(f"[{worker}] imported train --config=configs/a.py" in said for worker in range(2))


def test_a_host_knows_the_commit(ready_pod):
    ready_pod.ready("print(os.environ['MLM_COMMIT'])")
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    assert ready_pod.tpu(*RUN).count(f"] {commit}\n") == 2


def test_a_second_run_attaches(ready_pod):
    ready_pod.ready(WAITS)
    assert "attempt 1: started on 2 hosts" in ready_pod.tpu(*RUN, "--detach")
    first = wait_for(lambda: len(both := ready_pod.processes()) == 2 and both)
    said = ready_pod.tpu(*RUN, "--detach", "--again")
    assert "is alive already" in said and ready_pod.processes() == first and ready_pod.starts() == 2
    assert "run 'a', attempt 1, is alive" in ready_pod.tpu("status")
    assert ready_pod.tpu("status", "a").count("running") == 2
    said = ready_pod.tpu("run", "configs/a.py", "--id=b", code=1)  # the accelerators are taken
    assert "run 'a' (attempt 1) is alive there" in said and ready_pod.starts() == 2
    assert ready_pod.tpu("stop", "a", "--grace=20").count("exit code 75") >= 2 and not any(
        map(alive, first)
    )
    said = ready_pod.tpu(*RUN, code=75)
    assert "run 'a' has ended (attempt 1)" in said and ready_pod.starts() == 2
    assert "attempt 2: started" in ready_pod.tpu(*RUN, "--again", "--detach")


def test_a_start_that_was_cut_off_is_told(ready_pod):
    """By Ctrl-C, after the first host; what never ran has no exit code."""
    ready_pod.ready(WAITS)
    ready_pod.tpu(*RUN, "--detach")
    kill_marked(str(ready_pod.cloud.home("my-pod", 1)))
    shutil.rmtree(ready_pod.host_folder(1))
    said = ready_pod.tpu(*RUN, "--detach")
    assert (
        "is alive already" in said
        and "it was not started on host 1" in said
        and "launch/tpu.py stop a" in said
    )
    said = ready_pod.tpu("stop", "a", "--grace=20")
    assert "exit code 75" in said and "never started" in said and "None" not in said


def test_what_is_alive_with_other_arguments_is_not_taken_for_it(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.tpu(*RUN, "--command=shards", "--config.x=1", "--detach")
    for asked in ((*RUN, "--config.x=2", "--again"), ("supervise", "configs/a.py", "--every=0.05")):
        said = ready_pod.tpu(*asked, code=1)
        assert (
            "(only there: shards --config.x=1; only here: run" in said and ready_pod.starts() == 2
        )
    # the same arguments, and the code has changed since
    pathlib.Path("stub.py").write_text("# changed")
    said = ready_pod.tpu(*RUN, "--command=shards", "--config.x=1", "--detach")
    assert "is alive already" in said and "is alive with code" in said
    ready_pod.git("checkout", "-q", "stub.py")


def test_what_has_ended_with_other_arguments_is_not_taken_for_it(ready_pod):
    ready_pod.ready("sys.exit(0)")
    for _ in range(2):  # done, and 0 says so
        ready_pod.tpu(*RUN, "--command=shards")
        assert ready_pod.starts() == 2
    for asked in (RUN, ("supervise", "configs/a.py", "--every=0.05")):  # which finds it done
        ready_pod.tpu(*asked)
        assert ready_pod.starts() == 4
    for worker in range(2):
        assert (
            json.loads((ready_pod.host_folder(worker, attempt=2) / "job.json").read_text())["argv"][
                0
            ]
            == "run"
        )
    assert "attempt 3: started" in ready_pod.tpu(*RUN, "--workdir=/elsewhere")


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
    jobs = [
        json.loads((ready_pod.host_folder(worker) / "job.json").read_text()) for worker in range(2)
    ]
    assert len({job["launch"] for job in jobs}) == 1 and [job["place"][-1][-1] for job in jobs] == [
        "0",
        "1",
    ]


@pytest.mark.parametrize("fault", ["ssh255_after", "drop_midstream"])
def test_connections_that_fail_start_nothing_twice(ready_pod, fault):
    ready_pod.ready("print('one more', flush=True); time.sleep(0.3)")
    ready_pod.cloud.add_fault("ssh", fault, worker=1, match="host.py start", times=2)
    ready_pod.tpu(*RUN)
    for worker in range(2):
        assert (ready_pod.host_folder(worker) / "log").read_text().count("one more") == 1
    assert ready_pod.starts() == 2


def test_a_silent_host(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.cloud.add_fault("ssh", "silent", worker=1, match="host.py status")
    said = ready_pod.tpu(*RUN, "--timeout=4", code=1)
    assert (
        "nothing was started: host 1 (127.0.0.2): no answer within 4 s" in said
        and ready_pod.starts() == 0
    )
    ready_pod.cloud.add_fault("ssh", "silent", worker=1, match="host.py start")
    said = ready_pod.tpu(*RUN, "--timeout=5", code=1)
    assert (
        "started on all hosts (host 1 (127.0.0.2): no answer within 5 s)" in said
        and "run --again" in said
    )
    assert ready_pod.tpu("status", "a").count("running") == 0 and ready_pod.processes() == []
    assert "attempt 2: started" in ready_pod.tpu(*RUN, "--again", "--detach")


def test_hosts_that_lack_the_code_are_named(ready_pod):
    ready_pod.ready()
    pathlib.Path("stub.py").write_text("changed")
    said = ready_pod.tpu(*RUN, code=1)
    assert (
        "host 0 (127.0.0.1), host 1 (127.0.0.2): code" in said
        and "is missing: launch/tpu.py sync" in said
    )
    ready_pod.cloud.add_fault("ssh", "ssh255_before", worker=1, match="host.py unpack", times=3)
    said = ready_pod.tpu("sync", code=1)
    assert "copying the code failed on 1 of 2 hosts: host 1 (127.0.0.2): ssh failed" in said
    assert ready_pod.starts() == 0
    ready_pod.git("checkout", "-q", "stub.py")
    assert "ready: 2 hosts" in ready_pod.tpu("preflight")
    # of host 0, which is this machine
    with socket.create_server(("127.0.0.1", ready_pod.numbers[1])):
        said = ready_pod.tpu("preflight", code=1)
    assert (
        f"host 0 (127.0.0.1): port {ready_pod.numbers[1]} can't be bound" in said
        and "can't reach" not in said
    )


def test_the_first_cause_is_told(ready_pod):
    ready_pod.ready("time.sleep(60 if sys.argv[-1] == '--process-id=0' else 0.1); sys.exit(3)")
    ready_pod.tpu(*RUN, "--detach")
    wait_for((ready_pod.host_folder(1) / "exit.json").exists)
    os.kill(wait_for(ready_pod.processes)[0], signal.SIGABRT)  # as jax ends its peers
    said = ready_pod.tpu("logs", "a", "--every=0.05", code=3)
    assert "first cause: host 1 " in said and "ended with exit code 3" in said
    assert "host 0 (127.0.0.1): exited, signal 6" in said


def test_a_secret_is_nowhere_but_in_the_process(ready_pod, monkeypatch):
    """Every argv of gcloud and ssh is noted in the cloud's folder."""
    canary = "canary-4a7f"
    monkeypatch.setenv("WANDB_API_KEY", canary)
    ready_pod.ready(
        "(folder / 'got').write_text(os.environ['WANDB_API_KEY'][::-1]); time.sleep(60)"
    )
    said = ready_pod.tpu(*RUN, "--env=WANDB_API_KEY", "--detach")
    got = ready_pod.host_folder(1) / "got"
    wait_for(lambda: got.exists() and got.read_text() == canary[::-1])
    assert not [
        n for n in ready_pod.processes() if canary in pathlib.Path(f"/proc/{n}/cmdline").read_text()
    ]
    said += ready_pod.tpu("status", "a") + ready_pod.tpu(*RUN, "--env=WANDB_API_KEY", "--dry-run")
    assert canary not in said and '"WANDB_API_KEY": "..."' in said
    for root in (ready_pod.state, ready_pod.repository):
        for file in root.rglob("*"):
            assert not file.is_file() or canary.encode() not in file.read_bytes(), file


def test_logs_go_on_where_they_were(ready_pod):
    ready_pod.ready(
        "[print(i, flush=True) or time.sleep(0.01) for i in range(50)]; sys.stdout.buffer.write(b'\\xff')"
    )
    ready_pod.tpu(*RUN, "--detach")
    ready_pod.cloud.add_fault("ssh", "ssh255_before", worker=1, match="host.py logs", times=3)
    said = ready_pod.tpu("logs", "a", "--every=0.01")
    shown = [line.removeprefix("[1] ") for line in said.splitlines() if line.startswith("[1]")]
    assert shown[1:] == [*map(str, range(50)), "\ufffd"]
    assert "does not answer: ssh failed" in said and "host 1 (127.0.0.2) answers again" in said
    assert not [
        line
        for line in ready_pod.tpu("logs", "a", "--every=0.01").splitlines()
        if line.startswith("[")
    ]
    for worker in range(2):
        kept = pathlib.Path(f"runs/pods/a/1/{worker}.log").read_bytes()
        assert kept == (ready_pod.host_folder(worker) / "log").read_bytes()


def soon(file: str, then) -> None:
    """Does something once a file is there."""
    threading.Thread(target=lambda: (wait_for(pathlib.Path(file).exists), then())).start()


def test_ctrl_c_leaves_the_run_alone(ready_pod):
    ready_pod.ready(WAITS)
    soon("runs/pods/it%27s/1/1.log", lambda: os.kill(os.getpid(), signal.SIGINT))
    said = ready_pod.tpu(*RUN, "--id=it's", code=130)  # it is not done: nothing is to follow by &&
    assert "python launch/tpu.py logs 'it'\"'\"'s'" in said
    wait_for(lambda: len(list(filter(alive, ready_pod.processes("it%27s")))) == 2)


def test_a_preempted_pod_ends_the_following(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.tpu(*RUN, "--detach")
    soon("runs/pods/a/1", lambda: ready_pod.cloud.preempt("my-pod"))
    assert "my-pod is PREEMPTED: launch/tpu.py supervise" in ready_pod.tpu(
        "logs", "a", "--every=0.05", code=1
    )
    ready_pod.tpu("down")  # the next test makes another
    ready_pod.synced = False
