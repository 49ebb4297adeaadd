"""up, down, clean: a pod is asked for once, waited for, given back, and what gcloud refuses is told in clear words."""

import json

import pytest
from pods import backend, gcloud, settings
from pods.errors import PodError

from tests.launch.pod import NODE, by_hand, fake_cloud

REQUEST = ("--accelerator-type=v4-16", "--runtime-version=tpu-ubuntu2204-base")


def verbs(pod) -> list[str]:
    return [" ".join(call[2:4]) for call in pod.calls()]


def resources(pod) -> list[str]:
    return sorted(path.stem for kind in ("nodes", "queued") for path in (pod.state / f"{kind}.d").iterdir())


@pytest.mark.standard
def test_up_is_idempotent(pod):
    said = pod.tpu("up", "--every=0.01", "--price=2")
    assert "creating my-pod: v4-16 in us-central2-b, on demand" in said
    assert "my-pod is ready: v4-16, 8 chips on 2 hosts, 16.00 dollars an hour" in said
    said = pod.tpu("up", "--every=0.01")
    assert "creating" not in said and "is ready" in said
    assert verbs(pod).count("tpu-vm create") == 1


@pytest.mark.standard
def test_up_through_the_queue(pod):
    said = pod.tpu("up", "--every=0.01", "--queued", "--spot")
    assert "spot, queued" in said and "my-pod is WAITING (ACCEPTED), 0 min so far" in said
    create = next(call for call in pod.calls() if call[3] == "create")
    assert create[2] == "queued-resources" and {"--spot", "--node-id=my-pod"} <= set(create)
    pod.tpu("up", "--every=0.01", "--queued", "--spot")
    assert verbs(pod).count("queued-resources create") == 1
    assert "deleted queued resource my-pod" in pod.tpu("down", "--queued")
    assert not list((pod.state / "nodes.d").iterdir()) and not list((pod.state / "queued.d").iterdir())


@pytest.mark.standard
def test_up_waits_for_what_somebody_else_has_asked_for(pod):
    pod.fault("describe", "unavailable", times=0)
    pod.tpu("up", "--every=0.01")
    node = (pod.state / "nodes.d" / "my-pod.json").read_text()
    (pod.state / "nodes.d" / "my-pod.json").write_text(
        node.replace('"READY"', '"CREATING"').replace('"_left": -1', '"_left": 2')
    )
    assert "my-pod is CREATING" in pod.tpu("up", "--every=0.01")
    assert verbs(pod).count("tpu-vm create") == 1


def test_up_waits_for_a_lost_network(pod, monkeypatch):
    outcomes = iter([backend.Pod("my-pod", "WAITING", detail="ACCEPTED"), PodError("can't be reached.", "network")])

    def describe(self):
        outcome = next(outcomes, backend.Pod("my-pod", "READY", (backend.Host(0, "10.0.0.1"),), reason="UNWELL"))
        if isinstance(outcome, PodError):
            raise outcome
        return outcome

    monkeypatch.setattr(gcloud.TpuVm, "describe", describe)
    said = pod.tpu("up", "--every=0.01")
    assert "can't be reached. It is asked again in 0.01 s." in said and said.count("my-pod is WAITING (ACCEPTED)") == 1
    assert "my-pod is ready" in said and "UNWELL" in said
    outcomes = iter([PodError("can't be reached.", "network")])
    pod.tpu("up", code=1)


@pytest.mark.standard
def test_up_asks_again_for_what_the_network_lost(pod):
    pod.fault("tpu-vm create", "unavailable")
    said = pod.tpu("up", "--every=0.01")
    assert "Google Cloud can't be reached: check this machine's network" in said and "my-pod is ready" in said
    assert verbs(pod).count("tpu-vm create") == 2


def test_alpha_is_told_that_a_queued_spot_pod_is_one(pod, monkeypatch):
    calls = []
    monkeypatch.setattr(gcloud.TpuVm, "_gcloud", lambda self, *words, **more: calls.append(words) or "")
    for track, queued in (("alpha", True), ("alpha", False), ("", True)):
        chosen = settings.Settings("n", "p", "z", "v4-8", spot=True, queued=queued, track=track)
        gcloud.TpuVm(chosen, backend.Runner()).create()
    assert ["--provisioning-model=spot" in words for words in calls] == [True, False, False]
    assert all("--spot" in words for words in calls)


@pytest.mark.standard
def test_another_pod_of_that_name_is_not_taken_for_ours(pod):
    pod.tpu("up", "--every=0.01")
    assert "it is a v4-16, and pod.toml says v4-8" in pod.tpu("up", "--accelerator-type=v4-8", code=2)
    said = pod.tpu("status", "--accelerator-type=v4-64", code=1)
    assert "my-pod should have 8 hosts (v4-64), but 2 hosts are there" in said


@pytest.mark.standard
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stockout", "us-central2-b has no v4-16 to give right now: try another zone, set queued = true"),
        ("quota", "the quota of my-project for v4-16 in us-central2-b is used up"),
        ("permission", "zone = us-central2-b is misspelt, or my-project may not use it"),
        ("internal", "Google Cloud failed internally (code 13): try again in some minutes; if it stays so, the TPU"),
    ],
)
def test_refusals_in_clear_words(pod, fault, words):
    pod.fault("tpu-vm create", fault)
    said = pod.tpu("up", "--every=0.01", code=2 if fault == "permission" else 1)
    assert words in said and said.count("\n") <= 2
    pod.tpu("up", "--every=0.01")  # and nothing is in its way later


def test_states_of_gcloud():
    cloud = gcloud.TpuVm(settings.Settings("n", "p", "z", "v4-8"), backend.Runner())
    nodes = {"TERMINATED": "PREEMPTED", "STOPPED": "STOPPED", "STARTING": "BUSY", "REPAIRING": "BUSY", "READY": "READY"}
    assert {state: cloud._node({"state": state}).state for state in nodes} == nodes
    requests = {"SUSPENDING": "SUSPENDED", "FAILED": "FAILED", "PROVISIONING": "CREATING", "ACCEPTED": "WAITING"}
    assert {state: cloud._request({"state": {"state": state}}).state for state in requests} == requests


def test_no_gcloud(pod, monkeypatch):
    monkeypatch.setenv("PATH", str(pod.repository))
    assert "gcloud can't be started (No such file or directory): it has to be on this machine's PATH" in pod.tpu(
        "up", code=1
    )


@pytest.mark.standard
def test_a_pod_that_will_not_come_back(pod):
    pod.tpu("up", "--every=0.01", "--queued")
    pod.preempt()
    said = pod.tpu("up", "--queued", code=1)
    assert "my-pod is PREEMPTED; it won't come back, but counts against the quota" in said
    assert "my-pod is PREEMPTED" in pod.tpu("sync", "--queued", code=1)
    said = pod.tpu("clean", "--queued")
    assert "deleted queued resource my-pod" in said
    assert "--force" in next(call for call in pod.calls() if call[3] == "delete")
    pod.tpu("up", "--every=0.01", "--queued")


@pytest.mark.standard
def test_preempted_without_a_queue(pod):
    pod.tpu("up", "--every=0.01")
    pod.preempt()
    assert "my-pod is PREEMPTED" in pod.tpu("up", code=1)
    said = pod.tpu("up", "--every=0.01", "--recreate")
    assert "my-pod is PREEMPTED; deleting it, with force\ncreating my-pod" in said and "my-pod is ready" in said
    assert "deleted TPU VM my-pod" in pod.tpu("down")
    assert "there is nothing named my-pod in us-central2-b" in pod.tpu("down")


@pytest.mark.standard
def test_clean_leaves_what_is_not_ours(pod):
    pod.fault("queued-resources create", "failed", times=2)
    pod.tpu("up", "--every=0.01", "--queued", code=1)
    by_hand(pod, "queued-resources", "create", "a-colleagues", "--node-id=a-colleagues", *REQUEST)
    while "FAILED" not in by_hand(pod, "queued-resources", "describe", "a-colleagues", "--format=json"):
        pass
    said = pod.tpu("clean")
    assert "deleted queued resource my-pod" in said
    assert "a-colleagues is FAILED and only uses up quota, but your `up` has not made it: it is left as it is" in said
    assert resources(pod) == ["a-colleagues"]


@pytest.mark.standard
@pytest.mark.parametrize("queued", [False, True])
def test_a_pod_that_up_has_not_made_is_used_and_never_deleted(pod, queued):
    """By a colleague, or in the console; through the queue, with a request of another name."""
    fake_cloud().settings(pod.state, creating_describes=0, queue_describes=0, env=pod.ports)
    if queued:
        by_hand(pod, "queued-resources", "create", "request", "--node-id=my-pod", *REQUEST)
        while "ACTIVE" not in by_hand(pod, "queued-resources", "describe", "request", "--format=json"):
            pass
        assert "set name to that" in pod.tpu("status", "--name=request", code=1)
    else:
        by_hand(pod, "tpu-vm", "create", "my-pod", *NODE)
    other = f"--{'no-' * queued}queued"  # than it was made
    assert "my-pod is ready" in pod.tpu("up", other)
    pod.tpu("sync", other)
    assert "ready: 2 hosts" in pod.tpu("preflight", other)
    run = ("run", "configs/a.py", "--command=train", "--id=a", "--workdir=/w", "--detach", other)
    assert "run 'a', attempt 1: started on 2 hosts" in pod.tpu(*run)
    pod.tpu("logs", "a", "--every=0.05", other)
    assert pod.tpu("status", "a", other).count("exited, exit code 0") == 2
    assert pod.tpu("stop", "a", other).count("exited, exit code 0") == 2
    before = resources(pod)
    said = pod.tpu("down", code=1)
    assert "my-pod was not made by your `up`, so it is left as it is" in said
    command = said.partition("all the same: gcloud compute tpus ")[2].strip().removesuffix(".")
    assert command.startswith("queued-resources delete --force my-pod" if queued else "tpu-vm delete my-pod")
    pod.preempt()
    assert "up --recreate deletes it" in pod.tpu("up", code=1)
    pod.tpu("clean")
    assert resources(pod) == before and "delete" not in " ".join(verbs(pod))


@pytest.mark.standard
def test_a_pod_of_another_person_is_a_strangers(pod, monkeypatch):
    monkeypatch.setenv("LOGNAME", "Some.One")
    pod.tpu("up", "--every=0.01")
    node = json.loads((pod.state / "nodes.d" / "my-pod.json").read_text())
    assert node["labels"] == {"mlm-made-by": "some-one"}
    monkeypatch.setenv("LOGNAME", "another")
    assert "was not made by your `up`" in pod.tpu("down", code=1)
    monkeypatch.setenv("LOGNAME", "Some.One")
    assert "deleted TPU VM my-pod" in pod.tpu("down")


@pytest.mark.standard
def test_a_stopped_pod_is_started_again(pod):
    pod.tpu("up", "--every=0.01")
    fake_cloud().stop(pod.state, "my-pod")
    assert "my-pod is STOPPED, not ready: launch/tpu.py up" in pod.tpu("sync", code=1)
    said = pod.tpu("up", "--every=0.01")
    assert "my-pod is STOPPED; starting it" in said and "my-pod is ready" in said
    assert "my-pod is BUSY (STARTING), 0 min so far" in said
    assert verbs(pod).count("tpu-vm start") == 1 and "tpu-vm delete" not in verbs(pod)


@pytest.mark.standard
def test_flags_for_gcloud_are_passed_on(pod):
    flags = ["--create-flags=--labels=team=a,cost=b", "--create-flags=--internal-ips", "--create-flags=--subnetwork=s"]
    flags += ["--user=someone", "--ssh-flags=--ssh-key-file=/k y", "--ssh-flags=--ssh-flag=-C -q"]
    pod.tpu("up", "--every=0.01", *flags)
    create = next(call for call in pod.calls() if call[3] == "create")
    assert {"--internal-ips", "--subnetwork=s"} <= set(create)
    (labels,) = (word for word in create if word.startswith("--labels"))
    assert labels.startswith("--labels=mlm-made-by=") and labels.endswith(",team=a,cost=b")
    pod.tpu("sync", *flags)
    (first,) = (call for call in pod.calls() if call[3] == "ssh" and "--worker=0" in call)
    assert {"someone@my-pod", "--ssh-key-file=/k y", "--ssh-flag=-C -q", "--command=true"} <= set(first)
    said = pod.tpu("sync", "--track=alpha", "--ssh-flags=--tunnel-through-iap", *flags, "--dry-run")
    copy = next(line for line in said.splitlines() if "host.py unpack" in line)
    assert copy.startswith("gcloud alpha compute tpus tpu-vm ssh someone@my-pod ")
    assert "--tunnel-through-iap" in copy and "--ssh-key-file" in copy and "'--ssh-flag=-C -q'" in copy
    said = pod.tpu("up", "--create-flags=--provisioning=flex-start", "--name=other", code=2)
    assert "gcloud refuses the flags of tpu-vm create" in said and "--provisioning=flex-start" in said


def test_interrupted_gcloud_is_no_answer(pod, monkeypatch):
    monkeypatch.setattr(gcloud, "ASK", 0.2)
    slow = pod.repository / "bin"
    slow.mkdir()
    (slow / "gcloud").write_text("#!/bin/sh\nsleep 20\n")
    (slow / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow}:/usr/bin:/bin")
    with pytest.raises(PodError, match=r"gcloud tpu-vm describe gave no answer within 0 s") as error:
        gcloud.TpuVm(settings.Settings("n", "p", "z", "v4-8"), backend.Runner())._gcloud(
            "tpu-vm", "describe", "n", timeout=0.3
        )
    assert error.value.kind == "network"
