"""--dry-run prints the exact gcloud argument lists, for every command, and changes nothing."""

import os
import pathlib
import re
import shlex
import shutil

import pytest
from pods.gcloud import PATIENCE

EXPECTED = pathlib.Path(__file__).parent / "dry_run.txt"
COMMANDS = (
    "up",
    "up --queued --spot --network=my-network --create-flags=--labels=team=nlp --create-flags=--internal-ips",
    "sync",
    "preflight --user=someone --track=alpha --ssh-flags=--tunnel-through-iap",
    "run configs/a.py --id='my first' --config.train.steps=3 --env=WANDB_API_KEY -- --split=test",
    "status",
    "status a",
    "logs a",
    "stop a --grace=60",
    "supervise configs/a.py --config.train.steps=3",
    "clean",
    "down",
    "down --queued",
)


@pytest.mark.standard
def test_a_transcript_of_every_command(pod, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    pod.commit()
    git = pod.bin / "only git"
    git.mkdir()
    (git / "git").symlink_to(shutil.which("git"))
    monkeypatch.setenv("PATH", str(git))  # a dry run needs no gcloud
    before = sorted(pod.repository.rglob("*"))
    parts = []
    for command in COMMANDS:
        words = shlex.split(command)
        words[1:1] = [] if words[0] == "run" else ["--hosts=1"]  # one call says it as well as two
        at = words.index("--") if "--" in words else len(words)
        said = pod.tpu(*words[:at], "--dry-run", *words[at:])
        parts.append(f"$ python launch/tpu.py {command}\n{said}")
    assert pod.cloud.calls() == [] and sorted(pod.repository.rglob("*")) == before
    # without what differs from machine to machine
    found = re.sub(r"\b[0-9a-f]{64}\b", "CODE", "\n".join(parts)).replace(f"{pod.bin}/python3", "/opt/python")
    if os.environ.get("RENEW_GOLDEN"):
        EXPECTED.write_text(found)
    assert found == EXPECTED.read_text(), "if that is wanted: RENEW_GOLDEN=1 bash tests/run.sh launch -k transcript"


def as_gcloud(argv: list[str]) -> list[str]:
    """Returns the gcloud call that starts such an ssh."""
    worker = int(argv[-3].rpartition(".")[2]) - 1
    where = [f"--worker={worker}", f"--command={argv[-1]}", PATIENCE, "--project=my-project", "--zone=us-central2-b"]
    return ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-pod", *where]


@pytest.mark.standard
def test_what_is_printed_is_what_is_called(ready_pod):
    ready_pod.ready("sys.exit(0)")
    command = ("run", "configs/a.py", "--config.x=$(touch pwned) 'a' \"b\"")
    printed = [line for line in ready_pod.tpu(*command, "--dry-run").splitlines() if not line.startswith("#")]
    cloud = ready_pod.cloud
    before, before_ssh = len(cloud.calls()), len(cloud.calls("ssh.jsonl"))
    ready_pod.tpu(*command, "--every=0.05")
    called = [["gcloud", *argv] for argv in cloud.calls()[before:]]
    assert {argv[4] for argv in called} == {"describe"}, "gcloud has said before how ssh reaches the hosts"
    called += [as_gcloud(argv) for argv in cloud.calls("ssh.jsonl")[before_ssh:]]

    def steady(argv: list[str]) -> tuple[str, ...]:
        """Without how far a log has come, and the attempt whose state is known: a slow host is asked once more."""
        return tuple(re.sub(r"( logs '~/.mlm-pod' a 1 | status '~/.mlm-pod' a )[0-9]+", r"\1N", word) for word in argv)

    assert {steady(shlex.split(line)) for line in printed} == {steady(argv) for argv in called}
