"""The supervisor: what it decides, in a table; and a run of the fake cloud that is taken away, crashes, and is done."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading

import pytest

from tests.fixtures_pods import LAUNCH, fake_cloud, wait_for

from pods import decision  # isort: skip
from pods.backend import Host, Pod  # isort: skip
from pods.causes import HostReport  # isort: skip
from pods.decision import Limits, Memory, Seen  # isort: skip
from pods.code import Code  # isort: skip
from pods.errors import PodError  # isort: skip
from pods.hosts import Hosts  # isort: skip
from pods.runs import Job, Look  # isort: skip
from pods.settings import Settings  # isort: skip
from pods.supervise import Ledger, Supervisor  # isort: skip

LIMITS = Limits(crashes=2, preemptions=2, silent=2, hang=100.0, settle=20.0)


def report(process, state="running", code=None, step=None, time=0.0, kind=None, by=None):
    ended = {"code": code, "signal": by, "ended": 50.0 + process} if state == "exited" else None
    progress = None if step is None else {"step": step, "phase": "step", "time": time}
    cause = kind and {"kind": kind, "time": 40.0 + process, "step": step, "phase": "step", "code": code, "what": "it"}
    return HostReport(process, f"w-{process}", state, ended, progress, cause or None)


def ended(*codes, attempt=1, **more):
    return look(*(report(i, "exited", code, **more) for i, code in enumerate(codes)), attempt=attempt)


def look(*reports, attempt=1, errors=()):
    return Look(attempt, reports, tuple(errors))


def ready(found, hosts=2, now=1000.0, **more):
    return Seen("READY", now, look=found, hosts=hosts, **more)


def decide(seen, **memory):
    action, after = decision.decide(seen, Memory(**{"attempt": 1, "held": True, "moved": 1000.0} | memory), LIMITS)
    assert action.why
    assert not action.why.endswith(".")
    return action, after


RUNS = look(report(0, step=5, time=1.0), report(1, step=5, time=1.0))
MARK = repr([1, (5, 1.0), (5, 1.0)])
ONE_SILENT = ended(134)  # of two hosts
DIFFERENT = look(report(0, "exited", 75), report(1, "exited", 1, kind="exception"))
KILLED = look(report(0, "exited", None, by=9), report(1, "exited", 134))

# name: (what is seen, what is remembered, action, code, what is remembered then)
TABLE = {
    "done": (ready(ended(0, 0)), {}, "done", 0, {}),
    "done, and the pod is gone since": (Seen("PREEMPTED", 1.0, look=ended(0, 0), hosts=2), {}, "done", 0, {}),
    "done on one host only is not done": (ready(look(report(0, "exited", 0), report(1))), {}, "wait", 0, {}),
    "not done while a host does not answer": (ready(ended(0)), {}, "wait", 0, {"silent": 1}),
    "no pod yet": (Seen("ABSENT", 1.0), {"held": False}, "create", 0, {"preemptions": 0}),
    "pod is being made": (Seen("CREATING", 1.0), {"held": False}, "wait", 0, {}),
    "pod waits in the queue": (Seen("WAITING", 1.0), {"held": False}, "wait", 0, {}),
    "cloud does not answer": (Seen("UNKNOWN", 1.0, "503"), {}, "wait", 0, {"preemptions": 0, "held": True}),
    "preempted": (Seen("PREEMPTED", 1.0), {}, "delete", 0, {"preemptions": 1, "gone": True, "held": False}),
    "preempted, counted already": (Seen("PREEMPTED", 1.0), {"preemptions": 1, "gone": True}, "delete", 0, {
        "preemptions": 1}),
    "suspended": (Seen("SUSPENDED", 1.0), {}, "delete", 0, {"preemptions": 1}),
    "failed while it was queued": (Seen("FAILED", 1.0), {"held": False}, "delete", 0, {"preemptions": 1}),
    "deleted behind our back": (Seen("ABSENT", 1.0), {}, "create", 0, {"preemptions": 1, "held": False}),
    "preempted too often": (Seen("PREEMPTED", 1.0), {"preemptions": 2}, "give up", 75, {"preemptions": 3}),
    "a new pod": (ready(look(report(0, "absent"), report(1, "absent"), attempt=0)), {"held": False}, "start", 0, {}),
    "ready, but hosts are missing": (Seen("READY", 1.0, "3 of 4"), {}, "wait", 0, {}),
    "runs": (ready(RUNS), {}, "wait", 0, {"step": 5, "moved": 1000.0, "mark": MARK}),
    "runs, and a host does not answer": (ready(look(report(0, step=5, time=1.0))), {"silent": 9}, "wait", 0, {
        "silent": 0}),
    "runs, and makes progress": (ready(RUNS, now=5000.0), {"mark": "old"}, "wait", 0, {"moved": 5000.0}),
    "stands still, not for long": (ready(RUNS, now=1100.0), {"mark": MARK}, "wait", 0, {"moved": 1000.0}),
    "hangs": (ready(RUNS, now=1101.0), {"mark": MARK}, "stop", 0, {"stopping": 1}),
    "hangs before its first step": (ready(look(report(0), report(1)), now=1101.0), {}, "stop", 0, {"stopping": 1}),
    "one has ended, the others will": (ready(look(report(0), report(1, "exited", 1))), {}, "wait", 0, {
        "mixed": 1000.0}),
    "one has ended, the others do not": (ready(look(report(0), report(1, "exited", 1)), now=1021.0), {
        "mixed": 1000.0}, "stop", 0, {"stopping": 1}),
    "hung and was stopped, and saved even so": (ready(ended(75, 75)), {"stopping": 1}, "start", 0, {
        "crashes": 1, "preemptions": 0}),
    "saved on all": (ready(ended(75, 75)), {"crashes": 1}, "start", 0, {"preemptions": 1, "crashes": 1, "judged": 1}),
    "saved, counted already": (ready(ended(75, 75)), {"preemptions": 1, "judged": 1}, "start", 0, {"preemptions": 1}),
    "saved too often": (ready(ended(75, 75)), {"preemptions": 2}, "give up", 75, {}),
    "saved on one, and crashed on the other": (ready(DIFFERENT), {}, "start", 0, {"crashes": 1, "preemptions": 0}),
    "stopped by a person": (ready(ended(75, 75), stopped=1), {}, "give up", 75, {"preemptions": 0}),
    "an older attempt was stopped": (ready(ended(75, 75, attempt=2), stopped=1), {"attempt": 2}, "start", 0, {
        "preemptions": 1}),
    "crashed": (ready(ended(1, 134)), {}, "start", 0, {"crashes": 1, "judged": 1}),
    "crashed, counted already": (ready(ended(1, 134)), {"crashes": 1, "judged": 1}, "start", 0, {"crashes": 1}),
    "crashed at the same place": (ready(ended(1, 1, step=7)), {"crashes": 1, "best": 7, "step": 7}, "start", 0, {
        "crashes": 2}),
    "crashed too often": (ready(ended(1, 1, step=7)), {"crashes": 2, "best": 7}, "give up", 1, {"crashes": 3}),
    "crashed, but further on": (ready(ended(1, 1, step=8)), {"crashes": 2, "best": 7}, "start", 0, {
        "crashes": 1, "best": 8}),
    "killed": (ready(KILLED), {"crashes": 2, "best": 7}, "give up", 137, {}),
    "bad config": (ready(ended(2, 134, kind="exception")), {}, "give up", 2, {"crashes": 0, "judged": 1}),
    "numerics": (ready(ended(3, 3, kind="exception")), {}, "give up", 3, {"crashes": 0}),
    "damage": (ready(ended(4, 134, kind="exception")), {}, "give up", 4, {"crashes": 0}),
    "ended before we came": (ready(ended(2, 2, attempt=3)), {"attempt": 0, "held": False}, "start", 0, {
        "judged": 3, "crashes": 0}),
    "an end that nobody saw": (ready(look(report(0, "lost"), report(1, "exited", 134))), {}, "start", 0, {
        "crashes": 1}),
    "one host is silent": (ready(ONE_SILENT), {"silent": 1}, "wait", 0, {"silent": 2, "preemptions": 0}),
    "one host is dead": (ready(ONE_SILENT), {"silent": 2}, "delete", 0, {"preemptions": 1, "crashes": 0}),
    "one host is dead, too often": (ready(ONE_SILENT), {"silent": 2, "preemptions": 2}, "give up", 75, {}),
    "one host is silent, the other says why": (ready(ended(2, kind="exception")), {"silent": 2}, "give up", 2, {}),
    "all hosts are silent": (ready(look()), {"silent": 11}, "wait", 0, {"silent": 12}),
    "all hosts are silent for long": (ready(look()), {"silent": 12}, "give up", 1, {"preemptions": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_is_decided(name):
    seen, memory, kind, code, then = TABLE[name]
    action, after = decide(seen, **memory)
    assert (action.kind, action.code) == (kind, code), action.why
    assert {key: getattr(after, key) for key in then} == then


def test_a_sentence_names_the_first_cause():
    action, _ = decide(ready(look(report(0, "exited", 134), report(1, "exited", 2, kind="exception"))))
    assert action.why.startswith("host 1 (w-1) failed at ")
    assert action.why.endswith("1 other ended after it: the config or its input is bad, which no restart mends")


def test_a_pod_that_is_never_there_spends_the_budget():
    """A queued resource that is suspended before it was ready, again and again."""
    memory, kinds = Memory(), []
    for state in ["ABSENT", "WAITING", "SUSPENDED", "SUSPENDED"] * 3:
        action, memory = decision.decide(Seen(state, 1.0), memory, LIMITS)
        kinds.append(action.kind)
    assert kinds == ["create", "wait", "delete", "delete"] * 2 + ["create", "wait", "give up", "delete"]
    assert decision.given_up(memory).preemptions == 0


def test_memory_goes_through_json():
    _, memory = decide(ready(RUNS))
    assert Memory(**json.loads(json.dumps(dataclasses.asdict(memory)))) == memory


def test_cost_is_that_of_all_pods_while_they_are_ready():
    ledger = Ledger(16, 2.0, [])
    for now, state in [(0, "CREATING"), (100, "READY"), (1900, "UNKNOWN"), (2800, "READY"), (3700, "PREEMPTED")]:
        ledger.note(state, now)
    ledger.note("ABSENT", 5000)
    assert ledger.text(9999) == "16.00 chip-hours so far, 32.00 dollars"
    ledger.note("READY", 10000)
    assert Ledger(16, 0.0, json.loads(json.dumps(ledger.spans))).text(13600) == (
        "32.00 chip-hours so far, price unknown"
    )


def supervisor(said):
    job = Job("a", ("train",), (), Code("0" * 64, b"", "0" * 40, "", frozenset()))
    chosen = Settings("pod", "p", "us-central2-b", "v4-8")
    return Supervisor(chosen, None, None, job, LIMITS, every=10.0, tell=said.append, clock=lambda: 0.0)


def test_what_waiting_mends_is_waited_for_longer_and_longer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = supervisor(said := [])
    waits = []
    for _ in range(9):
        one._refuse(PodError("no more capacity.", "stockout"))
        waits.append(one.pause())
    assert waits == [20, 40, 80, 160, 320, 640, 900, 900, 900]
    assert said[0].endswith("no more capacity; again in 20 s")
    one.tries = 0
    for _ in range(7):
        one._refuse(PodError("host 3: the device is held.", "hosts"))
    with pytest.raises(PodError, match="held"):
        one._refuse(PodError("host 3: the device is held.", "hosts"))
    for kind in ("quota", "permission", "settings", "login"):
        with pytest.raises(PodError, match="why"):
            supervisor([])._refuse(PodError("why.", kind))


def test_one_supervisor_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with supervisor([])._only_one(), pytest.raises(PodError, match="supervised already"):
        supervisor([]).run()


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
    one = supervisor([])
    pod = Pod("pod", "READY", (Host(0, "x"), Host(1, "y")))
    monkeypatch.setattr("pods.supervise.connect", lambda *_: Hosts(one.settings, None, None, pod))
    monkeypatch.setattr("pods.runs.look", lambda *_: ended(75, 75))
    assert one._see_hosts(pod, 0.0).stopped == 0, "who supervises it after that wants it to go on"
    file.write_text('{"attempt": 2}')
    assert one._see_hosts(pod, 0.0).stopped == 2


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
    time.sleep(0.1)
    while (work / "hold").exists():
        time.sleep(0.1)
sys.exit(int(code or 0))
"""


class Supervised:
    """A pod, a run of TRAINING, and its supervisor."""

    def __init__(self, pod, folder):
        self.pod, self.work = pod, folder / "work"
        fake_cloud().settings(pod.state, env={"STUB": TRAINING, "PATH": f"{pod.bin}:/usr/bin:/bin"})

    def argv(self, do, *flags, kind="v4-8"):
        return [
            "supervise", "configs/a.py", "--id=a", f"--workdir={self.work}", f"--config.do={do}", "--every=0.2",
            f"--accelerator-type={kind}", "--price=3.5", *flags,
        ]  # fmt: skip

    def __call__(self, do, *flags, code=0, **more):
        return self.pod.tpu(*self.argv(do, *flags, **more), code=code)

    def starts(self):
        return (self.work / "starts").read_text().splitlines() if (self.work / "starts").exists() else []

    def cloud_calls(self):
        words = [call for call in self.pod.calls() if call[3] not in ("ssh", "scp", "describe")]
        return [f"{call[2]} {call[3]}{' --force' if '--force' in call else ''}" for call in words]


@pytest.fixture
def supervised(pod, tmp_path):
    return Supervised(pod, tmp_path)


def in_order(text, *parts):
    at = 0
    for part in parts:
        assert part in text[at:], f"{part!r} is not there, or not in this order:\n{text}"
        at = text.index(part, at) + len(part)


def test_a_pod_that_is_taken_away_is_made_again_and_the_run_goes_on(supervised):
    state = supervised.pod.state
    cloud = fake_cloud()
    cloud.settings(state, queue_describes=0, retry_seconds=0)
    (supervised.work).mkdir()
    (supervised.work / "hold").touch()

    def chaos():
        wait_for(lambda: (supervised.work / "step-1").exists(), 60)
        cloud.add_fault(state, "describe", "unavailable", times=2)
        cloud.preempt(state, "my-pod")
        (supervised.work / "hold").unlink()

    thread = threading.Thread(target=chaos)
    thread.start()
    said = supervised("5", "--spot", "--queued", kind="v4-16")
    thread.join()
    in_order(
        said, "there is no pod; creating one; 0.00 chip-hours so far, 0.00 dollars", "nothing of this run is on the",
        "attempt 1 started on 2 hosts", "the cloud can't be asked",
        "the pod is SUSPENDED, preemption 1 of 100; deleting it, with force", "creating one", "attempt 2 started on 2",
        "attempt 2 ended with 0 on all 2 hosts, step 5; done; 0.0", " dollars",
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


def test_what_no_restart_mends_is_not_tried_again(supervised):
    said = supervised("1 then 2", code=2)
    assert "ended with exit code 2" in said
    assert "which no restart mends" in said
    assert supervised.starts() == ["1 0 from 0"]


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
    assert process.wait(30) == 0
    assert "detached; the run goes on" in "".join(lines)
    assert "python launch/tpu.py status a" in lines[-1]
    process.stderr.close()
    (supervised.work / "hold").unlink()
    in_order(supervised("6"), "attempt 1 ended with 0 on all 1 hosts")
    assert supervised.starts() == ["1 0 from 0"]


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
