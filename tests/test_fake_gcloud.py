"""The fake gcloud: other proofs rest on it, so its states, refusals and faults of the cloud are tested here."""

import json

import pytest

from tests.fake_gcloud import cloud as clouds
from tests.fake_gcloud import synopsis
from tests.fixtures_fake_gcloud import PLACE

NODE = "projects/p/locations/us-central2-b/nodes/pod"

# Command lines and the words with which Google Cloud SDK 528.0.0 refused each (its suggestions left out).
CREATE = "tpu-vm create x --zone=z --project=p"
QUEUED = "queued-resources create q --zone=z --project=p --runtime-version=v"
CHIPS = "(--accelerator-type | --topology --type)"
NODES = "(--node-id | [--node-count : --node-prefix])"
ELSEWHERE = (
    "unrecognized arguments:\n  \n {flag} flag is available in one or more alternate release tracks. Try:\n\n"
    "  gcloud alpha compute tpus {command} {flag}\n"
)
DICT = (
    "argument {flag}: Bad syntax for dict arg: [{value}]. Please see `gcloud topic flags-file` or `gcloud topic "
    "escaping` for information on providing list or dictionary flag values with special characters."
)
REFUSED = {
    f"{CREATE} --version=v --bogus=3": "unrecognized arguments: --bogus=3",
    f"{CREATE} --version=v y": "unrecognized arguments: y",
    CREATE: "argument --version: Must be specified.",
    f"{CREATE} --version=v --spot=3": "argument --spot: ignored explicit argument '3'",
    f"{CREATE} --version=v --accelerator-type": "argument --accelerator-type: expected one argument",
    f"{CREATE} --version=v --runtime-version=v": "unrecognized arguments: --runtime-version=v",
    f"{CREATE} --version=v --force": "unrecognized arguments: --force",
    "tpu-vm describe x --zone=z --project=p --spot": "unrecognized arguments: --spot",
    "tpu-vm delete x --zone=z --project=p --force": "unrecognized arguments: --force",
    "tpu-vm ssh --zone=z --project=p": "argument [USER@]TPU: Must be specified.",
    "tpu-vm ssh x --zone=z --project=p --batch-size=3": ELSEWHERE.format(flag="--batch-size", command="tpu-vm ssh"),
    "tpu-vm ssh x --zone=z --project=p --tunnel-through-iap": (
        ELSEWHERE.format(flag="--tunnel-through-iap", command="tpu-vm ssh")
    ),
    "tpu-vm ssh x --zone=z --project=p --scp-flag=-C": "unrecognized arguments: --scp-flag=-C",
    "tpu-vm ssh x --zone=z --project=p --strict-host-key-checking=maybe": (
        "argument --strict-host-key-checking: Invalid choice: 'maybe'.\n\nValid choices are [ask, no, yes]."
    ),
    "alpha tpu-vm ssh x --zone=z --project=p --internal-ip --tunnel-through-iap": (
        f"argument --internal-ip: {synopsis.IAP_TEXT}"
    ),
    "tpu-vm start x --zone=z --project=p --force": "unrecognized arguments: --force",
    f"{CREATE} --version=v --labels=foo": DICT.format(flag="--labels", value="foo"),
    f"{CREATE} --version=v --data-disk=foo": DICT.format(flag="--data-disk", value="foo"),
    f"{CREATE} --version=v --scopes": "argument --scopes: expected one argument",
    f"{CREATE} --version=v --provisioning-model=flex-start": (
        ELSEWHERE.format(flag="--provisioning-model", command="tpu-vm create")
    ),
    f"alpha {CREATE} --version=v --max-run-duration=4h": "unrecognized arguments: --max-run-duration=4h",
    f"{QUEUED} --accelerator-type=a --node-id=n --reservation=r": (
        ELSEWHERE.format(flag="--reservation", command="queued-resources create")
    ),
    "queued-resources delete q --zone=z --project=p --forced": "unrecognized arguments: --forced",
    f"{QUEUED} --node-id=n": f"Exactly one of {CHIPS} must be specified.",
    f"{QUEUED} --accelerator-type=a": f"Exactly one of {NODES} must be specified.",
    f"{QUEUED} --accelerator-type=a --node-id=n --node-count=3": (
        f"argument --node-id: Exactly one of {NODES} must be specified."
    ),
    f"{QUEUED} --accelerator-type=a --node-id=n --version=v": "unrecognized arguments: --version=v",
    "queued-resources create q --zone=z --project=p --accelerator-type=a --node-id=n": (
        "argument --runtime-version: Must be specified."
    ),
}


def argv(line: str) -> list[str]:
    words = line.split()
    at = words[0] == "alpha"
    return [*words[:at], "compute", "tpus", *words[at:]]


@pytest.mark.parametrize("line", REFUSED)
def test_what_gcloud_refuses_is_refused_in_its_words(line):
    with pytest.raises(synopsis.RefusedError) as caught:
        synopsis.parse(argv(line))
    where = ".".join(["gcloud", *argv(line)][: 6 if line.startswith("alpha") else 5])
    assert str(caught.value) == f"ERROR: ({where}) {REFUSED[line]}"
    assert caught.value.code == 2


def test_the_tracks_take_different_flags():
    flex = f"{QUEUED} --accelerator-type=a --node-id=n --provisioning-model=flex-start --max-run-duration=4h"
    assert synopsis.parse(argv(f"alpha {flex}")).flags["--provisioning-model"] == "flex-start"
    with pytest.raises(synopsis.RefusedError, match=r"must be one of \[standard, spot, reservation-bound\]"):
        synopsis.parse(argv(f"alpha {CREATE} --version=v --provisioning-model=flex-start"))
    with pytest.raises(synopsis.RefusedError) as caught:
        synopsis.parse(["beta", "compute", "tpus", "tpu-vm", "list"])
    assert str(caught.value).startswith("ERROR: (gcloud.beta.compute.tpus) Invalid choice: 'tpu-vm'.\n")


def test_a_refusal_ends_the_command_and_changes_nothing(fake):
    done = fake("create", "pod", "--version=v", "--bogus", code=2)
    assert done.stderr == "ERROR: (gcloud.compute.tpus.tpu-vm.create) unrecognized arguments: --bogus\n"
    assert fake.cloud.names("nodes") == []
    assert fake.cloud.calls() == [["compute", "tpus", "tpu-vm", "create", "pod", "--version=v", "--bogus", *PLACE]]
    with pytest.raises(synopsis.RefusedError, match="project"):
        synopsis.parse(["compute", "tpus", "tpu-vm", "describe", "x", "--zone=z"])


def test_values_are_taken_with_an_equals_sign_or_as_the_next_word():
    words = ["me@pod", "--worker", "3", "--command=a=b --c", "--ssh-flag=-L 1:h:2", "--ssh-flag=-N", *PLACE, "--", "-v"]
    call = synopsis.parse(["compute", "tpus", "tpu-vm", "ssh", *words])
    assert call.positionals == ["me@pod"]
    assert call.flags["--worker"] == "3"
    assert call.flags["--command"] == "a=b --c"
    assert call.flags["--ssh-flag"] == ["-L 1:h:2", "-N"]
    assert call.remainder == ["-v"]


def test_a_tpu_takes_time_and_is_described_as_the_real_one(fake):
    clouds.settings(fake.state, creating_describes=2)
    fake("create", "pod", "--accelerator-type=v4-32", "--version=tpu-ubuntu2204-base", "--spot")
    states = [fake.describe()["state"] for _ in range(4)]
    assert states == ["CREATING", "CREATING", "READY", "READY"]
    node = fake.describe()
    assert node["name"] == NODE
    assert node["acceleratorType"] == "v4-32"
    assert node["runtimeVersion"] == "tpu-ubuntu2204-base"
    assert node["schedulingConfig"] == {"spot": True}
    assert node["health"] == "HEALTHY"
    assert [end["ipAddress"] for end in node["networkEndpoints"]] == [f"127.0.0.{i}" for i in (1, 2, 3, 4)]
    assert all(end["port"] == 8470 and end["accessConfig"]["externalIp"] for end in node["networkEndpoints"])
    assert [one["name"] for one in json.loads(fake("list", "--format=json").stdout)] == [NODE]
    again = fake("create", "pod", "--accelerator-type=v4-32", "--version=tpu-ubuntu2204-base", code=1)
    assert f"ALREADY_EXISTS: Resource '{NODE}' already exists" in again.stderr
    fake("delete", "pod", "--quiet")
    gone = fake("describe", "pod", "--format=json", code=1)
    assert gone.stderr.startswith(f"ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource '{NODE}' was not")
    assert not (fake.state / "pod").exists()
    fake("delete", "pod", "--quiet", code=1)


def test_hosts_by_type(fake):
    hosts = {
        "v2-8": 1, "v3-32": 4, "v4-8": 1, "v4-32": 4, "v5p-8": 1, "v5p-512": 64, "v5litepod-1": 1, "v5litepod-8": 1,
        "v5litepod-16": 4, "v6e-8": 1, "v6e-256": 64,
    }  # fmt: skip
    clouds.settings(fake.state, creating_describes=0)
    for name in hosts:
        fake("create", f"pod-{name}", f"--accelerator-type={name}", "--version=v")
    shown = json.loads(fake("list", "--format=json").stdout)
    assert {node["acceleratorType"]: len(node["networkEndpoints"]) for node in shown} == hosts


def test_a_type_that_is_not_there(fake):
    done = fake("create", "pod", "--accelerator-type=v9-8", "--version=v", code=1)
    assert "INVALID_ARGUMENT" in done.stderr
    assert "the accelerator v9-8 was not found in zone us-central2-b" in done.stderr


def test_queued_resource_goes_through_its_states_and_deletes_with_force(fake):
    clouds.settings(fake.state, queue_describes=0)
    fake.queued(
        "create", "q", "--node-id=pod", "--accelerator-type=v6e-16", "--runtime-version=v2-alpha-tpuv6e", "--spot"
    )
    states = [fake.state_of_queued() for _ in range(4)]
    assert states == ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "ACTIVE"]
    assert fake.describe()["state"] == "READY"
    assert fake.describe()["queuedResource"].endswith("/queuedResources/q")
    refused = fake.queued("delete", "q", "--quiet", code=1)
    assert "FAILED_PRECONDITION" in refused.stderr
    assert fake.describe()["state"] == "READY"
    fake.queued("delete", "q", "--quiet", "--force")
    assert "NOT_FOUND" in fake("describe", "pod", "--format=json", code=1).stderr
    assert json.loads(fake.queued("list", "--format=json").stdout) == []


@pytest.mark.parametrize("fault", ["suspended", "failed"])
def test_a_suspended_or_failed_request_eats_quota_until_it_is_deleted(fake, fault):
    clouds.settings(fake.state, queue_describes=0, quota_chips=16)
    wanted = ("--node-id=pod", "--accelerator-type=v6e-16", "--runtime-version=v2-alpha-tpuv6e")
    clouds.add_fault(fake.state, "queued-resources create", fault)
    fake.queued("create", "q", *wanted)
    assert [fake.state_of_queued() for _ in range(3)][-1] == fault.upper()
    full = fake.queued("create", "r", *wanted, code=1)
    assert "RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPerProjectPerZoneForTPUAPI' has been exceeded" in full.stderr
    assert "Limit: 16 in zone us-central2-b" in full.stderr
    assert "RESOURCE_EXHAUSTED" in fake("create", "pod", "--accelerator-type=v6e-16", "--version=v", code=1).stderr
    fake.queued("delete", "q", "--quiet", "--force")
    fake.queued("create", "r", *wanted)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stockout", '"message": "There is no more capacity in the zone \\"us-central2-b\\"; you can try in another'),
        ("quota", "RESOURCE_EXHAUSTED: Quota limit 'TPUV4PreemptiblePerProjectPerZoneForTPUAPI' has been exceeded."),
        ("permission", "PERMISSION_DENIED: Permission denied on 'locations/us-central2-b' (or it may not exist)."),
        ("unavailable", "UNAVAILABLE: The service is currently unavailable."),
    ],
)
def test_a_create_that_fails_as_often_as_the_fault_says(fake, fault, words):
    clouds.add_fault(fake.state, "create", fault, times=2)
    create = ("create", "pod", "--accelerator-type=v4-32", "--version=v", "--spot")
    for _ in range(2):
        done = fake(*create, code=1)
        assert words in done.stderr
        assert "ERROR: (gcloud.compute.tpus.tpu-vm.create) " in done.stderr
    assert fake.cloud.names("nodes") == []
    fake(*create)


def test_preemption_suspends_the_queued_resource(fake):
    clouds.settings(fake.state, queue_describes=0)
    fake.queued("create", "q", "--node-id=pod", "--accelerator-type=v4-8", "--runtime-version=v", "--spot")
    assert [fake.state_of_queued() for _ in range(3)][-1] == "ACTIVE"
    clouds.preempt(fake.state, "pod")
    assert fake.state_of_queued() == "SUSPENDED"
    assert "FAILED_PRECONDITION" in fake.queued("delete", "q", "--quiet", code=1).stderr
