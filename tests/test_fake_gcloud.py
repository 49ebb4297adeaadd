"""The stand-in for gcloud says what the real one says, where that is installed: both are asked the same, of one API.

Where it is not, the names of the tests say so, and the stand-in is asked alone.
"""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.fake_gcloud.cloud import Cloud
from tests.fixtures_pods import FAKE
from tests.tpu_api import server
from tests.tpu_api.errors import FAILED, REFUSED

REAL = shutil.which("gcloud")
AGAINST = [pytest.param(REAL, id="against_gcloud" if REAL else "no_gcloud_here")]
PLACE = "--project=p --zone=us-central2-b"
NODE = "--accelerator-type=v4-16 --version=v"
QUEUED = "--accelerator-type=v6e-16 --runtime-version=v"
SSH = "tpu-vm ssh me@pod --ssh-key-file={key}"


@dataclasses.dataclass
class Asked:
    """One gcloud and the cloud that it asks."""

    gcloud: list[str]
    cloud: Cloud
    environment: dict[str, str]

    def __call__(self, command: str, *words: str) -> tuple[int, str, str]:
        """Returns exit code, stdout and stderr, without what differs from call to call."""
        track = "alpha " * command.startswith("alpha ")
        argv = f"{track}compute tpus {command.removeprefix('alpha ')} {PLACE}".split()
        argv = [word.format(key=f"{self.environment['HOME']}/key") for word in argv]
        done = subprocess.run([*self.gcloud, *argv, *words], env=self.environment, capture_output=True, text=True)
        return done.returncode, steady(done.stdout), steady(done.stderr)


def steady(text: str) -> str:
    """Returns what gcloud says without ids, times, folders, dots of progress, and its proposals."""
    text = re.sub(r"operation-[0-9a-f-]+", "OPERATION", text)
    text = re.sub(r"\n\.+(done|failed)", r"\n\1", text)
    text = re.sub(r'("id": "|tpu\.|t1v-n-)[0-9]+', r"\1ID", text)
    text = re.sub(r"[0-9]{4}-[0-9-]{5}T[0-9:.]+Z", "TIME", text)
    text = re.sub(r"[^ =]*/(home|some one)/", "HOME/", text)
    text = re.sub(r"/\S*python\S* \S*gcloud.py", "GCLOUD", text)
    text = re.sub(r"(?s)response: <.*?>, content", "content", re.sub("accessing <.*?>", "accessing", text))
    text = re.sub(r"(?s)(Usage: |\n *To search the help).*", "", re.sub(r" \(did you mean .*\)", "", text))
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


@pytest.fixture
def both(tmp_path):
    """The stand-in and the real one, or the stand-in alone."""
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    clouds = [Cloud(tmp_path / name) for name in ("first", "second")]
    for cloud in clouds:
        cloud.settings(creating_describes=0, queue_describes=0, retry_seconds=0)
    alone = server.environment("", tmp_path / "home") | {"FAKE_GCLOUD_STATE": str(clouds[0].root), "PATH": path}
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "home" / "key"], check=True)
    with server.serving(clouds[1]) as address:
        real = server.environment(address, tmp_path / "home")
        yield [Asked([str(FAKE / "gcloud")], clouds[0], alone)] + [Asked([REAL], clouds[1], real)] * bool(REAL)
    for cloud in clouds:
        cloud.kill("pod")


def slow(kind: str):
    """A case that takes the real one half a minute."""
    return pytest.param(kind, marks=pytest.mark.slow)


@pytest.mark.parametrize("gcloud", AGAINST)
@pytest.mark.parametrize("kind", [slow(kind) if kind == "unavailable" else kind for kind in (*REFUSED, *FAILED)])
def test_an_error_is_worded_as_gcloud_words_it(both, gcloud, kind):
    answers = []
    for ask in both:
        ask.cloud.add_fault("create", kind, times=20)  # UNAVAILABLE is tried again
        answers.append(ask(f"tpu-vm create pod {NODE}"))
        assert ask.cloud.names("nodes") == []
    code, out, err = answers[0]
    assert (code, out) == (1, "") and "ERROR: (gcloud.compute.tpus.tpu-vm.create) " in err
    assert answers[0] == answers[-1]
    texts = [*REFUSED.get(kind, ("", "", ""))[:2], FAILED.get(kind, ("", ""))[1]]
    assert all(part in err for text in texts for part in re.split(r"\{.*?\}|['\"\[]", text))


# Lines to gcloud, one after the other; in capitals what meanwhile becomes of the TPU, or of what is asked for next.
TPU = f"""
    tpu-vm create pod {NODE} --spot --labels=a=b,c=d
    tpu-vm create pod {NODE}
    tpu-vm describe pod --format=json
    tpu-vm list --format=json
    STOPPED
    {SSH} --command=true
    tpu-vm start pod --format=none
    tpu-vm describe pod --format=json
    {SSH} --worker=4 --command=true
    {SSH} --worker=all --dry-run --command=true --strict-host-key-checking=yes --ssh-flag=-C
    alpha {SSH} --worker=all --dry-run --command=true --tunnel-through-iap
    PREEMPTED
    {SSH} --command=true
    tpu-vm delete pod --quiet
    tpu-vm describe pod --format=json
    tpu-vm delete pod --quiet
    tpu-vm start pod --format=none
    {SSH} --command=true
    tpu-vm list --format=json
    tpu-vm create Pod {NODE}
    tpu-vm create pod --accelerator-type=v9-8 --version=v
"""
QUEUE = f"""
    queued-resources create q --node-id=pod {QUEUED} --spot --labels=a=b
    queued-resources describe q --format=json
    ACTIVE
    tpu-vm describe pod --format=json
    queued-resources describe q --format=json
    queued-resources delete q --quiet
    PREEMPTED
    queued-resources describe q --format=json
    queued-resources delete q --quiet --force
    tpu-vm describe pod --format=json
    FAILED
    queued-resources create q --node-id=pod {QUEUED}
    ACTIVE
    queued-resources describe q --format=json
    queued-resources list --format=json
    queued-resources create r --node-id=pod {QUEUED}
    queued-resources delete q --quiet
    alpha queued-resources create q --node-id=pod {QUEUED} --network-config=network=a --network-config=network=b
    ACTIVE
    alpha queued-resources describe q --format=json
    alpha tpu-vm describe pod --format=json
    alpha {SSH} --worker=all --dry-run --command=true
"""
REFUSED_LINES = f"""
    tpu-vm create pod {NODE} --bogus=3
    tpu-vm create pod {NODE} --spot=3
    tpu-vm create pod --accelerator-type=v4-8
    tpu-vm create pod {NODE} --reservation=r
    queued-resources create q --node-id=pod {QUEUED} --max-run-duration=4h
    tpu-vm delete pod --force
"""


@pytest.mark.parametrize("gcloud", AGAINST)
@pytest.mark.parametrize("lines", [TPU, QUEUE, REFUSED_LINES], ids=["tpu", "queue", "refused"])
def test_what_gcloud_says_and_shows(both, gcloud, lines):
    for ask in both:
        ask.cloud.settings(quota_chips=16, queue_describes=3)
    for line in filter(None, map(str.strip, lines.splitlines())):
        if line.isupper():
            for ask in both:
                become(ask.cloud, line)
            continue
        answers = [ask(line) for ask in both]
        assert answers[0] == answers[-1], f"{line}\n{answers[0][1:]}\n{answers[-1][1:]}"


def become(cloud: Cloud, state: str) -> None:
    if state == "FAILED":
        cloud.add_fault("queued-resources create", "failed")
    elif state == "PREEMPTED":
        cloud.preempt("pod")
    elif state == "ACTIVE":  # or whatever else its end is
        for _ in range(20):
            cloud.request("GET", "/v2/projects/p/locations/us-central2-b/queuedResources/q")
    else:
        cloud.change("nodes", "pod", state=state)
