"""What the launcher and its README ask of gcloud: the real one, where it is installed, and the stand-in."""

import contextlib
import dataclasses
import re
import shlex
import time
import tomllib

import pytest
from pods import backend, gcloud, settings
from pods.backend import Host, Pod, PodError

from tests.launch import LAUNCH
from tests.launch.pod import StandIn
from tests.launch.test_launch_readme import LINES, TEXT
from tests.launch.tpu_api import real, server
from tests.launch.tpu_api.model import Cloud

pytestmark = pytest.mark.standard


@contextlib.contextmanager
def answering(run):
    """Has a function of gcloud's arguments answer the launcher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "run", lambda argv, *_: run(list(argv[1:])))
        yield


@pytest.fixture(scope="module", params=[pytest.param(real.INSTALLED, id=real.NAME)])
def real_one(request, tmp_path_factory):
    """A cloud, and the real gcloud, which is loaded once and asks it; None where it is not installed."""
    if not request.param:
        yield None
        return
    folder = tmp_path_factory.mktemp("gcloud")
    cloud = Cloud()
    with (
        server.serving(cloud) as address,
        real.Gcloud(server.environment(address, folder / "home")) as run,
    ):
        yield cloud, run


@pytest.fixture(params=["stand_in", *(["real"] if real.INSTALLED else [])])
def cloud(request, real_one, tmp_path):
    """A cloud that gcloud, or its stand-in, asks."""
    if request.param == "real":
        cloud, run = real_one
        with answering(lambda argv: backend.Result(*run(argv))):
            yield cloud
    else:
        cloud = StandIn(tmp_path / "hosts")
        with answering(cloud.gcloud):
            yield cloud


def state_of(tpu: gcloud.TpuVm) -> str:
    """Returns the pod's state once it changes no more."""
    for _ in range(20):
        pod = tpu.describe()
    return pod.state


@pytest.mark.parametrize("queued", [False, True])
def test_the_life_of_a_pod(cloud, queued):
    chosen = settings.Settings("pod", "p", "us-central2-b", "v4-16", queued=queued, spot=True)
    tpu = gcloud.TpuVm(chosen)
    tpu.create()
    assert state_of(tpu) == "READY"
    with pytest.raises(PodError, match="already exists"):
        tpu.create()
    pod = tpu.describe()
    assert (pod.request, pod.label, len(pod.hosts)) == ("pod" if queued else "", tpu.label, 2)
    way = ["ssh", "me@pod", "--command=true", "--worker=all", "--dry-run"]
    lines = backend.run(tpu._argv("tpu-vm", *way), 1).stdout.splitlines()
    # the real one makes a key first
    addresses = [gcloud.parse_route(line, [])[-2] for line in lines[-2:]]
    assert addresses == ["me@127.0.0.1", "me@127.0.0.2"]
    cloud.preempt("pod")
    assert tpu.describe().state == "PREEMPTED"
    tpu.delete(tpu.describe())
    assert tpu.describe().state == "ABSENT"


def calls_of(chosen: settings.Settings) -> list[list[str]]:
    """Returns what gcloud is called with to create a pod and to go to its hosts, without the word gcloud."""
    calls = []
    pod = Pod("pod", "READY", (Host(0, "10.0.0.1"),), identity=str(time.time_ns()))
    with answering(lambda argv: calls.append(argv) or backend.Result(0, "me")):
        tpu = gcloud.TpuVm(chosen)
        tpu.create()
        with contextlib.suppress(PodError):  # the way to its hosts is "me"
            tpu.connect(pod)
    return calls


def example_settings() -> list[settings.Settings]:
    """Returns a pod for each line of launch/pod.toml.example, those that are commented out as well."""
    found = []
    base = settings.Settings("pod", "p", "us-central2-b", "v4-16", spot=True)
    for line in (LAUNCH / "pod.toml.example").read_text().splitlines():
        text, _, comment = line.removeprefix("# ").partition("  # ")
        name = text.partition(" = ")[0]
        if " = " not in text or name not in vars(base):
            continue
        value = tomllib.loads(text)[name]
        value = tuple(value) if isinstance(value, list) else value
        for track in ["alpha"] if "alpha" in comment else ["alpha", ""]:
            for queued in [True] if "queued" in comment else [True, False]:
                more = {"track": track, "queued": queued, name: value}
                found.append(dataclasses.replace(base, **more))
    return found


def test_gcloud_takes_every_call_of_the_launcher(real_one, tmp_path, monkeypatch):
    """With every setting of the example, in the track that it is for: by its own parser, where it is installed."""
    monkeypatch.chdir(tmp_path)
    calls = [call for chosen in example_settings() for call in calls_of(chosen)]
    assert len(calls) >= 100
    if real_one:
        assert [said for call in calls if (said := real_one[1](call, "parse"))[0]] == []
        assert real_one[1]([*calls[0], "--bogus=1"], "parse")[0] == 2, "it refuses nothing"


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
