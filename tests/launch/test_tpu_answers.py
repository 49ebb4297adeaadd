"""What gcloud says when it fails: which kind it is, and what a person reads.

gcloud_answers.toml has the texts.
"""

import pathlib
import tomllib

import pytest
from pods import answers, backend, gcloud, settings
from pods.backend import PASSING, TRIED, PodError

OPERATION = """Create request issued for: [my-pod]
Waiting for operation [projects/my-project/locations/us-central2-b/operations/operation-1795707174-2f3f] to complete...
...................failed.
"""
CRASH = """

If you would like to report this issue, please run the following command:
  gcloud feedback

To check gcloud for common problems, please run the following command:
  gcloud info --run-diagnostics
"""
TEXT = (pathlib.Path(__file__).parent / "gcloud_answers.toml").read_text()
SAID = {
    name: (kind, answer["text"].replace("OPERATION ", OPERATION).replace(" CRASH", CRASH), answer)
    for kind, answers in tomllib.loads(TEXT).items()
    for name, answer in answers.items()
}
CLOUD = gcloud.TpuVm(settings.Settings("my-pod", "my-project", "us-central2-b", "v4-16"), backend.Runner())


@pytest.mark.parametrize("name", SAID)
def test_an_answer_is_what_it_is(name):
    kind, text, answer = SAID[name]
    asked_of = "" if "tpu-vm.create)" in text else "nodes/my-pod"
    error = CLOUD._explain("tpu-vm ...", backend.Result(answer.get("code", 1), "", text), asked_of)
    assert error.kind == kind, str(error)
    assert [word for word in answer.get("names", ()) if word not in str(error)] == [], str(error)
    assert "\n" not in str(error) and "authenticated as" not in str(error) and "gcloud feedback" not in str(error)
    assert "SEARCH_TERMS" not in str(error)
    assert error.code == (2 if error.kind == "settings" else 1)
    passes = error.kind in ("absent", "network", "stockout", "internal", "exists", "other")
    assert (error.kind in (*PASSING, *TRIED)) == passes


def test_no_answer_is_the_network_s():
    assert CLOUD._explain("tpu-vm describe", backend.Result(None)).kind == "network"


@pytest.mark.parametrize("text", ["", "null", "[]", '[{"state": "READY"}]', "5", '{"state": "RE'])
def test_an_answer_of_another_kind_is_no_absent_pod(monkeypatch, text):
    monkeypatch.setattr(backend.Runner, "run", lambda *_: backend.Result(0, text))
    with pytest.raises(PodError, match="gcloud's answer is not what") as error:
        CLOUD.describe()
    assert error.value.kind == "other"


def test_a_gcloud_that_is_killed_is_no_refusal():
    said = CLOUD._explain("tpu-vm describe", backend.Result(-9))
    assert "gcloud tpu-vm describe was killed by signal 9" in str(said) and "refused" not in str(said)


CLOSED = "ssh: connect to host 34.1.2.3 port 22: Connection timed out"
RETRIED = (
    "Using ssh batch size of 1. Attempting to SSH into 1 nodes with a total of 1 workers.\n"
    "SSH: Attempting to connect to worker 0...\n{0}\n"
    "Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].\n"
    "SSH: Attempting to connect to worker 0...\n{0}\n"
)
GAVE_UP = "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].\n"


@pytest.mark.parametrize(
    ("stderr", "reason", "advice"),
    [
        (RETRIED.format(CLOSED) + GAVE_UP, CLOSED, "allow-ssh"),
        (RETRIED.format(CLOSED), CLOSED, "--tunnel-through-iap"),  # killed while it tried again
        (RETRIED.format("me@34.1.2.3: Permission denied (publickey).") + GAVE_UP,
         "me@34.1.2.3: Permission denied (publickey)", "roles/compute.osAdminLogin"),
        (SAID["api of ssh"][1], "Could not fetch resource: Compute Engine API has not been used", ""),
        ("Traceback (most recent call last):\n  File \"host.py\"\nOSError: [Errno 28] No space left on device\n",
         "OSError: [Errno 28] No space left on device", ""),
        ("Propagating SSH public key to all TPU workers...\n.................done.\n", "it said nothing", ""),
    ],
)  # fmt: skip
def test_why_ssh_failed(stderr, reason, advice):
    read = answers.reason(stderr)
    assert read.startswith(reason)
    advised = answers.advice(read, CLOUD.settings)
    assert advice in advised and bool(advice) == bool(advised)
    assert reason != CLOSED or "--network=default --allow=tcp:22" in advised


def test_a_request_that_failed_says_why_and_whether_another_one_would_too():
    def request(**state):
        return CLOUD._request({"name": "x/my-pod", "state": state})

    quota = request(state="FAILED", failedData={"error": {"code": 8, "message": "Quota limit 'TPUV4' exceeded"}})
    assert (quota.state, quota.permanent) == ("FAILED", True) and "Quota limit 'TPUV4' exceeded" in quota.condition
    capacity = request(state="FAILED", failedData={"error": {"code": 8, "message": "There is no more capacity"}})
    assert not capacity.permanent and "no more capacity" in capacity.condition
    assert request(state="SUSPENDED", stateInitiator="USER").condition == "SUSPENDED: by a person"
    assert request(state="SUSPENDED", stateInitiator="SERVICE").condition == "SUSPENDED: by Google Cloud"
    assert request(state="ACCEPTED", stateInitiator="USER").condition == "ACCEPTED"


def test_what_is_wrong_with_a_node():
    symptoms = [
        {"createTime": "2026-11-26T10:00:00Z", "symptomType": "LOW_MEMORY", "workerId": "3", "details": "2 GB left"},
        {"createTime": "2026-11-26T09:00:00Z", "symptomType": "OUT_OF_MEMORY", "workerId": "1"},
    ]
    node = {"state": "READY", "health": "UNHEALTHY_MAINTENANCE", "healthDescription": "is moved", "symptoms": symptoms}
    said = CLOUD._node(node).condition
    assert said.startswith(
        "READY: UNHEALTHY_MAINTENANCE is moved; OUT_OF_MEMORY on worker 1; LOW_MEMORY on worker 3 2 GB"
    )
    assert CLOUD._node({"state": "READY", "health": "HEALTHY"}).condition == "READY"


def test_several_interfaces_a_host():
    ends = [{"ipAddress": f"10.{interface}.0.{host}"} for host in range(2) for interface in range(3)]
    node = {"state": "READY", "networkConfigs": [{"network": name} for name in "abc"], "networkEndpoints": ends}
    assert [host.address for host in CLOUD._node(node).hosts] == ["10.0.0.0", "10.0.0.1"]
    assert [host.address for host in CLOUD._node({**node, "networkConfigs": []}).hosts] == [
        e["ipAddress"] for e in ends
    ]
