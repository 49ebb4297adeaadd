"""The stand-in for gcloud says what the real one says, where that is installed: both are asked the same, of one API.

Where it is not, the names of the tests say so, and the stand-in is asked alone.
"""

import contextlib
import re
import subprocess
from collections.abc import Callable

import pytest

from tests.launch.fake_gcloud.cloud import Cloud
from tests.launch.pod import gcloud_here
from tests.launch.tpu_api import real, server
from tests.launch.tpu_api.errors import FAILED, REFUSED

pytestmark = pytest.mark.standard

AGAINST = [pytest.param(real.INSTALLED, id=real.NAME)]
PLACE = "--project=p --zone=us-central2-b"
NODE = "--accelerator-type=v4-16 --version=v"
QUEUED = "--accelerator-type=v6e-16 --runtime-version=v"
SSH = "tpu-vm ssh me@pod --ssh-key-file={key}"


class Asked:
    """A gcloud, and the cloud that it asks."""

    def __init__(self, run: Callable[[list[str]], tuple[int, str, str]], cloud: Cloud):
        self.run, self.cloud = run, cloud

    def __call__(self, line: str) -> tuple[int, str, str]:
        """Returns exit code, stdout and stderr, without what differs from call to call."""
        words = f"{line} {PLACE}".split()
        at = words[0] == "alpha"
        code, *texts = self.run([*words[:at], "compute", "tpus", *words[at:]])
        return code, *map(steady, texts)


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


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The stand-in, and the real one if it is installed."""
    folder = tmp_path_factory.mktemp("pair")
    clouds = [Cloud(folder / name) for name in ("first", "second")]
    key = folder / "home" / "key"
    variables = server.environment("", key.parent)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)

    def stand_in(argv: list[str]) -> tuple[int, str, str]:
        result = gcloud_here(clouds[0], [word.format(key=key) for word in argv])
        return result.code, result.stdout, result.stderr

    with contextlib.ExitStack() as stack:
        name = "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(name, variables[name])
        asked = [Asked(stand_in, clouds[0])]
        if real.INSTALLED:
            address = stack.enter_context(server.serving(clouds[1]))
            gcloud = stack.enter_context(real.Gcloud(server.environment(address, key.parent)))
            asked.append(Asked(lambda argv: gcloud([word.format(key=key) for word in argv]), clouds[1]))
        yield asked


@pytest.fixture
def both(pair):
    """That pair, each in an empty cloud."""
    for ask in pair:
        for path in ask.cloud.root.glob("*/*.json"):
            path.unlink()
        ask.cloud.settings(creating_describes=0, queue_describes=3, retry_seconds=0)
    return pair


@pytest.mark.parametrize("gcloud", AGAINST)
@pytest.mark.parametrize("kind", [*REFUSED, *FAILED])
def test_an_error_is_worded_as_gcloud_words_it(both, gcloud, kind):
    answers = []
    for ask in both:
        ask.cloud.add_fault("create", kind, times=20)  # UNAVAILABLE is tried again
        answers.append(ask(f"tpu-vm create pod {NODE}"))
        assert ask.cloud.all("nodes") == {}
    assert answers[0][0] == 1 and answers[0] == answers[-1]


# Lines to gcloud, those after "!" fail; in capitals what meanwhile becomes of the TPU, or of what is asked for next.
TPU = f"""
    tpu-vm create pod {NODE} --spot --labels=a=b,c=d
    ! tpu-vm create pod {NODE}
    tpu-vm describe pod --format=json
    tpu-vm list --format=json
    STOPPED
    ! {SSH} --command=true
    tpu-vm start pod --format=none
    tpu-vm describe pod --format=json
    ! {SSH} --worker=4 --command=true
    {SSH} --worker=all --dry-run --command=true --strict-host-key-checking=yes --ssh-flag=-C
    alpha {SSH} --worker=all --dry-run --command=true --tunnel-through-iap
    PREEMPTED
    ! {SSH} --command=true
    tpu-vm delete pod --quiet
    ! tpu-vm describe pod --format=json
    ! tpu-vm delete pod --quiet
    ! tpu-vm start pod --format=none
    ! {SSH} --command=true
    tpu-vm list --format=json
    ! tpu-vm create Pod {NODE}
    ! tpu-vm create pod {NODE} --bogus=3
    ! tpu-vm create pod {NODE} --spot=3
    ! tpu-vm create pod --accelerator-type=v4-8
    ! tpu-vm create pod --accelerator-type=v9-8 --version=v
"""
QUEUE = f"""
    queued-resources create q --node-id=pod {QUEUED} --spot --labels=a=b
    queued-resources describe q --format=json
    ACTIVE
    tpu-vm describe pod --format=json
    queued-resources describe q --format=json
    ! queued-resources delete q --quiet
    PREEMPTED
    queued-resources describe q --format=json
    queued-resources delete q --quiet --force
    ! tpu-vm describe pod --format=json
    FAILED
    queued-resources create q --node-id=pod {QUEUED}
    ACTIVE
    queued-resources describe q --format=json
    queued-resources list --format=json
    queued-resources delete q --quiet
"""


@pytest.mark.parametrize("gcloud", AGAINST)
@pytest.mark.parametrize("lines", [TPU, QUEUE], ids=["tpu", "queue"])
def test_what_gcloud_says_and_shows(both, gcloud, lines):
    for line in filter(None, map(str.strip, lines.splitlines())):
        if line.isupper():
            for ask in both:
                become(ask.cloud, line)
            continue
        answers = [ask(line.removeprefix("! ")) for ask in both]
        assert (answers[0][0] != 0) == line.startswith("! "), line
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
