"""The stand-in for gcloud says what the real one says, where that is installed: both are asked the same, of one API.

Where it is not, the names of the tests say so, and the stand-in is asked alone.
"""

import contextlib
import pathlib
import re
import subprocess
from collections.abc import Callable

import pytest

from tests.launch.fake_gcloud.cloud import Cloud
from tests.launch.pod import FAKE, HostFolder
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

    def __init__(self, run: Callable[[list[str]], tuple[int, str, str]], cloud: Cloud, key: pathlib.Path):
        self.run, self.cloud, self.key = run, cloud, key

    def __call__(self, line: str) -> tuple[int, str, str]:
        """Returns exit code, stdout and stderr, without what differs from call to call."""
        words = f"{line} {PLACE}".format(key=self.key).split()
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
    variables = server.environment("", key.parent) | {"FAKE_GCLOUD_STATE": str(clouds[0].root)}
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)

    def stand_in(argv: list[str]) -> tuple[int, str, str]:
        program = [HostFolder.PYTHON, "-S", "-E", FAKE / "gcloud", *argv]
        done = subprocess.run(program, env=variables, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    with contextlib.ExitStack() as stack:
        asked = [Asked(stand_in, clouds[0], key)]
        if real.INSTALLED:
            address = stack.enter_context(server.serving(clouds[1]))
            gcloud = stack.enter_context(real.Gcloud(server.environment(address, key.parent)))
            asked.append(Asked(gcloud, clouds[1], key))
        yield asked


@pytest.fixture
def both(pair):
    """That pair, each in an empty cloud."""
    for ask in pair:
        for path in ask.cloud.root.glob("*/*.json"):
            path.unlink()
        ask.cloud.settings(creating_describes=0, queue_describes=0, retry_seconds=0)
    yield pair
    for ask in pair:
        ask.cloud.end_hosts("pod", keep_disks=False)


@pytest.mark.parametrize("gcloud", AGAINST)
@pytest.mark.parametrize("kind", [*REFUSED, *FAILED])
def test_an_error_is_worded_as_gcloud_words_it(both, gcloud, kind):
    answers = []
    for ask in both:
        ask.cloud.add_fault("create", kind, times=20)  # UNAVAILABLE is tried again
        answers.append(ask(f"tpu-vm create pod {NODE}"))
        assert ask.cloud.all("nodes") == {}
    code, out, err = answers[0]
    assert (code, out) == (1, "") and "ERROR: (gcloud.compute.tpus.tpu-vm.create) " in err
    assert answers[0] == answers[-1]
    texts = [*REFUSED.get(kind, ("", "", ""))[:2], FAILED.get(kind, ("", ""))[1]]
    assert all(part in err for text in texts for part in re.split(r"\{.*?\}|['\"\[]", text))


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
    alpha queued-resources create q --node-id=pod {QUEUED} --network-config=network=a --network-config=network=b
    ACTIVE
    alpha queued-resources describe q --format=json
    alpha tpu-vm describe pod --format=json
    alpha {SSH} --worker=all --dry-run --command=true
"""
REFUSED_LINES = f"""
    ! tpu-vm create pod {NODE} --bogus=3
    ! tpu-vm create pod {NODE} --spot=3
    ! tpu-vm create pod --accelerator-type=v4-8
    ! tpu-vm create pod {NODE} --reservation=r
    ! queued-resources create q --node-id=pod {QUEUED} --max-run-duration=4h
    ! tpu-vm delete pod --force
"""


@pytest.mark.parametrize("gcloud", AGAINST)
@pytest.mark.parametrize("lines", [TPU, QUEUE, REFUSED_LINES], ids=["tpu", "queue", "refused"])
def test_what_gcloud_says_and_shows(both, gcloud, lines):
    for ask in both:
        ask.cloud.settings(queue_describes=3)
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


@pytest.fixture
def ssh(both):
    """The stand-in's ssh to the first of two hosts: takes a command, returns exit code and stdout."""
    both[0](f"tpu-vm create pod {NODE}")
    both[0]("tpu-vm describe pod")
    argv = f"compute tpus tpu-vm ssh pod {PLACE}".split()
    return lambda command: both[0].run([*argv, f"--command={command}"])[:2]


def test_a_host_of_the_stand_in_has_a_shell_of_its_own(both, ssh):
    cloud = both[0].cloud
    home = cloud.home("pod", 0)
    assert ssh("echo $HOME $PWD ${FAKE_GCLOUD_STATE-none}; exit 7") == (7, f"{home} {home} none\n")
    assert ssh("echo ran >> ran; kill -9 $$") == (255, "") and (home / "ran").read_text() == "ran\n" * 10
    assert ssh("setsid sleep 60 > /dev/null 2>&1 & echo $!")[0] == 0 and len(cloud.processes("pod")) == 1
    cloud.preempt("pod")
    assert cloud.processes("pod") == [] and home.exists()
    both[0]("tpu-vm delete pod --quiet")
    assert not home.exists()


@pytest.mark.parametrize(
    ("fault", "attempts", "ran", "answer"),
    [
        ("ssh255_before", 10, 0, (255, "")),
        ("ssh255_before", 1, 1, (0, "output\n")),
        ("ssh255_after", 10, 1, (255, "")),
        ("ssh255_after", 1, 2, (0, "output\n")),
        ("drop_midstream", 10, 1, (255, "out")),
        ("keys_not_propagated", 9, 1, (0, "output\n")),
    ],
)
def test_a_fault_of_a_connection(both, ssh, fault, attempts, ran, answer):
    both[0].cloud.add_fault("ssh", fault, match="ran", attempts=attempts)
    assert ssh("true") == (0, "")
    assert ssh("echo ran >> ran; echo output; sleep 0.5") == answer
    file = both[0].cloud.home("pod", 0) / "ran"
    assert (file.read_text().count("ran") if file.exists() else 0) == ran
