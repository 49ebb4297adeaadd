"""The fake gcloud: other proofs rest on it, so its states, faults, signals and refusals are tested here."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.fake_gcloud import cloud as clouds
from tests.fake_gcloud import synopsis

GCLOUD = pathlib.Path(__file__).parent / "fake_gcloud" / "gcloud"
PLACE = ["--project=p", "--zone=us-central2-b"]
UNTIL_GO = "until [ -e go ]; do sleep 0.1; done"
NODE = "projects/p/locations/us-central2-b/nodes/pod"


class Fake:
    """A cloud of its own, and gcloud in it."""

    def __init__(self, state):
        self.state = state
        self.cloud = clouds.Cloud(state)
        # Our own interpreter first: on some machines python3 is a slow script that looks for one.
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"FAKE_GCLOUD_STATE": str(state), "CANARY": "secret", "PATH": path}

    def __call__(self, *argv, code=0, stdin=None, group="tpu-vm"):
        command = [str(GCLOUD), "compute", "tpus", group, *argv, *PLACE]
        done = subprocess.run(command, env=self.environment, input=stdin, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        return done

    def start(self, *argv):
        command = [str(GCLOUD), "compute", "tpus", "tpu-vm", *argv, *PLACE]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def queued(self, *argv, **more):
        return self(*argv, group="queued-resources", **more)

    def ssh(self, command, worker=0, **more):
        return self("ssh", "pod", f"--worker={worker}", f"--command={command}", **more)

    def describe(self, name="pod"):
        return json.loads(self("describe", name, "--format=json").stdout)

    def state_of_queued(self):
        return json.loads(self.queued("describe", "q", "--format=json").stdout)["state"]["state"]

    def home(self, worker=0):
        return self.cloud.home("pod", worker)


@pytest.fixture
def fake(tmp_path):
    fake = Fake(tmp_path / "cloud")
    clouds.settings(fake.state, retry_seconds=0)
    yield fake
    for name in fake.cloud.names("nodes"):
        fake.cloud.kill(name)


@pytest.fixture
def pod(fake):
    """A fake cloud with a TPU of four workers in it."""
    clouds.settings(fake.state, creating_describes=0)
    fake("create", "pod", "--accelerator-type=v4-32", "--version=tpu-ubuntu2204-base", "--spot")
    assert fake.describe()["state"] == "READY"
    return fake


def wait_for(what, seconds=20):
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return result


# Command lines and the words with which Google Cloud SDK 528.0.0 refused each (its suggestions left out).
CREATE = "tpu-vm create x --zone=z --project=p"
QUEUED = "queued-resources create q --zone=z --project=p --runtime-version=v"
CHIPS = "(--accelerator-type | --topology --type)"
NODES = "(--node-id | [--node-count : --node-prefix])"
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
    "tpu-vm ssh x --zone=z --project=p --batch-size=3": "unrecognized arguments: --batch-size=3",
    "tpu-vm ssh x --zone=z --project=p --tunnel-through-iap": "unrecognized arguments: --tunnel-through-iap",
    "tpu-vm scp a --zone=z --project=p": "argument [[USER@]INSTANCE:]DEST: Must be specified.",
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


@pytest.mark.parametrize("line", REFUSED)
def test_what_gcloud_refuses_is_refused_in_its_words(line):
    with pytest.raises(synopsis.RefusedError) as caught:
        synopsis.parse(["compute", "tpus", *line.split()])
    where = ".".join(line.split()[:2])
    assert str(caught.value) == f"ERROR: (gcloud.compute.tpus.{where}) {REFUSED[line]}"
    assert caught.value.code == 2


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


def test_a_command_runs_in_a_shell_of_its_own_with_nothing_of_ours(pod):
    done = pod.ssh(
        'cat; echo "$HOME $PWD ${CANARY-none}"; echo err >&2; ps -o sid= $$; exit 7', 2, stdin="in\n", code=7
    )
    read, places, session = done.stdout.splitlines()
    assert read == "in"
    assert places == f"{pod.home(2)} {pod.home(2)} none"
    assert int(session) != os.getsid(0)
    assert "err\n" in done.stderr
    hostile = "printf %s 'a\"b$(id)`id`;|&\n é'"
    assert pod.ssh(hostile).stdout == 'a"b$(id)`id`;|&\n é'


def test_a_command_that_a_signal_ends_is_a_lost_connection_to_gcloud_and_runs_again(pod):
    done = pod.ssh("echo once >> ran; kill -9 $$", code=255)
    assert (pod.home() / "ran").read_text() == "once\n" * 10
    assert done.stderr.count("Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].") == 9
    assert done.stderr.endswith(
        "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].\n"
    )
    # A shell that outlives the child that was killed gives 128 + the signal, and that is not run again.
    pod.ssh("echo x >> other; bash -c 'kill -9 $$'; exit $?", code=137)
    assert (pod.home() / "other").read_text() == "x\n"


def test_255_before_the_command(pod):
    clouds.add_fault(pod.state, "ssh", "ssh255_before", worker=1, match="ran")
    pod.ssh("touch ran", 0)
    pod.ssh("touch other", 1)
    done = pod.ssh("touch ran", 1, code=255)
    assert "ssh: connect to host 127.0.0.2 port 22: Connection timed out" in done.stderr
    assert not (pod.home(1) / "ran").exists()
    pod.ssh("touch ran", 1)
    assert (pod.home(1) / "ran").exists()


def test_255_after_the_command_started_and_it_goes_on(pod):
    clouds.add_fault(pod.state, "ssh", "ssh255_after")
    done = pod.ssh(f"echo begun >> ran; {UNTIL_GO}; echo output; echo ended >> ran", code=255)
    assert done.stdout == ""
    assert (pod.home() / "ran").read_text() == "begun\n"
    (pod.home() / "go").touch()
    wait_for(lambda: (pod.home() / "ran").read_text() == "begun\nended\n")


def test_gcloud_itself_starts_a_second_one_after_a_lost_connection(pod):
    clouds.add_fault(pod.state, "ssh", "ssh255_after", attempts=1)
    pod.ssh("echo begun >> ran; sleep 0.5", code=0)
    assert (pod.home() / "ran").read_text() == "begun\nbegun\n"


def test_a_connection_that_drops_in_mid_stream(pod):
    clouds.add_fault(pod.state, "ssh", "drop_midstream", bytes=10)
    done = pod.ssh(f"echo 0123456789abcdef; {UNTIL_GO}; echo more; touch ended", code=255)
    assert done.stdout == "0123456789"
    assert "closed by remote host" in done.stderr
    assert not (pod.home() / "ended").exists()
    (pod.home() / "go").touch()
    wait_for((pod.home() / "ended").exists)
    clouds.add_fault(pod.state, "ssh", "drop_midstream")
    assert pod.ssh("echo short", code=255).stdout == "short", "even a short answer is cut"


def test_keys_that_are_not_there_yet(pod):
    clouds.add_fault(pod.state, "ssh", "keys_not_propagated", times=2)
    for _ in range(2):
        done = pod.ssh("touch ran", code=255)
        assert "me@127.0.0.1: Permission denied (publickey)." in done.stderr
    assert not (pod.home() / "ran").exists()
    pod.ssh("touch ran")
    clouds.add_fault(pod.state, "ssh", "keys_not_propagated", attempts=3)
    assert pod.ssh("true").stderr.count("Permission denied") == 3


def test_a_silent_worker_answers_nothing(pod):
    clouds.add_fault(pod.state, "ssh", "silent", worker=3)
    process = pod.start("ssh", "pod", "--worker=3", "--command=touch ran")
    pod.ssh("true", 2)
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert not (pod.home(3) / "ran").exists()


def test_one_ssh_per_worker(pod):
    done = pod("ssh", "pod", "--worker=all", "--command=true", code=2)
    assert "one ssh per host" in done.stderr
    done = pod("ssh", "pod", "--worker=4", "--command=true", code=1)
    assert "worker index 4 is larger than the valid worker indexes" in done.stderr


def test_preemption_kills_everything_and_only_there(pod, tmp_path):
    pod("create", "other", "--accelerator-type=v4-8", "--version=v")
    pod.describe("other")
    detached = "setsid bash -c 'echo $$ > pid; exec sleep 60' > /dev/null 2>&1 < /dev/null & sleep 0.2"
    homes = []
    for name, worker in [("pod", 0), ("pod", 3), ("other", 0)]:
        pod("ssh", name, f"--worker={worker}", f"--command={detached}")
        homes.append(pod.cloud.home(name, worker))
    pids = [int(wait_for(lambda home=home: (home / "pid").exists() and (home / "pid").read_text())) for home in homes]
    waiting = pod.start("ssh", "pod", "--worker=1", "--command=sleep 60")
    wait_for(lambda: len(pod.cloud.processes("pod")) >= 3)
    died = clouds.preempt(pod.state, "pod")
    assert set(pids[:2]) <= set(died)
    assert pids[2] not in died
    assert waiting.wait(20) == 255
    waiting.communicate()
    os.kill(pids[2], 0)
    assert pod.cloud.processes("pod") == []
    assert pod.describe()["state"] == "PREEMPTED"
    done = pod.ssh("true", code=1)
    assert done.stderr == (
        "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) This TPU has terminal state "
        '"PREEMPTED", so it cannot be used anymore.\n'
    )
    # What was on its disks is gone with it.
    pod("delete", "pod", "--quiet")
    pod("create", "pod", "--accelerator-type=v4-32", "--version=v")
    pod.describe()
    assert list(pod.home().iterdir()) == []


def test_preemption_suspends_the_queued_resource(fake):
    clouds.settings(fake.state, queue_describes=0)
    fake.queued("create", "q", "--node-id=pod", "--accelerator-type=v4-8", "--runtime-version=v", "--spot")
    assert [fake.state_of_queued() for _ in range(3)][-1] == "ACTIVE"
    clouds.preempt(fake.state, "pod")
    assert fake.state_of_queued() == "SUSPENDED"
    assert "FAILED_PRECONDITION" in fake.queued("delete", "q", "--quiet", code=1).stderr


def test_signals_reach_one_worker(pod):
    processes = [pod.start("ssh", "pod", f"--worker={i}", "--command=echo $$; exec sleep 60") for i in (0, 1)]
    for process in processes:
        process.stdout.readline()
    # The clients themselves are not on the worker.
    assert len(pod.cloud.processes("pod", 0)) == 1
    (stopped,) = pod.cloud.signal("pod", 0, signal.SIGSTOP)
    stat = pathlib.Path(f"/proc/{stopped}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    # The machine is still there, so gcloud runs the command again, and that dies as well.
    wait_for(lambda: (pod.cloud.kill("pod", 0), processes[0].poll())[1] is not None)
    assert processes[0].returncode == 255
    assert processes[1].poll() is None
    for process in processes:
        process.kill()
    pod.cloud.kill("pod")  # what the clients have left behind holds their pipes
    for process in processes:
        process.communicate()


def test_files_both_ways_keep_their_modes(pod, tmp_path):
    first, second = tmp_path / "a b'$(id).sh", tmp_path / "é"
    first.write_text("one")
    second.write_text("two")
    first.chmod(0o750)
    pod("scp", str(first), str(second), "pod:", "--worker=1")
    there = pod.home(1) / first.name
    assert there.read_text() == "one"
    assert there.stat().st_mode & 0o777 == 0o750
    assert not (pod.home(0) / first.name).exists()
    pod("scp", str(first), "pod:~/renamed", "--worker=1")
    back = tmp_path / "back"
    back.mkdir()
    pod("scp", "pod:renamed", "pod:é", str(back), "--worker=1")
    assert {file.name: file.read_text() for file in back.iterdir()} == {"renamed": "one", "é": "two"}
    done = pod("scp", str(first), "pod:nowhere/x", code=1)
    assert 'scp: dest open "nowhere/x": No such file or directory' in done.stderr
    assert "is not a regular file" in pod("scp", str(back), "pod:", code=1).stderr
    pod("scp", "--recurse", str(back), "pod:")
    assert (pod.home() / "back" / "renamed").read_text() == "one"
    pod("scp", str(first), "elsewhere:", code=1)
    clouds.add_fault(pod.state, "scp", "ssh255_before")
    pod("scp", str(first), "pod:late", code=255)
    assert not (pod.home() / "late").exists()


def test_real_ssh_and_scp_to_the_addresses_given(fake, tmp_path, monkeypatch):
    """With programs in place of ssh and scp that note what they were called with; tests/pod.sh has the real ones."""
    programs, noted = tmp_path / "bin", tmp_path / "noted"
    programs.mkdir()
    for name in ("ssh", "scp"):
        script = (
            f"#!{sys.executable}\nimport json, sys\nopen({str(noted)!r}, 'a').write(json.dumps(sys.argv) + '\\n')\n"
        )
        script += "print(sys.stdin.read(), end='')\nsys.exit(7)\n" if name == "ssh" else ""
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    settings = {"hosts": ["10.0.0.1", "10.0.0.2"], "identity": "/key", "user": "u", "options": ["A=b", "-C"]}
    (tmp_path / "ssh.json").write_text(json.dumps(settings))
    fake.environment["FAKE_GCLOUD_SSH"] = str(tmp_path / "ssh.json")
    fake.environment["PATH"] = f"{programs}:{fake.environment['PATH']}"
    clouds.settings(fake.state, creating_describes=0)
    fake("create", "pod", "--accelerator-type=v4-16", "--version=v")
    assert [end["ipAddress"] for end in fake.describe()["networkEndpoints"]] == ["10.0.0.1", "10.0.0.2"]
    assert fake.ssh("a 'b'", 1, stdin="in", code=7).stdout == "in"
    fake("scp", "x y", "pod:z", "--worker=0")
    fake("scp", "pod:z", ".", "--worker=1", "--recurse")
    options = ["-i", "/key", "-o", "A=b", "-C"]
    assert [json.loads(line)[1:] for line in noted.read_text().splitlines()] == [
        ["-T", *options, "u@10.0.0.2", "--", "a 'b'"],
        [*options, "x y", "u@10.0.0.1:z"],
        ["-r", *options, "u@10.0.0.2:z", "."],
    ]
    clouds.add_fault(fake.state, "ssh", "ssh255_before")
    assert "connect to host 10.0.0.1 port 22" in fake.ssh("true", code=255).stderr
    assert len(noted.read_text().splitlines()) == 3
