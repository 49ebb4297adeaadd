"""The fake gcloud's way to its workers: commands, files, signals, and the faults of a connection."""

import json
import os
import pathlib
import signal
import sys

from tests.fake_gcloud import cloud as clouds
from tests.fixtures_pods import wait_for

UNTIL_GO = "until [ -e go ]; do sleep 0.1; done"


def test_a_command_runs_in_a_shell_of_its_own_with_nothing_of_ours(fake_pod):
    done = fake_pod.ssh(
        'cat; echo "$HOME $PWD ${CANARY-none}"; echo err >&2; ps -o sid= $$; exit 7', 2, stdin="in\n", code=7
    )
    read, places, session = done.stdout.splitlines()
    assert read == "in"
    assert places == f"{fake_pod.home(2)} {fake_pod.home(2)} none"
    assert int(session) != os.getsid(0)
    assert "err\n" in done.stderr
    hostile = "printf %s 'a\"b$(id)`id`;|&\n é'"
    assert fake_pod.ssh(hostile).stdout == 'a"b$(id)`id`;|&\n é'


def test_a_command_that_a_signal_ends_is_a_lost_connection_to_gcloud_and_runs_again(fake_pod):
    done = fake_pod.ssh("echo once >> ran; kill -9 $$", code=255)
    assert (fake_pod.home() / "ran").read_text() == "once\n" * 10
    assert done.stderr.count("Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].") == 9
    assert done.stderr.endswith(
        "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].\n"
    )
    # A shell that outlives the child that was killed gives 128 + the signal, and that is not run again.
    fake_pod.ssh("echo x >> other; bash -c 'kill -9 $$'; exit $?", code=137)
    assert (fake_pod.home() / "other").read_text() == "x\n"


def test_255_before_the_command(fake_pod):
    clouds.add_fault(fake_pod.state, "ssh", "ssh255_before", worker=1, match="ran")
    fake_pod.ssh("touch ran", 0)
    fake_pod.ssh("touch other", 1)
    done = fake_pod.ssh("touch ran", 1, code=255)
    assert "ssh: connect to host 127.0.0.2 port 22: Connection timed out" in done.stderr
    assert not (fake_pod.home(1) / "ran").exists()
    fake_pod.ssh("touch ran", 1)
    assert (fake_pod.home(1) / "ran").exists()


def test_255_after_the_command_started_and_it_goes_on(fake_pod):
    clouds.add_fault(fake_pod.state, "ssh", "ssh255_after")
    done = fake_pod.ssh(f"echo begun >> ran; {UNTIL_GO}; echo output; echo ended >> ran", code=255)
    assert done.stdout == ""
    assert (fake_pod.home() / "ran").read_text() == "begun\n"
    (fake_pod.home() / "go").touch()
    wait_for(lambda: (fake_pod.home() / "ran").read_text() == "begun\nended\n")


def test_gcloud_itself_starts_a_second_one_after_a_lost_connection(fake_pod):
    clouds.add_fault(fake_pod.state, "ssh", "ssh255_after", attempts=1)
    fake_pod.ssh("echo begun >> ran; sleep 0.5", code=0)
    assert (fake_pod.home() / "ran").read_text() == "begun\nbegun\n"


def test_a_connection_that_drops_in_mid_stream(fake_pod):
    clouds.add_fault(fake_pod.state, "ssh", "drop_midstream", bytes=10)
    done = fake_pod.ssh(f"echo 0123456789abcdef; {UNTIL_GO}; echo more; touch ended", code=255)
    assert done.stdout == "0123456789"
    assert "closed by remote host" in done.stderr
    assert not (fake_pod.home() / "ended").exists()
    (fake_pod.home() / "go").touch()
    wait_for((fake_pod.home() / "ended").exists)
    clouds.add_fault(fake_pod.state, "ssh", "drop_midstream")
    assert fake_pod.ssh("echo short", code=255).stdout == "short", "even a short answer is cut"


def test_keys_that_are_not_there_yet(fake_pod):
    clouds.add_fault(fake_pod.state, "ssh", "keys_not_propagated", times=2)
    for _ in range(2):
        done = fake_pod.ssh("touch ran", code=255)
        assert "me@127.0.0.1: Permission denied (publickey)." in done.stderr
    assert not (fake_pod.home() / "ran").exists()
    fake_pod.ssh("touch ran")
    clouds.add_fault(fake_pod.state, "ssh", "keys_not_propagated", attempts=3)
    assert fake_pod.ssh("true").stderr.count("Permission denied") == 3


def test_a_silent_worker_answers_nothing(fake_pod):
    clouds.add_fault(fake_pod.state, "ssh", "silent", worker=3)
    process = fake_pod.start("ssh", "pod", "--worker=3", "--command=touch ran")
    fake_pod.ssh("true", 2)
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert not (fake_pod.home(3) / "ran").exists()


def test_one_ssh_per_worker(fake_pod):
    done = fake_pod("ssh", "pod", "--worker=all", "--command=true", code=2)
    assert "one ssh per host" in done.stderr
    done = fake_pod("ssh", "pod", "--worker=4", "--command=true", code=1)
    assert "worker index 4 is larger than the valid worker indexes" in done.stderr


def test_preemption_kills_everything_and_only_there(fake_pod, tmp_path):
    fake_pod("create", "other", "--accelerator-type=v4-8", "--version=v")
    fake_pod.describe("other")
    detached = "setsid bash -c 'echo $$ > pid; exec sleep 60' > /dev/null 2>&1 < /dev/null & sleep 0.2"
    homes = []
    for name, worker in [("pod", 0), ("pod", 3), ("other", 0)]:
        fake_pod("ssh", name, f"--worker={worker}", f"--command={detached}")
        homes.append(fake_pod.cloud.home(name, worker))
    pids = [int(wait_for(lambda home=home: (home / "pid").exists() and (home / "pid").read_text())) for home in homes]
    waiting = fake_pod.start("ssh", "pod", "--worker=1", "--command=sleep 60")
    wait_for(lambda: len(fake_pod.cloud.processes("pod")) >= 3)
    died = clouds.preempt(fake_pod.state, "pod")
    assert set(pids[:2]) <= set(died)
    assert pids[2] not in died
    assert waiting.wait(20) == 255
    waiting.communicate()
    os.kill(pids[2], 0)
    assert fake_pod.cloud.processes("pod") == []
    assert fake_pod.describe()["state"] == "PREEMPTED"
    done = fake_pod.ssh("true", code=1)
    assert done.stderr == (
        "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) This TPU has terminal state "
        '"PREEMPTED", so it cannot be used anymore.\n'
    )
    # What was on its disks is gone with it.
    fake_pod("delete", "pod", "--quiet")
    fake_pod("create", "pod", "--accelerator-type=v4-32", "--version=v")
    fake_pod.describe()
    assert list(fake_pod.home().iterdir()) == []


def test_signals_reach_one_worker(fake_pod):
    processes = [fake_pod.start("ssh", "pod", f"--worker={i}", "--command=echo $$; exec sleep 60") for i in (0, 1)]
    for process in processes:
        process.stdout.readline()
    # The clients themselves are not on the worker.
    assert len(fake_pod.cloud.processes("pod", 0)) == 1
    (stopped,) = fake_pod.cloud.signal("pod", 0, signal.SIGSTOP)
    stat = pathlib.Path(f"/proc/{stopped}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    # The machine is still there, so gcloud runs the command again, and that dies as well.
    wait_for(lambda: (fake_pod.cloud.kill("pod", 0), processes[0].poll())[1] is not None)
    assert processes[0].returncode == 255
    assert processes[1].poll() is None
    for process in processes:
        process.kill()
    fake_pod.cloud.kill("pod")  # what the clients have left behind holds their pipes
    for process in processes:
        process.communicate()


def test_real_ssh_to_the_addresses_given(fake, tmp_path):
    """With a program in place of ssh that notes what it was called with; tests/pod.sh has the real one."""
    programs, noted = tmp_path / "bin", tmp_path / "noted"
    programs.mkdir()
    script = f"#!{sys.executable}\nimport json, sys\nopen({str(noted)!r}, 'a').write(json.dumps(sys.argv) + '\\n')\n"
    (programs / "ssh").write_text(script + "print(sys.stdin.read(), end='')\nsys.exit(7)\n")
    (programs / "ssh").chmod(0o755)
    settings = {"hosts": ["10.0.0.1", "10.0.0.2"], "identity": "/key", "user": "u", "options": ["A=b", "-C"]}
    (tmp_path / "ssh.json").write_text(json.dumps(settings))
    fake.environment["FAKE_GCLOUD_SSH"] = str(tmp_path / "ssh.json")
    fake.environment["PATH"] = f"{programs}:{fake.environment['PATH']}"
    clouds.settings(fake.state, creating_describes=0)
    fake("create", "pod", "--accelerator-type=v4-16", "--version=v")
    assert [end["ipAddress"] for end in fake.describe()["networkEndpoints"]] == ["10.0.0.1", "10.0.0.2"]
    assert fake.ssh("a 'b'", 1, stdin="in", code=7).stdout == "in"
    options = ["-i", "/key", "-o", "A=b", "-C"]
    assert [json.loads(line)[1:] for line in noted.read_text().splitlines()] == [
        ["-T", *options, "u@10.0.0.2", "--", "a 'b'"]
    ]
    clouds.add_fault(fake.state, "ssh", "ssh255_before")
    assert "connect to host 10.0.0.1 port 22" in fake.ssh("true", code=255).stderr
    assert len(noted.read_text().splitlines()) == 1
