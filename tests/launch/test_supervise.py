"""The supervisor: a run of the fake cloud that is taken away, crashes, is stopped, and is done."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading

import pytest

from tests.launch.decided import LIMITS, ended
from tests.launch.pod import LAUNCH, by_hand, fake_cloud, wait_for
from tests.launch.supervised import Supervised

from pods.backend import Host, Pod, Runner  # isort: skip
from pods.decision import Memory, Seen, decide  # isort: skip
from pods.code import Code  # isort: skip
from pods.errors import PodError, SettingsError  # isort: skip
from pods.gcloud import TpuVm  # isort: skip
from pods.hosts import Hosts  # isort: skip
from pods.runs import Job, RunStatus  # isort: skip
from pods.settings import Settings  # isort: skip
from pods.supervise import Supervisor, cost  # isort: skip


def test_cost_is_that_of_all_pods_while_they_are_ready():
    memory, chosen = Memory(), Settings(accelerator_type="v4-32", price=2.0)
    polls = [(1, "CREATING"), (100, "READY"), (1900, "UNKNOWN"), (2800, "READY"), (3700, "PREEMPTED"), (5000, "ABSENT")]
    for now, state in polls:
        _, memory = decide(Seen(Pod("p", state), now, RunStatus(0, ())), memory, LIMITS)
    assert cost(chosen, memory, 9999) == "16.00 chip-hours so far, 32.00 dollars"
    _, memory = decide(Seen(Pod("p", "READY"), 10000, RunStatus(0, ())), memory, LIMITS)
    memory = Memory(**json.loads(json.dumps(dataclasses.asdict(memory))))
    chosen = dataclasses.replace(chosen, price=0.0)
    assert cost(chosen, memory, 13600) == "32.00 chip-hours so far, price unknown"


def supervisor(said):
    job = Job("a", ("train",), (), Code("0" * 64, b"", "0" * 40, "", frozenset()))
    cloud = TpuVm(Settings("pod", "p", "us-central2-b", "v4-8"), Runner())
    return Supervisor(cloud, job, LIMITS, every=10.0, show=said.append, clock=lambda: 0.0)


def test_what_waiting_fixes_is_waited_for_longer_and_longer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = supervisor(said := [])
    waits = []
    for _ in range(9):
        one._wait_for(PodError("no more capacity.", "stockout"))
        waits.append(one.pause())
    assert waits == [20, 40, 80, 160, 320, 640, 900, 900, 900]
    assert said[0].endswith("no more capacity; again in 20 s")
    one.tries = 0
    for _ in range(7):
        one._wait_for(PodError("host 3: the device is held.", "hosts"))
    with pytest.raises(PodError, match="held"):
        one._wait_for(PodError("host 3: the device is held.", "hosts"))
    for kind in ("quota", "permission", "settings", "login"):
        with pytest.raises(PodError, match="why"):
            supervisor([])._wait_for(PodError("why.", kind))


def test_a_lost_network_never_ends_it_and_a_mistake_always_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, problems = supervisor([]), {}

    def fail(*_, **__):
        raise problems["error"]

    monkeypatch.setattr(one.cloud, "describe", fail)
    for _ in range(20):  # from the first poll on
        problems["error"] = PodError("Google Cloud can't be reached.", "network")
        assert one.step() is None
        one._wait_for(problems["error"])
    one.pod = Pod("pod", "CREATING")
    problems["error"] = PodError("gcloud isn't logged in.", "login")
    assert one.step() is None, "a login that ran out later may come back"
    problems["error"] = SettingsError("gcloud refuses the flags.")
    with pytest.raises(SettingsError):
        one.step()
    monkeypatch.setattr(one.cloud, "describe", lambda: Pod("pod", "READY"))
    monkeypatch.setattr("pods.supervise.connect", fail)
    with pytest.raises(SettingsError):
        one.step()
    one.pod = None
    problems["error"] = PodError("can't be reached.", "network")
    assert one.step() is None
    for kind in ("login", "hosts"):  # at first; "hosts": the pod is of another size than pod.toml says
        problems["error"] = PodError("mistake.", kind)
        with pytest.raises(PodError, match="mistake"):
            one.step()


def test_quota_that_our_own_delete_gives_back_is_waited_for_an_hour(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = supervisor(said := [])
    one.memory = Memory(deleted=True)
    for _ in range(7):
        one._wait_for(PodError("the quota is used up.", "quota"))
    assert said[0].endswith("the quota is used up; what the deleted pod has used may come back; again in 20 s")
    with pytest.raises(PodError, match="used up"):
        one._wait_for(PodError("the quota is used up.", "quota"))


def test_one_supervisor_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = supervisor([])
    one.step = supervisor([]).run  # while the first one runs
    with pytest.raises(PodError, match="supervised already"):
        one.run()


def test_a_damaged_record_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "runs" / "pods" / "a" / "supervise.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"memory": {"crashe')
    with pytest.raises(PodError, match=r"supervise\.json is damaged .* remove it"):
        supervisor([])


def test_a_stop_counts_only_while_somebody_watches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "runs" / "pods" / "a" / "stopped.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"attempt": 1}')
    one, seen = supervisor([]), []
    pod = Pod("pod", "READY", (Host(0, "x"), Host(1, "y")))
    monkeypatch.setattr(one.cloud, "describe", lambda: pod)
    monkeypatch.setattr("pods.supervise.connect", lambda *_, **__: Hosts(one.cloud, pod))
    monkeypatch.setattr("pods.runs.status", lambda *_: ended(75, 75))
    one.step = lambda: seen.append(one.see().stopped) or 0
    one.run()
    assert seen == [0], "who supervises it after that wants it to go on"
    file.write_text('{"attempt": 2}')
    assert one.see().stopped == 2


@pytest.fixture
def supervised(pod, tmp_path):
    return Supervised(pod, tmp_path)


def in_order(text, *parts):
    at = 0
    for part in parts:
        assert part in text[at:], f"{part!r} is not there, or not in this order:\n{text}"
        at = text.index(part, at) + len(part)


@pytest.mark.standard
def test_a_pod_that_is_taken_away_is_made_again_and_the_run_goes_on(supervised):
    state = supervised.pod.state
    cloud = fake_cloud()
    cloud.settings(state, queue_describes=0, retry_seconds=0)
    (supervised.work).mkdir()
    (supervised.work / "hold").touch()
    record = supervised.pod.repository / "runs" / "pods" / "a" / "supervise.json"  # both hosts have answered

    def chaos():
        wait_for(lambda: (supervised.work / "step-1").exists() and '"watched": 1,' in record.read_text(), 60)
        cloud.add_fault(state, "describe", "unavailable", times=2)
        cloud.preempt(state, "my-pod")
        (supervised.work / "hold").unlink()

    thread = threading.Thread(target=chaos)
    thread.start()
    said = supervised("5", "--spot", "--queued", kind="v4-16")
    thread.join()
    in_order(
        said, "the pod is ABSENT; creating one; 0.00 chip-hours so far, 0.00 dollars", "nothing of this run is on the",
        "attempt 1 started on 2 hosts", "the pod can't be asked",
        "the pod is PREEMPTED, preemption 1 of 100", "; deleting it, with force", "creating one",
        "attempt 2 started on 2", "attempt 2 ended with 0 on all 2 hosts, step 5; done; 0.0", " dollars",
    )  # fmt: skip
    assert "again in" not in said, "the code was brought to the new pod before the start"
    assert supervised.cloud_calls() == [
        "queued-resources create", "queued-resources delete --force", "queued-resources create"
    ]  # fmt: skip
    assert sorted(supervised.starts()) == ["1 0 from 0", "1 1 from 0", "2 0 from 1", "2 1 from 1"]
    assert supervised("5", "--spot", "--queued", kind="v4-16").count("done") == 1, (
        "a run that is done is not started again"
    )
    assert len(supervised.starts()) == 4


def hold(supervised, then):
    """Lets a run stand still after its first step until `then` has happened; returns the thread that does it."""
    supervised.work.mkdir()
    (supervised.work / "hold").touch()

    def wait():
        wait_for(lambda: (supervised.work / "step-0").exists(), 60)
        then()
        (supervised.work / "hold").unlink()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_pod_that_up_has_not_made_is_given_up_and_left(supervised):
    pod = supervised.pod
    by_hand(pod, "tpu-vm", "create", "my-pod", "--accelerator-type=v4-8", "--version=tpu-ubuntu2204-base")
    thread = hold(supervised, pod.preempt)
    said = supervised("5", "--spot", code=75)
    thread.join()
    in_order(said, "attempt 1 started", "the pod is PREEMPTED, preemption 1 of 100; your `up` has not made it, so only")
    assert supervised.cloud_calls() == ["tpu-vm create"], "the colleague's"
    fake_cloud().Cloud(pod.state).remove_node("my-pod")
    said = supervised("5", "--spot", code=75)
    in_order(said, "the pod is ABSENT; your `up` has not made it", "giving up")
    in_order(supervised("5", "--spot", "--recreate"), "creating one", "attempt 2 ended with 0")
    assert supervised.cloud_calls() == ["tpu-vm create"] * 2


@pytest.mark.slow
def test_a_pod_that_is_stopped_is_started_and_the_run_goes_on(supervised):
    thread = hold(supervised, lambda: fake_cloud().stop(supervised.pod.state, "my-pod"))
    said = supervised("5")
    thread.join()
    in_order(said, "attempt 1 started", "the pod is STOPPED, preemption 1 of 100; starting it again", "attempt 2 ended")
    assert supervised.cloud_calls() == ["tpu-vm create", "tpu-vm start"] and "crash" not in said
    assert supervised.starts()[1].startswith("2 0 from ")


@pytest.mark.slow
def test_a_quota_refusal_after_our_own_delete_is_not_the_end(supervised):
    def take():
        supervised.pod.fault("create", "quota", times=2)
        supervised.pod.preempt()

    thread = hold(supervised, take)
    said = supervised("5")
    thread.join()
    in_order(said, "deleting it", "creating one", "is used up", "may come back; again in 0 s",
             "may come back", "creating one", "attempt 2 ended with 0")  # fmt: skip
    supervised.pod.fault("create", "quota")
    supervised.pod.tpu("down", "--accelerator-type=v4-8")
    said = supervised("6", "--id=b", code=1)
    assert "is used up" in said and "come back" not in said, "a quota that was never ours is not waited for"


@pytest.mark.standard
def test_stock_outs_are_waited_for_and_crashes_are_not_without_end(supervised):
    fake_cloud().add_fault(supervised.pod.state, "create", "stockout", times=2)
    said = supervised("2 then 9", "--max-crashes=1", code=9)
    in_order(
        said, "creating one", "; again in 0 s", "creating one", "; again in 1 s", "creating one", "attempt 1 started",
        "ended with exit code 9", "crash 1 of 1 without progress, step 2; starting", "attempt 2 started",
        "crash 2 of 1 without progress: the budget is used up", "giving up",
    )  # fmt: skip
    assert supervised.cloud_calls() == ["tpu-vm create"] * 3
    assert supervised.starts() == ["1 0 from 0", "2 0 from 2"]
    assert '"--config.do=2 then 9"' in (supervised.pod.repository / "runs/pods/a/2/0.log").read_text()


@pytest.mark.standard
def test_what_no_restart_can_fix_is_not_tried_again(supervised):
    said = supervised("1 then 2", code=2)
    assert "ended with exit code 2" in said
    assert "which no restart can fix" in said
    assert supervised.starts() == ["1 0 from 0"]


@pytest.mark.standard
def test_ctrl_c_detaches_and_the_same_command_comes_back(supervised):
    program = [sys.executable, str(LAUNCH / "tpu.py"), *supervised.argv("6")]
    supervised.work.mkdir()
    (supervised.work / "hold").touch()
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "attempt 1 runs" in line:
            process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert "detached; the run goes on" in "".join(lines)
    assert "python launch/tpu.py status a" in lines[-1]
    process.stderr.close()
    (supervised.work / "hold").unlink()
    in_order(supervised("6"), "attempt 1 ended with 0 on all 1 hosts")
    assert supervised.starts() == ["1 0 from 0"]


@pytest.mark.slow
def test_who_stops_a_run_stops_its_supervisor(supervised):
    supervised.work.mkdir()
    (supervised.work / "hold").touch()
    program = [sys.executable, str(LAUNCH / "tpu.py"), *supervised.argv("3")]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (supervised.work / "step-0").exists(), 60)
    stop = [sys.executable, str(LAUNCH / "tpu.py"), "stop", "a", "--accelerator-type=v4-8", "--grace=20"]
    assert subprocess.run(stop, capture_output=True).returncode == 0
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "attempt 1 was ended by launch/tpu.py stop" in said
    (supervised.work / "hold").unlink()
    in_order(supervised("3"), "attempt 1 has ended", "attempt 2 ended with 0")
