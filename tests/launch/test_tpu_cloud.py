"""up, down, clean: a pod is asked for once, waited for, given back, and what gcloud refuses is told in clear words."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from pods import backend, gcloud
from pods.backend import PodError

from tests.launch.host_folder import LAUNCH, alive, wait_for
from tests.launch.pod import NODE, PLACE

REQUEST = ("--accelerator-type=v4-16", "--runtime-version=tpu-ubuntu2204-base")
UP = ("up", "--every=0.01")


def resources(pod) -> list[str]:
    return sorted(
        path.stem for kind in ("nodes", "queued") for path in (pod.state / f"{kind}.d").iterdir()
    )


def test_up_is_idempotent(pod):
    said = pod.tpu(*UP, "--price=2")
    assert "v4-16 in us-central2-b" in said and "8 chips on 2 hosts, 16.00 dollars an hour" in said
    assert "creating" not in pod.tpu(*UP)
    assert pod.verbs().count("tpu-vm create") == 1


def test_up_waits_for_a_lost_network(pod, monkeypatch):
    pod.cloud.add_fault("tpu-vm create", "unavailable")
    assert "UNAVAILABLE: The service is currently unavailable" in pod.tpu(*UP)
    assert pod.verbs().count("tpu-vm create") == 2
    pod.tpu("down")
    before = pod.verbs()
    outcomes = iter([backend.Pod("my-pod", "ACCEPTED"), PodError("can't be reached.", "network")])

    def describe(self):
        outcome = next(
            outcomes,
            backend.Pod("my-pod", "READY", (backend.Host(0, "10.0.0.1"),), reason="UNWELL"),
        )
        if isinstance(outcome, PodError):
            raise outcome
        return outcome

    monkeypatch.setattr(gcloud.TpuVm, "describe", describe)
    said = pod.tpu(*UP)
    assert "can't be reached" in said and said.count("my-pod is ACCEPTED") == 1 and "UNWELL" in said
    assert pod.verbs() == before, "somebody else has asked for it"
    outcomes = iter([PodError("can't be reached.", "network")])
    pod.tpu("up", code=1)


def test_up_does_not_make_again_and_again_what_fails(pod, monkeypatch):
    failed = backend.Pod("my-pod", "FAILED", request="my-pod", reason="its quota")
    looks = iter([failed, backend.Pod("my-pod", "ABSENT")])
    calls = []
    monkeypatch.setattr(gcloud.TpuVm, "describe", lambda self: next(looks, failed))
    monkeypatch.setattr(gcloud.TpuVm, "delete", lambda self, pod: calls.append("delete"))
    monkeypatch.setattr(gcloud.TpuVm, "create", lambda self: calls.append("create"))
    assert "FAILED: its quota" in pod.tpu(*UP, "--recreate", code=1)
    assert calls == ["delete", "create"]


def test_what_is_deleted_in_vain_is_not_deleted_at_once_again(pod, monkeypatch):
    gone = backend.Pod("my-pod", "UNKNOWN")
    begin = time.monotonic()
    looks = iter([gone, gone, gone, backend.Pod("my-pod", "READY")])
    calls = []
    monkeypatch.setattr(gcloud.TpuVm, "describe", lambda self: next(looks))
    monkeypatch.setattr(
        gcloud.TpuVm, "delete", lambda self, pod: calls.append(time.monotonic() - begin)
    )
    pod.tpu("up", "--every=0.3", "--recreate")
    assert len(calls) == 3 and calls[1] - calls[0] > 0.2 and calls[2] - calls[1] > 0.5


def test_another_pod_of_that_name_is_not_taken_for_ours(pod):
    pod.tpu(*UP)
    said = pod.tpu("up", "--accelerator-type=v4-8", code=2)
    assert "v4-16" in said and "pod.toml says v4-8" in said
    assert "should have 8 hosts (v4-64), but 2" in pod.tpu(
        "status", "--accelerator-type=v4-64", code=1
    )


def test_preempted_without_a_queue(pod):
    pod.tpu(*UP)
    pod.cloud.preempt("my-pod")
    assert "my-pod is PREEMPTED" in pod.tpu("up", code=1)
    said = pod.tpu(*UP, "--recreate")
    assert said.index("deleting it") < said.index("creating my-pod") < said.index("my-pod is ready")
    assert "deleted TPU VM my-pod" in pod.tpu("down")
    assert "nothing named my-pod" in pod.tpu("down")


def test_clean_leaves_what_is_not_ours(pod):
    pod.cloud.add_fault("queued-resources create", "failed", times=2)
    pod.tpu(*UP, "--queued", code=1)
    pod.by_hand("queued-resources", "create", "a-colleagues", "--node-id=a-colleagues", *REQUEST)
    while "FAILED" not in pod.by_hand(
        "queued-resources", "describe", "a-colleagues", "--format=json"
    ):
        pass
    said = pod.tpu("clean")
    assert "deleted queued resource my-pod" in said and "a-colleagues is FAILED" in said
    assert resources(pod) == ["a-colleagues"]
    pod.tpu(*UP, "--queued")
    pod.tpu("clean")
    assert resources(pod) == ["a-colleagues", "my-pod", "my-pod"], "what runs stays"


@pytest.mark.standard
@pytest.mark.parametrize("queued", [False, True])
def test_a_pod_that_up_has_not_made_is_used_and_never_deleted(pod, queued):
    """By a colleague, or in the console; through the queue, with a request of another name."""
    pod.commit()
    pod.cloud.settings(creating_describes=0, queue_describes=0, env={"STUB": "sys.exit(0)"})
    if queued:
        pod.by_hand("queued-resources", "create", "request", "--node-id=my-pod", *REQUEST)
        while "ACTIVE" not in pod.by_hand(
            "queued-resources", "describe", "request", "--format=json"
        ):
            pass
        assert "set name to that" in pod.tpu("status", "--name=request", code=2)
    else:
        pod.by_hand("tpu-vm", "create", "my-pod", *NODE)
    other = f"--{'no-' if queued else ''}queued"  # than it was made
    for command in ("up", "sync", "preflight"):
        pod.tpu(command, other)
    assert "exit code 0" in pod.tpu("run", "configs/a.py", "--every=0.05", other)
    before = resources(pod)
    said = pod.tpu("down", code=1)
    assert (
        f"gcloud compute tpus {'queued-resources delete --force request' if queued else 'tpu-vm delete my-pod'}"
        in said
    )
    pod.cloud.preempt("my-pod")
    assert "up --recreate" in pod.tpu("up", code=1)
    pod.tpu("clean")
    assert resources(pod) == before and "delete" not in " ".join(pod.verbs())


@pytest.mark.standard
@pytest.mark.parametrize("is_gone", [False, True])
def test_our_pod_by_a_request_of_another_name_goes_with_its_request(pod, is_gone):
    """Or, where that is gone already, by itself; nothing is called deleted that was not there."""
    pod.cloud.settings(creating_describes=0, queue_describes=0)
    label = f"--labels=mlm-made-by={gcloud.label_of(pod.cloud.account)}"
    pod.by_hand("queued-resources", "create", "request", "--node-id=my-pod", label, *REQUEST)
    while "ACTIVE" not in pod.by_hand("queued-resources", "describe", "request", "--format=json"):
        pass
    if is_gone:
        pod.cloud.save("queued", "request", None)
    pod.cloud.preempt("my-pod")
    said = pod.tpu(*UP, "--recreate")
    assert (
        f"deleted {'TPU VM my-pod' if is_gone else 'queued resource request'}" in said
        and said.count("deleted") == 1
    )
    assert resources(pod) == ["my-pod"] and "my-pod is ready" in said


@pytest.mark.standard
def test_a_pod_of_another_account_is_a_strangers(pod):
    """Both may be called root on their machines."""
    pod.cloud.account = "Some.One@x.org"
    pod.tpu(*UP)
    node = json.loads((pod.state / "nodes.d" / "my-pod.json").read_text())
    assert re.fullmatch("some-one-x-org-[0-9a-f]{8}", node["labels"]["mlm-made-by"])
    # a label has no letters for each of these
    for other in ("another@x.org", "some-one@x.org", "Some.One@x-org"):
        pod.cloud.account = other
        assert "was not made by your `up`" in pod.tpu("down", code=1)
    pod.cloud.account = "Some.One@x.org"
    assert "deleted TPU VM my-pod" in pod.tpu("down")
    pod.cloud.account = ""
    assert "gcloud auth login" in pod.tpu(*UP, code=1)


def test_a_stopped_pod_is_started_again(pod):
    pod.tpu(*UP)
    pod.cloud.stop("my-pod")
    assert "my-pod is STOPPED, not ready: launch/tpu.py up" in pod.tpu("sync", code=1)
    said = pod.tpu(*UP)
    assert (
        said.index("my-pod is STOPPED")
        < said.index("my-pod is STARTING")
        < said.index("my-pod is ready")
    )
    assert pod.verbs().count("tpu-vm start") == 1 and "tpu-vm delete" not in pod.verbs()


def test_flags_that_gcloud_does_not_take(pod):
    said = pod.tpu("up", "--create-flags=--provisioning=flex-start", "--name=other", code=2)
    assert "refuses the flags of tpu-vm create" in said and "--provisioning=flex-start" in said
    pod.tpu(*UP)
    said = pod.tpu("sync", "--ssh-flags=--bogus=1", code=2)
    assert "refuses the flags of ssh" in said and "--bogus=1" in said


@pytest.mark.standard
def test_no_gcloud(pod, monkeypatch):
    monkeypatch.setenv("PATH", str(pod.repository))
    assert "gcloud can't be started (No such file or directory)" in pod.tpu("up", code=2)


@pytest.mark.standard
def test_a_file_in_the_way_is_named(pod):
    """Where a command needs a file here: the way to the hosts can be found again."""
    pod.commit()
    pod.tpu(*UP)
    (pod.repository / "runs").touch()
    assert "tpu supervise: runs/pods/a: Not a directory\n" in pod.tpu(
        "supervise", "configs/a.py", code=1
    )
    pod.tpu("status")
    pod.cloud.add_fault("tpu-vm ssh", "ssh255_before", match="preflight", times=6)
    assert "host 0 (127.0.0.1): ssh failed" in pod.tpu("status", code=1)


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "1e12", "x"])
def test_seconds_that_nobody_can_wait_for(pod, seconds):
    for words in (("up", "--every"), ("status", "--timeout"), ("stop", "a", "--grace")):
        with pytest.raises(SystemExit) as end:
            pod.tpu(*words[:-1], f"{words[-1]}={seconds}")
        assert end.value.code == 2 and words[-1] in pod.capsys.readouterr().err


@pytest.mark.standard
def test_sigterm_ends_the_call_to_gcloud_too(tmp_path):
    number = tmp_path / "number"
    (tmp_path / "gcloud").write_text('#!/bin/sh\necho $$ > "${0%/*}/number"\nexec sleep 60\n')
    (tmp_path / "gcloud").chmod(0o755)
    argv = [
        sys.executable,
        LAUNCH / "tpu.py",
        "status",
        "--name=my-pod",
        "--accelerator-type=v4-16",
        *PLACE,
    ]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(argv, cwd=tmp_path, env={**os.environ, "PATH": path}) as process:
        child = int(wait_for(lambda: number.exists() and number.read_text()))
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    wait_for(lambda: not alive(child))
