"""A run on the hosts of the fake cloud: started once and everywhere, seen, stopped, whatever the connections do."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import threading
import types

import pytest
from pods import preflight
from pods.backend import Host
from pods.causes import HostReport
from pods.hosts import Answer
from pods.runs import Job, RunStatus, difference

from tests.launch.pod import HOSTILE, RUN, WAITS, alive, keeper_of, processes, wait_for
from tests.support.tiny import slow

pytestmark = pytest.mark.standard


def starts(pod) -> int:
    return len(list(pod.home.glob("*/home/.mlm-pod/runs/*/*/job.json")))


def test_the_same_command_on_every_host(ready_pod):
    ready_pod.ready("sys.exit(0)")
    said = ready_pod.tpu(*RUN, "--config.train.steps=3", "--config.x", "y z", "--", "--split=test")
    for worker in range(2):
        log = (pathlib.Path("runs/pods/a/1") / f"{worker}.log").read_text()
        assert json.loads(log) == [
            "run", "--config=configs/a.py", "--workdir=gs://my-bucket/runs/a", "--config.train.steps=3",
            "--config.x=y z", "--split=test", "--coordinator=127.0.0.1", "--processes=2",
            f"--process-id={worker}",
        ]  # fmt: skip
        assert f"[{worker}] " + log in said
        assert f"host {worker} (127.0.0.{worker + 1}): exited, exit code 0" in said


def test_a_file_in_the_place_of_mlm(ready_pod):
    folder = ready_pod.repository / "research"
    folder.mkdir()
    (folder / "beside.py").write_text("WORD = 'imported'\n")
    (folder / "rare.py").write_text("import beside, sys\nprint(beside.WORD, *sys.argv[1:3])\n")
    ready_pod.git("add", "research")
    ready_pod.ready("sys.exit(1)")
    ready_pod.tpu("sync")
    said = ready_pod.tpu(*RUN, "--command=train", "--program=research/rare.py")
    assert all(f"[{worker}] imported train --config=configs/a.py" in said for worker in range(2))
    said = ready_pod.tpu(*RUN, "--command=train", "--program=research/rara.py", code=2)
    assert "research/rara.py" in said and "is not in the code that goes to the hosts" in said
    ready_pod.git("rm", "-rfq", "research")


def test_a_second_run_attaches(ready_pod):
    ready_pod.ready(WAITS)
    assert "attempt 1: started on 2 hosts" in ready_pod.tpu(*RUN, "--detach")
    first = processes(ready_pod)
    said = ready_pod.tpu(*RUN, "--detach", "--again")
    assert "is alive already, nothing was started" in said and processes(ready_pod) == first
    assert starts(ready_pod) == 2
    assert "run 'a', attempt 1, is alive" in ready_pod.tpu("status")
    assert ready_pod.tpu("status", "a").count("running") == 2
    said = ready_pod.tpu("run", "configs/a.py", "--id=b", code=1)  # the accelerators are taken
    assert "nothing was started" in said and "run 'a' (attempt 1) is alive there" in said and starts(ready_pod) == 2
    said = ready_pod.tpu("stop", "a", "--grace=20")
    assert said.count("exit code 75") >= 2 and not any(map(alive, first))
    said = ready_pod.tpu(*RUN, code=75)
    assert "run 'a' has ended (attempt 1); --again makes another attempt" in said and starts(ready_pod) == 2
    assert "attempt 2: started" in ready_pod.tpu(*RUN, "--again", "--detach")


def test_what_is_alive_with_other_arguments_is_not_taken_for_it(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.tpu(*RUN, "--command=shards", "--config.x=1", "--detach")
    said = ready_pod.tpu(*RUN, "--config.x=2", "--again", code=1)
    assert (
        "run 'a', attempt 1, is alive with other arguments (only there: shards --config.x=1; only here: run --config"
        in said
    )
    assert "launch/tpu.py stop a" in said and starts(ready_pod) == 2
    said = ready_pod.tpu("supervise", "configs/a.py", "--every=0.05", code=1)
    assert "is alive with other arguments" in said and starts(ready_pod) == 2
    pathlib.Path("stub.py").write_text("# changed")  # the same arguments, and the code has changed since
    said = ready_pod.tpu(*RUN, "--command=shards", "--config.x=1", "--detach")
    assert "is alive already, nothing was started" in said and "is alive with code" in said
    ready_pod.git("checkout", "-q", "stub.py")


@pytest.mark.slow
@pytest.mark.parametrize("follower", ["run", "supervise"])
def test_what_has_ended_with_other_arguments_is_not_taken_for_it(ready_pod, follower):
    ready_pod.ready("sys.exit(0)")
    ready_pod.tpu(*RUN, "--command=shards")
    assert "has ended" in ready_pod.tpu(*RUN, "--command=shards")  # done, and 0 says so
    assert starts(ready_pod) == 2
    asked = {"run": RUN, "supervise": ("supervise", "configs/a.py", "--every=0.05")}[follower]
    said = ready_pod.tpu(*asked)
    assert "attempt 2" in said and starts(ready_pod) == 4
    for worker in range(2):
        assert json.loads((ready_pod.host_folder(worker, attempt=2) / "job.json").read_text())["argv"][0] == "run"
    assert starts(ready_pod) == 4 and ready_pod.tpu(*asked) and starts(ready_pod) == 4
    assert "attempt 3: started" in ready_pod.tpu(*RUN, "--workdir=/elsewhere")
    pathlib.Path("stub.py").write_text("# changed")
    assert "is missing: launch/tpu.py sync" in ready_pod.tpu(*RUN, "--workdir=/elsewhere", code=1)
    ready_pod.git("checkout", "-q", "stub.py")


def test_in_what_two_jobs_differ():
    job = Job("a", ("run", "--config=c", "--config.x=1", "--config.x=2"), (), None)
    place = ["--coordinator=h", "--processes=2", "--process-id=1"]  # of whichever host was asked
    assert difference(job, {"argv": [*job.argv, *place]}) == ""
    assert difference(job, {"argv": [*job.argv, *place], "program": "rare.py"}) == "only there: rare.py"
    assert difference(job, {"argv": ["train", *job.argv[1:], *place]}) == "only there: train; only here: run"
    assert difference(job, {"argv": [*job.argv, "--x=y z", *place]}) == "only there: '--x=y z'"
    said = difference(job, {"argv": ["run", "--config=c", "--config.x=2", "--config.x=1", *place]})
    assert said == "the same arguments in another order"


def test_what_lives_without_a_keeper_is_not_overlooked(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.tpu(*RUN, "--command=shards", "--detach")
    os.kill(keeper_of(processes(ready_pod)[0]), signal.SIGKILL)
    os.kill(processes(ready_pod)[1], signal.SIGKILL)
    wait_for((ready_pod.host_folder(1) / "exit.json").exists)
    said = ready_pod.tpu(*RUN, "--command=shards", "--detach")
    assert "is alive already, nothing was started" in said and starts(ready_pod) == 2


def test_an_end_that_no_host_confirms_is_no_success():
    report = HostReport(0, "h", "exited", {"code": 0, "signal": None, "ended": 1.0})
    assert RunStatus(1, (report,)).code == 0
    assert RunStatus(1, ()).code == RunStatus(1, (report,), ("host 1: no answer",)).code == 1


def test_two_who_start_at_once(ready_pod):
    ready_pod.ready(WAITS)
    import tpu

    codes = []
    threads = [threading.Thread(target=lambda: codes.append(tpu.main([*RUN, "--detach"]))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0, 0] and starts(ready_pod) == 2
    jobs = [json.loads((ready_pod.host_folder(worker) / "job.json").read_text()) for worker in range(2)]
    assert len({job["launch"] for job in jobs}) == 1 and [job["process"] for job in jobs] == [0, 1]


@pytest.mark.parametrize(
    "fault", [slow("ssh255_before"), "ssh255_after", "drop_midstream", slow("keys_not_propagated")]
)
def test_connections_that_fail_start_nothing_twice(ready_pod, fault):
    ready_pod.ready("print('one more', flush=True); time.sleep(0.3)")
    for attempts in (1, 10):  # gcloud runs the command again by itself; or it gives up, and we do
        ready_pod.fault("ssh", fault, worker=1, match="host.py start", attempts=attempts)
    ready_pod.tpu(*RUN)
    for worker in range(2):
        log = (ready_pod.host_folder(worker) / "log").read_text()
        assert log.count("one more") == 1, log
    assert starts(ready_pod) == 2


@pytest.mark.slow
def test_a_silent_host_stops_the_start(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.fault("ssh", "silent", worker=1, match="host.py start")
    said = ready_pod.tpu(*RUN, "--timeout=5", code=1)
    assert "the run could not be started on all hosts (host 1 (127.0.0.2): no answer within 5 s)" in said
    assert "it was stopped where it had started. Then: run --again" in said
    assert ready_pod.tpu("status", "a").count("running") == 0 and processes(ready_pod) == []
    assert "attempt 2: started" in ready_pod.tpu(*RUN, "--again", "--detach")


@pytest.mark.slow
def test_a_silent_host_is_named_before_anything_starts(ready_pod):
    ready_pod.ready(WAITS)
    ready_pod.fault("ssh", "silent", worker=1, match="host.py status", times=2)
    said = ready_pod.tpu(*RUN, "--timeout=4", code=1)
    assert "nothing was started: host 1 (127.0.0.2): no answer within 4 s" in said and starts(ready_pod) == 0
    said = ready_pod.tpu("status", "a", "--timeout=4", code=1)
    assert "host 1 (127.0.0.2): no answer within 4 s" in said


def test_hosts_that_lack_the_code_are_named(ready_pod):
    ready_pod.ready()
    pathlib.Path("stub.py").write_text("changed")
    said = ready_pod.tpu(*RUN, code=1)
    assert "host 0 (127.0.0.1), host 1 (127.0.0.2): code" in said and "is missing: launch/tpu.py sync" in said
    ready_pod.fault("ssh", "ssh255_before", worker=1, match="host.py unpack", times=3)
    said = ready_pod.tpu("sync", code=1)
    assert "copying the code failed on 1 of 2 hosts: host 1 (127.0.0.2): ssh failed" in said
    said = ready_pod.tpu("preflight", code=1)
    assert "host 0 (127.0.0.1): its packages are not installed: launch/tpu.py sync" in said
    assert "\nhost 1 (127.0.0.2): code" in said and "is missing: launch/tpu.py sync" in said
    assert starts(ready_pod) == 0
    ready_pod.git("checkout", "-q", "stub.py")
    assert "ready: 2 hosts" in ready_pod.tpu("preflight")


@pytest.mark.slow
def test_preflight_tries_the_ports(ready_pod):
    ready_pod.ready()
    assert "ready: 2 hosts" in ready_pod.tpu("preflight")
    with socket.create_server(("127.0.0.1", ready_pod.numbers[1])):  # of host 0, which is this machine
        said = ready_pod.tpu("preflight", code=1)
    assert f"host 0 (127.0.0.1): port {ready_pod.numbers[1]} can't be bound (Address already in use)" in said
    assert "not ready" in said and "can't reach" not in said


def test_a_closed_port_is_named():
    first, second, third = (Host(worker, f"10.0.0.{worker}") for worker in range(3))
    silent = {"ports": {"8474": "timed out", "8476": ""}}
    hosts = types.SimpleNamespace(all=(first, second, third), dry=False)
    hosts.ask = lambda words: [Answer(host, {}) for host in words]
    hosts.require = lambda answers, what: [{"ports": {"8474": "", "8476": ""}}, silent, silent]
    (said,) = preflight.check_ports(hosts)
    assert said.startswith(
        "host 1 (10.0.0.1), host 2 (10.0.0.2): can't reach port 8474 of 10.0.0.0 (timed out): open it"
    )


def test_the_first_cause_is_told(ready_pod):
    ready_pod.ready("time.sleep(60 if sys.argv[-1] == '--process-id=0' else 0.1); sys.exit(3)")
    ready_pod.tpu(*RUN, "--detach")
    wait_for((ready_pod.host_folder(1) / "exit.json").exists)
    os.kill(processes(ready_pod)[0], signal.SIGABRT)  # as jax ends its peers
    said = ready_pod.tpu("logs", "a", "--every=0.05", code=3)
    assert "first cause: host 1 " in said and "ended with exit code 3" in said
    assert "host 0 (127.0.0.1): exited, signal 6" in said


def test_arguments_arrive_as_they_are(ready_pod):
    ready_pod.ready("sys.exit(0)")
    text = " ".join(word for word in HOSTILE if word)
    words = [word for word in HOSTILE if word]
    ready_pod.tpu(
        "run", "configs/a.py", "--every=0.02", f"--id={text}", f"--workdir=/tmp/{text}", f"--config.x={text}",
        *(f"--config.y{i}={word}" for i, word in enumerate(words)), "--", *words,
    )  # fmt: skip
    (log,) = pathlib.Path("runs/pods").glob("*/1/1.log")
    expected = [f"--workdir=/tmp/{text}", f"--config.x={text}", *(f"--config.y{i}={w}" for i, w in enumerate(words))]
    assert json.loads(log.read_text())[2:-3] == expected + words
    ready_pod.tpu("run", "configs/a.py", "--id=-x", "--detach")
    wait_for((ready_pod.host_folder(0, "-x") / "exit.json").exists)
    assert "exit code 0" in ready_pod.tpu("status", "--", "-x")
    assert not list(ready_pod.state.rglob("pwned")) and not list(ready_pod.repository.rglob("pwned"))


def test_a_secret_is_nowhere_but_in_the_process(ready_pod, monkeypatch):
    canary = "canary-4a7f"
    monkeypatch.setenv("WANDB_API_KEY", canary)
    ready_pod.ready("(folder / 'got').write_text(os.environ['WANDB_API_KEY'][::-1]); time.sleep(60)")
    seen, stop = [], threading.Event()

    def look() -> None:
        while not stop.wait(0.02):
            for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.extend([path] if canary.encode() in path.read_bytes() else [])

    watch = threading.Thread(target=look)
    watch.start()
    said = ready_pod.tpu(*RUN, "--env=WANDB_API_KEY", "--detach")
    got = ready_pod.host_folder(1) / "got"
    wait_for(lambda: got.exists() and got.read_text() == canary[::-1])
    stop.set()
    watch.join()
    said += ready_pod.tpu("status", "a") + ready_pod.tpu(*RUN, "--env=WANDB_API_KEY", "--dry-run")
    assert seen == [] and canary not in said and '"WANDB_API_KEY": "..."' in said
    for root in (ready_pod.state, ready_pod.repository):
        for file in root.rglob("*"):
            assert not file.is_file() or canary.encode() not in file.read_bytes(), file
    for bad in (f"WANDB_API_KEY={canary}", "NOT_SET_HERE"):
        said = ready_pod.tpu(*RUN, f"--env={bad}", code=2)
        assert "give the name of a variable that is set here" in said and canary not in said


def test_mistakes_are_found_before_anybody_is_asked(pod):
    for words, said in {
        ("run", "configs/b.py"): "configs/b.py is not in the code",
        (*RUN, "--workdir=runs/x"): "must be absolute or gs://",
        (*RUN, "--id=" + "x" * 201): "1 to 200 characters",
        ("status", "--config.x=1", "a"): "status takes no --config.x=1",
    }.items():
        assert said in pod.tpu(*words, code=2)
    text = pathlib.Path("pod.toml").read_text()
    pathlib.Path("pod.toml").write_text(text.replace("bucket", "# bucket"))
    assert "there is no folder for the run that all hosts see" in pod.tpu(*RUN, code=2)
    assert pod.calls() == []
