"""The supervisor: a run of the fake cloud that is taken away, crashes, is stopped, and is done."""

import dataclasses
import json
import os
import signal
import threading
from argparse import Namespace

import pytest
from pods.backend import Pod, PodError, Runner, SettingsError
from pods.code import Code
from pods.decision import Memory, decide
from pods.gcloud import TpuVm
from pods.runs import Job, RunStatus
from pods.settings import Settings
from pods.supervise import Supervisor, cost

from tests.launch.host_folder import wait_for
from tests.launch.test_decision import FLAGS

# What `python -m mlm` does here: counts steps, one file a process in the workdir, which outlives the pod; its second
# argument, config.do, says how many, and how it ends: "9", or "4 then 1" (with code 1 at step 4).
TRAINING = """
import itertools
words = dict(word.partition("=")[::2] for word in sys.argv)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
work = pathlib.Path(words["--workdir"])
work.mkdir(parents=True, exist_ok=True)
place = work / f"step-{words['--process-id']}"
last, _, code = words["--config.do"].partition(" then ")
begin = int(place.read_text()) if place.exists() else 0
with (work / "starts").open("a") as file:
    file.write(f"{folder.name} {words['--process-id']} from {begin}\\n")
for step in range(begin + 1, int(last) + 1):
    new = folder / "new"
    new.write_text(json.dumps({"step": step, "phase": "step", "time": time.time(), "process": 0}))
    new.rename(folder / "progress.json")
    place.write_text(str(step))
    time.sleep(0.05)
    while (work / "hold").exists():
        time.sleep(0.05)
sys.exit(int(code or 0))
"""


class Supervised:
    """A pod, a run of TRAINING, and its supervisor."""

    def __init__(self, pod, folder):
        self.pod, self.work = pod, folder / "work"
        pod.cloud.settings(env={"STUB": TRAINING, "PATH": f"{pod.bin}:/usr/bin:/bin"})

    def __call__(self, do, *flags, code=0, kind="v4-8"):
        return self.pod.tpu(
            "supervise", "configs/a.py", "--id=a", f"--workdir={self.work}", f"--config.do={do}", "--every=0.1",
            f"--accelerator-type={kind}", "--price=3.5", *flags, code=code,
        )  # fmt: skip

    def has_seen_it(self):
        """Whether the supervisor has seen the first attempt alive on a host that has made a step."""
        record = self.pod.repository / "runs" / "pods" / "a" / "supervise.json"
        return '"watched": 1,' in record.read_text() and '"step": -1,' not in record.read_text()

    def starts(self):
        return (self.work / "starts").read_text().splitlines() if (self.work / "starts").exists() else []

    def cloud_calls(self):
        words = [call for call in self.pod.cloud.calls() if call[3] not in ("ssh", "describe")]
        return [f"{call[2]} {call[3]}{' --force' if '--force' in call else ''}" for call in words]


def test_cost_is_that_of_all_pods_while_they_are_ready():
    memory, chosen = Memory(), Settings(accelerator_type="v4-32", price=2.0)
    polls = [(1, "CREATING"), (100, "READY"), (1900, "UNKNOWN"), (2800, "READY"), (3700, "PREEMPTED"), (5000, "ABSENT")]
    for now, state in polls:
        decide(Pod("p", state), RunStatus(0, ()) if state == "READY" else None, now, memory, FLAGS)
    assert cost(chosen, memory, 9999) == "16.00 chip-hours so far, 32.00 dollars"
    decide(Pod("p", "READY"), RunStatus(0, ()), 10000, memory, FLAGS)
    memory = Memory(**json.loads(json.dumps(dataclasses.asdict(memory))))
    assert cost(dataclasses.replace(chosen, price=0.0), memory, 13600).startswith("32.00 chip-hours so far")


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function that makes a supervisor."""
    monkeypatch.chdir(tmp_path)

    def supervisor():
        job = Job("a", ("train",), {}, Code(tmp_path, "0" * 64, b"", "code", frozenset(), ""))
        cloud = TpuVm(Settings("pod", "p", "us-central2-b", "v4-8"), Runner())
        return Supervisor(cloud, job, Namespace(every=10.0, timeout=60.0, **vars(FLAGS)))

    return supervisor


def test_what_waiting_fixes_is_waited_for_longer_and_longer(make, capsys):
    one = make()
    waits = []
    for _ in range(9):
        one._wait_for(PodError("no more capacity.", "stockout"))
        waits.append(one.pause())
    assert waits == [20, 40, 80, 160, 320, 640, 900, 900, 900]
    assert capsys.readouterr().out.splitlines()[0].endswith("no more capacity; again in 20 s")
    for kind in ("quota", "permission", "settings", "login"):
        with pytest.raises(PodError, match="why"):
            make()._wait_for(PodError("why.", kind))
    for kind in ("hosts", "quota"):  # an hour; a quota, where our own delete gives it back
        one = make()
        one.memory = Memory(gone=kind == "quota")
        for _ in range(7):
            one._wait_for(PodError("why.", kind))
        with pytest.raises(PodError, match="why"):
            one._wait_for(PodError("why.", kind))


def test_a_lost_network_never_ends_it_and_a_mistake_always_does(make, monkeypatch):
    one, problems = make(), {}

    def fail(*_, **__):
        raise problems["error"]

    monkeypatch.setattr(one.cloud, "describe", fail)
    for _ in range(20):  # from the first poll on
        problems["error"] = PodError("Google Cloud can't be reached.", "network")
        assert one.step() is None
        one._wait_for(problems["error"])
    one.was_seen = True
    problems["error"] = PodError("gcloud isn't logged in.", "login")
    assert one.step() is None, "a login that ran out later may come back"
    one._wait_for(problems["error"])  # while a pod is made again, too
    problems["error"] = SettingsError("gcloud refuses the flags.")
    with pytest.raises(SettingsError):
        one.step()
    monkeypatch.setattr(one.cloud, "describe", lambda: Pod("pod", "READY"))
    monkeypatch.setattr("pods.supervise.connect", fail)
    with pytest.raises(SettingsError):
        one.step()
    one.was_seen = False
    problems["error"] = PodError("can't be reached.", "network")
    assert one.step() is None
    for kind in ("login", "hosts"):  # at first; "hosts": the pod is of another size than pod.toml says
        problems["error"] = PodError("mistake.", kind)
        with pytest.raises(PodError, match="mistake"):
            one.step()


def test_one_supervisor_a_run(make):
    one = make()
    one.step = make().run  # while the first one runs
    with pytest.raises(PodError, match="supervised already"):
        one.run()


def test_a_full_disk_ends_nothing(make, tmp_path, monkeypatch, capsys):
    def full(value, file):
        file.write("{")
        raise OSError(28, "No space left on device")

    one = make()
    monkeypatch.setattr(one.cloud, "describe", lambda: Pod("pod", "CREATING"))
    with monkeypatch.context() as patch:
        patch.setattr("host_setup.json.dump", full)
        one.step = lambda step=one.step: step() or 3  # a poll, which waits, and then an end
        assert one.run() == 3
    assert "supervise.json can't be written (No space left on device)" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs" / "pods" / "a").iterdir()] == [".supervise.lock"]


def test_a_damaged_record_is_named(make, tmp_path):
    file = tmp_path / "runs" / "pods" / "a" / "supervise.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"memory": {"crashe')
    with pytest.raises(PodError, match=r"supervise\.json is damaged"):
        make()


def test_another_run_of_an_id_begins_at_its_own_step(make):
    """Else it would have to come further than that one before a crash of its own is forgiven."""
    one = make()
    one.folder.mkdir(parents=True)
    one.memory = dataclasses.replace(one.memory, step=1000, crashes=3, paid=7.0)
    one._save()
    assert make().memory == one.memory, "restarted, it goes on"
    one.memory.argv = ["", "shards"]
    one._save()
    assert (make().memory.step, make().memory.crashes, make().memory.paid) == (-1, 0, 7.0)


@pytest.fixture
def supervised(pod, tmp_path):
    pod.commit()
    return Supervised(pod, tmp_path)


def in_order(text, *parts):
    at = 0
    for part in parts:
        assert part in text[at:], f"{part!r} is not there, or not in this order:\n{text}"
        at = text.index(part, at) + len(part)


def hold(supervised, then, hosts=1):
    """Lets a run stand still after its first step until `then` has happened; returns the thread that does it."""
    supervised.work.mkdir()
    (supervised.work / "hold").touch()

    def wait():
        wait_for(lambda: len([*supervised.work.glob("step-*")]) == hosts and supervised.has_seen_it(), 60)
        then()
        (supervised.work / "hold").unlink()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.standard
def test_a_pod_that_is_taken_away_is_made_again_and_the_run_goes_on(supervised):
    """Its quota comes back some time after it is deleted."""
    cloud = supervised.pod.cloud
    cloud.settings(queue_describes=0)

    def chaos():
        cloud.add_fault("describe", "unavailable", times=2)
        cloud.add_fault("create", "quota")
        cloud.preempt("my-pod")

    thread = hold(supervised, chaos, hosts=2)
    said = supervised("5", "--spot", "--queued", kind="v4-16")
    thread.join()
    in_order(
        said, "the pod is ABSENT; creating one; 0.00 chip-hours", "attempt 1 started on 2 hosts",
        "the pod can't be asked", "the pod is PREEMPTED, preemption 1 of 100", "; deleting it, with force",
        "creating one", "is used up", "; what the deleted pod has used may come back; again in 0 s",
        "attempt 2 started on 2", "attempt 2 ended with 0 on all 2 hosts, step 5; done; 0.0", " dollars",
    )  # fmt: skip
    assert supervised.cloud_calls() == [
        "queued-resources create", "queued-resources delete --force", *["queued-resources create"] * 2
    ]  # fmt: skip
    assert sorted(supervised.starts()) == ["1 0 from 0", "1 1 from 0", "2 0 from 1", "2 1 from 1"]
    assert "done" in supervised("5", "--spot", "--queued", kind="v4-16")
    assert len(supervised.starts()) == 4, "a run that is done is not started again"


@pytest.mark.standard
def test_stock_outs_are_waited_for_and_crashes_are_not_without_end(supervised):
    supervised.pod.cloud.add_fault("create", "stockout", times=2)
    said = supervised("2 then 9", "--max-crashes=1", code=9)
    in_order(
        said, "creating one", *("; again in 0 s", "creating one") * 2, "attempt 1 started",
        "ended with exit code 9", "crash 1 of 1 without progress, step 2; starting", "attempt 2 started",
        "crash 2 of 1 without progress: the budget is used up", "giving up",
    )  # fmt: skip
    assert supervised.cloud_calls() == ["tpu-vm create"] * 3
    assert supervised.starts() == ["1 0 from 0", "2 0 from 2"]
    assert '"--config.do=2 then 9"' in (supervised.pod.repository / "runs/pods/a/2/0.log").read_text()


@pytest.mark.standard
def test_ctrl_c_detaches_and_the_same_command_comes_back(supervised):
    thread = hold(supervised, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert "python launch/tpu.py status a" in supervised("6", code=130)
    thread.join()
    in_order(supervised("6"), "attempt 1 ended with 0 on all 1 hosts")
    assert supervised.starts() == ["1 0 from 0"]


@pytest.mark.standard
def test_who_stops_a_run_stops_its_supervisor(supervised):
    import tpu

    stop = ["stop", "a", "--accelerator-type=v4-8", "--grace=20"]
    thread = hold(supervised, lambda: tpu.main(stop))
    said = supervised("3", code=75)
    thread.join()
    assert "attempt 1 was ended by launch/tpu.py stop" in said
    in_order(supervised("3"), "attempt 1 has ended", "attempt 2 ended with 0")
