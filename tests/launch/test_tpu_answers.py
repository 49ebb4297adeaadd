"""What gcloud says when it fails, and what a person reads: gcloud_answers.toml has the texts."""

import pathlib
import tomllib

import pytest
from pods import answers, backend, gcloud, settings
from pods.backend import PodError

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
CLOUD = gcloud.TpuVm(settings.Settings("my-pod", "my-project", "us-central2-b", "v4-16"))


@pytest.mark.parametrize("name", SAID)
def test_google_s_sentence_stands_first_and_what_helps_after_it(name):
    kind, text, answer = SAID[name]
    verb = "create" if "tpu-vm.create)" in text else "describe"
    error = CLOUD._explain(f"tpu-vm {verb}", backend.Result(answer.get("code", 1), "", text))
    said = str(error)
    assert error.kind == kind, said
    assert [word for word in answer.get("names", ()) if word not in said] == [], said
    assert said.isprintable() and "gcloud feedback" not in said
    assert error.code == (2 if kind == "settings" else 1)


def test_an_answer_of_another_kind_is_no_absent_pod(monkeypatch):
    monkeypatch.setattr(backend, "run", lambda *_: backend.Result(0, '{"state": "RE'))
    with pytest.raises(PodError, match="gcloud's answer is no JSON") as error:
        CLOUD.describe()
    assert error.value.kind == "other"


def test_a_gcloud_without_an_answer_or_killed_is_no_refusal():
    assert CLOUD._explain("tpu-vm describe", backend.Result(None)).kind == "network"
    said = CLOUD._explain("tpu-vm describe", backend.Result(-9))
    assert "gcloud tpu-vm describe was killed by signal 9" in str(said) and "refused" not in str(
        said
    )


CLOSED = "ssh: connect to host 34.1.2.3 port 22: Connection timed out"
DENIED = "me@34.1.2.3: Permission denied (publickey)."
CHANGED = "@@@@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n@@@@@@\nHost key verification failed."
IAP = (
    'Traceback (most recent call last):\n  File "iap_tunnel.py", line 1\n    raise Error\n'
    "ERROR: (gcloud.compute.start-iap-tunnel) Error while connecting [4003: 'failed to connect to backend'].\n"
    "kex_exchange_identification: Connection closed by remote host\n"
)
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
        (RETRIED.format(CLOSED) + GAVE_UP, CLOSED, "--network=default --allow=tcp:22"),
        (RETRIED.format(CLOSED), CLOSED, "--tunnel-through-iap"),  # killed while it tried again
        (RETRIED.format(DENIED) + GAVE_UP, DENIED[:-1], "roles/compute.osAdminLogin"),
        (RETRIED.format(DENIED) + GAVE_UP, DENIED[:-1], "ssh-add ~/.ssh/google_compute_engine"),
        (RETRIED.format(CHANGED) + GAVE_UP, "Host key verification failed", "ssh-keygen -R"),
        (RETRIED.format(IAP) + GAVE_UP, "Error while connecting [4003", "roles/iap.tunnelResourceAccessor"),
        (SAID["api of ssh"][1], "Could not fetch resource: - Compute Engine API has not been used", ""),
        ("Traceback (most recent call last):\n  File \"host.py\"\nOSError: [Errno 28] No space left on device\n",
         "OSError: [Errno 28] No space left on device", ""),
        ("Propagating SSH public key to all TPU workers...\n......", "it said nothing", "still bringing your key"),
    ],
)  # fmt: skip
def test_why_ssh_failed(stderr, reason, advice):
    assert answers.reason(stderr).startswith(reason)
    advised = answers.advice(stderr, CLOUD.settings)
    assert advice in advised and bool(advice) == bool(advised)


def test_a_request_that_failed_says_why():
    def request(**state):
        tpu = {"nodeSpec": [{"node": {}}]}
        return CLOUD._request({"name": "x/my-pod", "state": state, "tpu": tpu}).condition

    failed = {"error": {"code": 8, "message": "Quota limit 'TPUV4' exceeded"}}
    assert request(state="FAILED", failedData=failed).startswith(
        "FAILED: RESOURCE_EXHAUSTED: Quota limit 'TPUV4' ex"
    )
    assert request(state="ACCEPTED") == "ACCEPTED"


def test_what_is_wrong_with_a_node():
    symptoms = [
        {"symptomType": "OUT_OF_MEMORY", "workerId": "1"},
        {"symptomType": "LOW_MEMORY", "workerId": "3", "details": "2 GB left"},
    ]
    node = {
        "id": "1",
        "state": "READY",
        "health": "UNHEALTHY_MAINTENANCE",
        "healthDescription": "is moved",
        "symptoms": symptoms,
    }
    said = "READY: UNHEALTHY_MAINTENANCE is moved; OUT_OF_MEMORY on worker 1; LOW_MEMORY on worker 3 2 GB left"
    assert CLOUD._node(node).condition == said
    assert CLOUD._node({"id": "1", "state": "READY", "health": "HEALTHY"}).condition == "READY"


def test_several_interfaces_a_host():
    ends = [
        {"ipAddress": f"10.{interface}.0.{host}"} for host in range(2) for interface in range(3)
    ]
    node = {
        "id": "1",
        "state": "READY",
        "networkConfigs": [{"network": name} for name in "abc"],
        "networkEndpoints": ends,
    }
    assert [host.address for host in CLOUD._node(node).hosts] == ["10.0.0.0", "10.0.0.1"]
    assert len(CLOUD._node({**node, "networkConfigs": []}).hosts) == len(ends)
