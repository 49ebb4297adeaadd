"""What the launcher and its README ask of gcloud: the real one, where it is installed, and the stand-in."""

import re
import shlex
import tomllib

import pytest
from pods import backend, gcloud, settings
from pods.backend import PodError

from tests.launch.fake_gcloud import synopsis
from tests.launch.fake_gcloud.cloud import Cloud
from tests.launch.host_folder import LAUNCH
from tests.launch.pod import gcloud_here
from tests.launch.test_launch_readme import LINES, TEXT
from tests.launch.test_tpu_dry_run import EXPECTED
from tests.launch.tpu_api import real, server

pytestmark = pytest.mark.standard


class Pod(gcloud.TpuVm):
    """A pod whose commands one gcloud runs, on a cloud of the tests' own."""

    def __init__(self, cloud: Cloud, run):
        self.cloud = cloud
        runner = backend.Runner()
        runner.run = lambda argv, timeout, stdin=b"": backend.Result(*run(list(argv[1:])))
        super().__init__(settings.Settings("pod", "p", "us-central2-b", "v4-16"), runner)


@pytest.fixture(scope="module", params=[pytest.param(real.INSTALLED, id=real.NAME)])
def real_one(request, tmp_path_factory):
    """A cloud, and the real gcloud, which is loaded once and asks it; None where it is not installed."""
    if not request.param:
        yield None
        return
    folder = tmp_path_factory.mktemp("gcloud")
    cloud = Cloud(folder / "cloud")
    with (
        server.serving(cloud) as address,
        real.Gcloud(server.environment(address, folder / "home")) as run,
    ):
        yield cloud, run


@pytest.fixture(scope="module", params=["stand_in", *(["real"] if real.INSTALLED else [])])
def tpu(request, real_one, tmp_path_factory):
    if request.param == "real":
        return Pod(*real_one)
    cloud = Cloud(tmp_path_factory.mktemp("stand_in"))
    return Pod(cloud, lambda argv: vars(gcloud_here(cloud, argv)).values())


def state_of(tpu: Pod) -> str:
    """Returns the pod's state once it changes no more."""
    for _ in range(20):
        found = tpu.describe()
    return found.state


@pytest.mark.parametrize("queued", [False, True])
def test_the_life_of_a_pod(tpu, queued):
    tpu.settings = settings.Settings("pod", "p", "us-central2-b", "v4-16", queued=queued, spot=True)
    tpu.create()
    assert state_of(tpu) == "READY"
    with pytest.raises(PodError) as caught:
        tpu.create()
    assert caught.value.kind == "exists"
    found = tpu.describe()
    assert (found.request, found.label, len(found.hosts)) == ("pod" if queued else "", tpu.label, 2)
    assert [request.state for request in tpu.requests()] == ["ACTIVE"] * queued
    lines = tpu.runner.run(
        tpu._argv("tpu-vm", "ssh", "me@pod", "--command=true", "--worker=all", "--dry-run"), 1
    )
    last = lines.stdout.splitlines()[-2:]  # the real one makes a key first
    addresses = [gcloud.parse_route(line, [])[-2] for line in last]
    assert addresses == ["me@127.0.0.1", "me@127.0.0.2"]
    if not queued:
        tpu.cloud.stop("pod")
        assert tpu.describe().state == "STOPPED"
        tpu.start()
        assert state_of(tpu) == "READY"
    tpu.cloud.preempt("pod")
    assert tpu.describe().state == "PREEMPTED"
    tpu.delete(tpu.describe())
    assert tpu.describe().state == "ABSENT" and tpu.requests() == []


def calls_of(text: str) -> set[tuple[str, ...]]:
    """Returns the gcloud commands of a transcript, without the word gcloud."""
    return {
        tuple(shlex.split(line)[1:]) for line in text.splitlines() if line.startswith("gcloud ")
    }


def example_commands() -> list[str]:
    """Returns commands of launch/tpu.py with what launch/pod.toml.example says in each line, where it is for that."""
    commands = []
    for line in (LAUNCH / "pod.toml.example").read_text().splitlines():
        text, _, comment = line.removeprefix("# ").partition("  # ")
        name = text.partition(" = ")[0]
        if " = " not in text or name not in settings.FIELDS:
            continue
        value = tomllib.loads(text)[name]
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        flags = shlex.join([flag] if value is True else [f"{flag}={one}" for one in values])
        for track in ["alpha"] if "alpha" in comment else ["alpha", ""]:
            kinds = ["--spot --queued"] if "queued" in comment else ["--spot --queued", "--spot"]
            commands += [f"up {flags} --track={track} {kind}" for kind in kinds]
            commands += [
                f"{command} {flags} --track={track} {kinds[0]}" for command in ("status a", "down")
            ]
    return commands


def test_gcloud_takes_every_call_of_the_launcher(pod, real_one):
    """For every command, and with every setting of the example, in the track that it is for: by its own parser.

    By the stand-in's as well, and by that alone where gcloud is not installed.
    """
    calls = calls_of(EXPECTED.read_text())
    for command in example_commands():
        calls |= calls_of(pod.tpu(*shlex.split(command), "--dry-run"))
    assert len(calls) >= 100
    for call in calls:
        synopsis.parse(list(call))
    if real_one:
        assert {call: said for call in calls if (said := real_one[1](call, "parse"))[0]} == {}
        call = min(call for call in calls if "--" not in call)  # what follows that is ssh's
        assert real_one[1]([*call, "--bogus=1"], "parse")[0] == 2, "it refuses nothing"


def test_gcloud_takes_the_commands_of_the_page(real_one):
    """Where it is not installed, they are split by a shell's rules, and no more."""
    spans = re.findall(r"`(gcloud [^`]*)`", TEXT)
    commands = [
        shlex.split(line, comments=True)[1:]
        for line in [*LINES, *spans]
        if line.startswith("gcloud ")
    ]
    assert len(commands) >= 18
    if real_one:
        assert [words for words in commands if real_one[1](words, "parse")[0] != 0] == []
