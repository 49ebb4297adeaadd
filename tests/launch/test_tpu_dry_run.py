"""--dry-run prints the exact gcloud argument lists, for every command, and changes nothing."""

import os
import pathlib
import re
import shlex
import shutil

import pytest

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
    found = re.sub(r"\b[0-9a-f]{64}\b", "CODE", "\n".join(parts)).replace(
        f"{pod.bin}/python3", "/opt/python"
    )
    if os.environ.get("RENEW_GOLDEN"):
        EXPECTED.write_text(found)
    assert found == EXPECTED.read_text(), (
        "if that is wanted: RENEW_GOLDEN=1 bash tests/run.sh launch -k transcript"
    )
