"""up, down, and the way to the hosts: a pod is asked for once, waited for, given back, and found by ssh."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from pods import backend, gcloud, lifetime
from pods.backend import Host, Pod, PodError

from tests.launch import LAUNCH
from tests.launch.pod import alive, wait_for


def test_up_is_idempotent_and_down_deletes(pod):
    pod.settings(price=2.0)
    pod.cloud.add_fault("create", "unavailable")
    said = pod.tpu("up")
    assert "UNAVAILABLE: The service is currently unavailable" in said
    assert "v4-16 in us-central2-b" in said and "8 chips on 2 hosts, 16.00 dollars an hour" in said
    assert "creating" not in pod.tpu("up")
    assert pod.verbs().count("tpu-vm create") == 2
    pod.settings(accelerator_type="v4-64")
    assert "should have 8 hosts by its accelerator_type, and has 2" in pod.tpu(
        "status", "a", code=1
    )
    pod.settings()
    assert "deleted TPU VM my-pod" in pod.tpu("down")
    assert "nothing named my-pod" in pod.tpu("down")


def test_what_is_gone_is_deleted_once_and_made_again(pod):
    pod.tpu("up")
    pod.cloud.preempt("my-pod")
    assert "my-pod is PREEMPTED, not ready" in pod.tpu("sync", code=1)
    said = pod.tpu("up")
    assert said.index("deleting it") < said.index("creating my-pod") < said.index("my-pod is ready")
    pod.tpu("down")
    pod.settings(queued=True, spot=True)
    pod.cloud.add_fault("create", "failed")
    assert "FAILED: RESOURCE_EXHAUSTED: Insufficient reserved" in pod.tpu("up", code=1)
    assert pod.verbs().count("queued-resources create") == 1, "not again and again"


def test_what_is_deleted_in_vain_is_not_deleted_at_once_again(pod, monkeypatch):
    gone = Pod("my-pod", "UNKNOWN")
    looks = iter(
        [gone, gone, gone, Pod("my-pod", "READY", (Host(0, "10.0.0.1"),), reason="UNWELL")]
    )
    calls = []
    monkeypatch.setattr(lifetime, "EVERY", 0.3)
    monkeypatch.setattr(gcloud.TpuVm, "describe", lambda self: next(looks))
    monkeypatch.setattr(gcloud.TpuVm, "delete", lambda self, pod: calls.append(time.monotonic()))
    assert "UNWELL" in pod.tpu("up")
    assert len(calls) == 3 and calls[1] - calls[0] > 0.2


def test_a_creation_without_an_answer_may_have_been_one(pod, monkeypatch):
    def create(self, created=gcloud.TpuVm.create):
        created(self)
        raise PodError("gcloud tpu-vm create gave no answer in time.", "network")

    monkeypatch.setattr(gcloud.TpuVm, "create", create)
    assert "my-pod is ready" in pod.tpu("up")
    assert pod.verbs().count("tpu-vm create") == 1


def test_a_pod_that_a_person_has_stopped_is_not_waited_for(pod):
    pod.tpu("up")
    pod.cloud.nodes["my-pod"]["state"] = "STOPPED"
    start = "STOPPED; to start it: gcloud compute tpus tpu-vm start my-pod --project=my-project"
    assert start in pod.tpu("up", code=1)
    assert start in pod.tpu("supervise", "configs/a.py", code=1)


@pytest.mark.parametrize("queued", [False, True])
def test_a_pod_that_up_has_not_made_is_used_and_never_deleted(pod, queued):
    """By a colleague's account, who may be called root as we are; through the queue, by a request of another name."""
    pod.settings(queued=queued)
    pod.cloud.account = "Some.One@x.org"
    pod.tpu("up")
    if queued:
        pod.cloud.queued["request"] = pod.cloud.queued.pop("my-pod")
        pod.cloud.nodes["my-pod"]["queuedResource"] = (
            "projects/p/locations/z/queuedResources/request"
        )
        pod.settings(name="request")
        assert "set name to that" in pod.tpu("down", code=2)
        pod.settings()
    assert re.fullmatch(
        "some-one-x-org-[0-9a-f]{8}", pod.cloud.nodes["my-pod"]["labels"]["mlm-made-by"]
    )
    pod.cloud.account = "some-one@x.org"  # a label has no letters for the difference
    pod.tpu("up")
    what = "queued-resources delete --force request" if queued else "tpu-vm delete my-pod"
    assert f"gcloud compute tpus {what} --project=my-project" in pod.tpu("down", code=1)
    pod.cloud.preempt("my-pod")
    assert what in pod.tpu("up", code=1)
    assert "delete" not in " ".join(pod.verbs())
    pod.cloud.account = "Some.One@x.org"
    said = pod.tpu("down")
    assert f"deleted {'queued resource request' if queued else 'TPU VM my-pod'}" in said
    assert said.count("deleted") == 1 and not pod.cloud.nodes


def test_a_pod_whose_request_is_gone_is_deleted_by_itself(pod):
    """Nothing is called deleted that was not there."""
    pod.settings(queued=True)
    pod.tpu("up")
    pod.cloud.queued.clear()
    pod.cloud.nodes["my-pod"]["queuedResource"] = "projects/p/locations/z/queuedResources/request"
    said = pod.tpu("down")
    assert "deleted TPU VM my-pod" in said and said.count("deleted") == 1


@pytest.mark.standard
def test_without_an_account_or_gcloud(pod, monkeypatch):
    pod.cloud.account = ""
    assert "gcloud auth login" in pod.tpu("up", code=1)
    monkeypatch.setattr(backend, "run", pod.real)
    monkeypatch.setenv("PATH", str(pod.repository))
    assert "gcloud can't be started (No such file or directory)" in pod.tpu("up", code=2)


@pytest.mark.standard
def test_sigterm_ends_the_call_to_gcloud_too(tmp_path, pod):
    number = tmp_path / "number"
    (tmp_path / "gcloud").write_text('#!/bin/sh\necho $$ > "${0%/*}/number"\nexec sleep 60\n')
    (tmp_path / "gcloud").chmod(0o755)
    argv = [sys.executable, LAUNCH / "tpu.py", "status", "a"]
    variables = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(argv, cwd=pod.repository, env=variables) as process:
        child = int(wait_for(lambda: number.exists() and number.read_text()))
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    wait_for(lambda: not alive(child))


LINE = (
    "/usr/bin/ssh -T -i /home/some one/.ssh/key -o CheckHostIP=no -o HostKeyAlias=tpu.12-3-Sf9A+0 "
    "-o UserKnownHostsFile=/home/some one/.ssh/known me@10.0.0.1 -- true"
)
PROXY = "ProxyCommand='/usr/bin/python3' '/gcloud.py' alpha compute start-iap-tunnel 't-w-0' '%p'"


@pytest.mark.standard
def test_a_line_of_gcloud_is_taken_apart_although_nothing_in_it_is_quoted():
    """As openssh reads it: the connection is shared, by a path that ssh takes, whatever the home is called."""
    flags = ["-o", "ConnectTimeout=7"]
    command = gcloud.parse_route(LINE.replace(" me@", f" -o {PROXY} me@"), flags)
    assert command[-2:] == ["me@10.0.0.1", "--"] and PROXY in command
    shown = subprocess.run(
        ["ssh", "-G", *command[1:-1]], capture_output=True, text=True, check=True
    )
    found = dict(line.split(" ", 1) for line in shown.stdout.splitlines() if " " in line)
    assert (found["controlmaster"], found["batchmode"], found["connecttimeout"]) == (
        "auto",
        "yes",
        "7",
    )
    assert found["hostkeyalias"] == "tpu.12-3-sf9a+0"
    assert "Identity file /home/some one/.ssh/key not accessible" in shown.stderr
    path = pathlib.Path(found["controlpath"])
    assert path.is_relative_to("/tmp"), "a home may have a name too long for a socket"
    assert len(str(path)) < 80 and path.parent.stat().st_mode & 0o777 == 0o700
    for line in ("", LINE.replace("/ssh -T", "/plink -T"), LINE.replace("me@10.0.0.1 ", "")):
        with pytest.raises(PodError, match="not known here"):
            gcloud.parse_route(line, [])


def test_the_socket_s_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gcloud, "SOCKETS", tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PodError, match="belongs to somebody else"):
        gcloud.parse_route(LINE, [])


def test_gcloud_is_asked_for_the_way_once_for_a_pod(pod):
    def asked() -> list[str]:
        words = [word for call in pod.cloud.calls for word in call if call[3] == "ssh"]
        return [word for word in words if word.startswith(("--worker", "--dry-run"))]

    once = ["--worker=0", "--worker=all", "--dry-run"]  # the first host alone, which makes the keys
    pod.tpu("up")
    pod.cloud.ssh_faults.append(("before", 0, "true"))
    said = pod.tpu("status", "a")
    assert "host 0 can't be reached by ssh: ssh: connect to host 127.0.0.1 port 22: Conn" in said
    assert "allow-ssh" in said and asked() == once
    calls = zip(pod.cloud.calls, pod.cloud.timeouts, strict=True)
    (seconds,) = [timeout for call, timeout in calls if "--worker=0" in call]
    assert seconds >= 180, "gcloud makes a key first, and brings it to all hosts"
    for _ in range(2):
        pod.tpu("status", "a")
    assert asked() == once * 2
    pod.tpu("down")
    pod.tpu("up")
    pod.tpu("status", "a")
    assert asked() == once * 3, "a new pod of that name has other routes"
    for fault, times in (("before", 3), ("denied", 4)):  # the hosts have lost the key
        pod.cloud.ssh_faults += [(fault, 1, "host.py status")] * 3
        assert "ssh failed 3 times" in pod.tpu("status", "a", code=1)
        pod.tpu("status", "a")
        assert asked() == once * times, fault
