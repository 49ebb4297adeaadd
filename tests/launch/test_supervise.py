"""The supervisor: a run that is taken away, crashes, is stopped, and is done."""

import os
import signal
import threading
import time
from argparse import Namespace

import pytest
from pods.backend import Pod, PodError, SettingsError
from pods.causes import HostReport
from pods.code import Code
from pods.gcloud import TpuVm
from pods.runs import Job, RunStatus
from pods.settings import Settings
from pods.supervise import Supervisor

from tests.launch.pod import wait_for

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


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function that makes a supervisor."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TpuVm, "label", "me")

    def supervisor(**more):
        job = Job("a", ("train",), {}, Code(tmp_path, "0" * 64, b"", "code", frozenset(), ""))
        cloud = TpuVm(Settings("pod", "p", "us-central2-b", "v4-8", price=2.0))
        one = Supervisor(cloud, job, Namespace(**{"patience": 12.0, "down": False} | more))
        one.folder.mkdir(parents=True, exist_ok=True)
        return one

    return supervisor


def test_cost_is_that_of_all_pods_while_they_are_ready(make, monkeypatch):
    """Over a restart, and a clock that is set back between two supervisors."""
    one = make()
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for seconds, state in (
        (1, "CREATING"),
        (100, "READY"),
        (1900, "READY"),
        (3700, "PREEMPTED"),
        (5000, "ABSENT"),
        (6000, "READY"),
    ):
        now[0] = seconds
        one._count(Pod("pod", state))
    assert one.cost() == "4.00 chip-hours so far, 8.00 dollars"
    again = make()
    now[0] = 5000 - 3600
    again._count(Pod("pod", "READY"))
    assert again.cost() == one.cost()


@pytest.mark.parametrize("kind", ["network", "hosts", "absent", "other"])
@pytest.mark.parametrize("where", ["describe", "create", "connect"])
def test_it_goes_on_after_whatever_the_cloud_says(make, monkeypatch, capsys, kind, where):
    """With longer and longer pauses, from the first poll on, until --patience is over."""
    one = make()

    def fail(*_, **__):
        raise PodError("update is not supported while in state PREEMPTED.", kind)

    state = "READY" if where == "connect" else "ABSENT"
    monkeypatch.setattr(TpuVm, "describe", lambda _: Pod("pod", state))
    at = {
        "describe": "pods.gcloud.TpuVm.describe",
        "create": "pods.lifetime.take",
        "connect": "pods.supervise.connect",
    }
    monkeypatch.setattr(at[where], fail)
    pauses = []
    while (code := one.step()) is None:
        pauses.append(one.pause())
        assert len(pauses) < 100
    assert code == 1 and pauses[:7] == [30, 60, 120, 240, 480, 900, 900]
    assert 11 * 3600 < sum(pauses) < 13 * 3600
    said = capsys.readouterr().out
    assert "state PREEMPTED; again in 30 s" in said and "giving up after 12 hours" in said


@pytest.mark.parametrize("error", [SettingsError("its flags."), PodError("pays not.", "billing")])
def test_what_no_new_try_can_change_ends_it(make, monkeypatch, capsys, error):
    one = make()

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(one.cloud, "describe", lambda: Pod("pod", "READY"))
    monkeypatch.setattr("pods.supervise.connect", fail)
    with pytest.raises(PodError):
        one.run()
    assert "the pod is left as it is, and costs, 8.00 dollars an hour" in capsys.readouterr().out


@pytest.mark.parametrize(("down", "ready_at"), [(False, 1.0), (True, 1.0), (False, 0.0)])
def test_at_its_end_the_pod_costs_on_and_it_says_so_unless_it_deletes_it(
    make, monkeypatch, capsys, down, ready_at
):
    """Or unless there is none."""
    one = make(down=down)
    deleted = []
    one.ready_at = ready_at
    one.step = lambda: 3
    monkeypatch.setattr(one.cloud, "describe", lambda: Pod("pod", "READY", label="me"))
    monkeypatch.setattr(one.cloud, "delete", deleted.append)
    assert one.run() == 3 and len(deleted) == down
    assert ("costs, 8.00 dollars an hour: launch/tpu.py down" in capsys.readouterr().out) == (
        not down and ready_at > 0
    )


def test_what_the_cloud_says_steers_no_terminal(make, monkeypatch, capsys):
    one = make()
    ill = Pod("pod", "READY", reason="UNHEALTHY \x1b[2J")
    monkeypatch.setattr(one.cloud, "describe", lambda: ill)
    monkeypatch.setattr("pods.supervise.connect", lambda *_: None)
    monkeypatch.setattr(
        "pods.runs.status", lambda *_: RunStatus(1, (HostReport(0, "h", "running"),))
    )
    one.step()
    assert "UNHEALTHY \\x1b[2J" in capsys.readouterr().out


def test_one_supervisor_a_run(make):
    one = make()
    one.step = make().run  # while the first one runs
    with pytest.raises(PodError, match="supervised already"):
        one.run()


def test_a_full_disk_ends_nothing(make, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    one = make()
    monkeypatch.setattr(one.cloud, "describe", lambda: Pod("pod", "CREATING"))
    monkeypatch.setattr("host_setup.write", full)
    assert one.step() is None


class Supervised:
    """A pod, a run of TRAINING, and its supervisor."""

    def __init__(self, pod, folder):
        self.pod = pod
        self.work = folder / "work"
        pod.stub = TRAINING

    def __call__(self, do, *flags, code=0):
        words = ["supervise", "configs/a.py", f"--workdir={self.work}", f"--config.do={do}"]
        return self.pod.tpu(*words, *flags, code=code)

    def starts(self):
        return (self.work / "starts").read_text().splitlines()

    def hold(self, then):
        """Lets a run stand still after its first step until `then` has happened; returns the thread that does it."""
        self.work.mkdir()
        (self.work / "hold").touch()

        def wait():
            wait_for(lambda: len([*self.work.glob("step-*")]) == 2)
            then()
            (self.work / "hold").unlink()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@pytest.fixture
def supervised(pod, tmp_path):
    pod.settings(price=3.5, queued=True)
    return Supervised(pod, tmp_path)


def in_order(text, *parts):
    at = 0
    for part in parts:
        assert part in text[at:], f"{part!r} is not there, or not in this order:\n{text}"
        at = text.index(part, at) + len(part)


@pytest.mark.standard
def test_a_pod_that_is_taken_away_is_made_again_and_the_run_goes_on(supervised):
    """Its quota comes back some time after it is deleted."""
    cloud = supervised.pod.cloud

    def chaos():
        cloud.add_fault("describe", "unavailable", times=2)
        cloud.add_fault("create", "quota")
        cloud.preempt("my-pod")

    thread = supervised.hold(chaos)
    said = supervised("5", "--down")
    thread.join()
    in_order(
        said, "the pod is ABSENT; creating one; 0.00 chip-hours", "attempt 1 started on 2 hosts",
        "The service is currently unavailable", "the pod is PREEMPTED", "; deleting it", "creating one",
        "Quota limit 'TPUPerZone' has been exceeded", "; again in 0 s", "attempt 2 started on 2",
        "attempt 2 ended with 0 on all 2 hosts; step 5; done; 0.0", " dollars",
    )  # fmt: skip
    deleted = "queued-resources delete"
    changes = [verb for verb in supervised.pod.verbs() if not verb.endswith((" ssh", "describe"))]
    assert changes == [
        "queued-resources create", deleted, *["queued-resources create"] * 2, deleted
    ]  # fmt: skip
    assert sorted(supervised.starts()) == ["1 0 from 0", "1 1 from 0", "2 0 from 1", "2 1 from 1"]


@pytest.mark.standard
def test_stock_outs_and_crashes_are_waited_for_as_long_as_patience_lasts(supervised):
    supervised.pod.settings()
    supervised.pod.cloud.add_fault("create", "stockout", times=2)
    said = supervised("2 then 9", "--patience=0.0005", code=1)
    in_order(
        said, "creating one", *("; again in 0 s", "creating one") * 2, "attempt 1 started",
        "ended with exit code 9", "step 2; starting", "attempt 2 started", "giving up after 0.0005 hours",
    )  # fmt: skip
    assert supervised.starts()[0] == "1 0 from 0" and "2 0 from 2" in supervised.starts()


@pytest.mark.standard
def test_ctrl_c_detaches_and_the_same_command_comes_back(supervised):
    thread = supervised.hold(lambda: os.kill(os.getpid(), signal.SIGINT))
    assert "python launch/tpu.py status a" in supervised("6", code=130)
    thread.join()
    in_order(supervised("6"), "attempt 1 ended with 0 on all 2 hosts")
    assert len(supervised.starts()) == 2


@pytest.mark.standard
def test_who_stops_a_run_stops_its_supervisor(supervised):
    import tpu

    thread = supervised.hold(lambda: tpu.main(["stop", "a"]))
    said = supervised("3", code=75)
    thread.join()
    assert "attempt 1 was ended by launch/tpu.py stop" in said
    in_order(supervised("3"), "nothing of this run is alive", "attempt 2 ended with 0")
