"""What the launcher asks of gcloud and reads from it: the real one, where it is installed, and the stand-in."""

import pytest
from pods import backend, gcloud, settings
from pods.backend import PodError

from tests.launch.fake_gcloud.cloud import Cloud
from tests.launch.pod import gcloud_here
from tests.launch.tpu_api import real, server

pytestmark = pytest.mark.standard


class Pod(gcloud.TpuVm):
    """A pod whose commands one gcloud runs, on a cloud of the tests' own."""

    def __init__(self, cloud: Cloud, run):
        self.cloud, runner = cloud, backend.Runner()
        runner.run = lambda argv, timeout, stdin=b"": backend.Result(*run(list(argv[1:])))
        super().__init__(settings.Settings("pod", "p", "us-central2-b", "v4-16"), runner)


@pytest.fixture(scope="module", params=["stand_in", *([real.NAME] if real.INSTALLED else [])])
def pod(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gcloud")
    cloud = Cloud(folder / "cloud")
    if request.param == "stand_in":
        yield Pod(cloud, lambda argv: vars(gcloud_here(cloud, argv)).values())
        return
    with server.serving(cloud) as address, real.Gcloud(server.environment(address, folder / "home")) as run:
        yield Pod(cloud, run)


def state_of(pod: Pod) -> str:
    """Returns the pod's state once it changes no more."""
    for _ in range(20):
        found = pod.describe()
    return found.state


@pytest.mark.parametrize("queued", [False, True])
def test_the_life_of_a_pod(pod, queued):
    pod.settings = settings.Settings("pod", "p", "us-central2-b", "v4-16", queued=queued, spot=True)
    pod.create()
    assert state_of(pod) == "READY"
    with pytest.raises(PodError) as caught:
        pod.create()
    assert caught.value.kind == "exists"
    found = pod.describe()
    assert (found.queued, found.ours, len(found.hosts)) == (queued, True, 2)
    assert [request.state for request in pod.requests()] == ["ACTIVE"] * queued
    lines = pod.runner.run(pod._argv("tpu-vm", "ssh", "me@pod", "--command=true", "--worker=all", "--dry-run"), 1)
    addresses = [
        gcloud.parse_route(line, [])[-2] for line in lines.stdout.splitlines()[-2:]
    ]  # the real one makes a key first
    assert addresses == ["me@127.0.0.1", "me@127.0.0.2"]
    if not queued:
        pod.cloud.stop("pod")
        assert pod.describe().state == "STOPPED"
        pod.start()
        assert state_of(pod) == "READY"
    pod.cloud.preempt("pod")
    assert pod.describe().state == "PREEMPTED"
    pod.delete(pod.describe())
    assert pod.describe().state == "ABSENT" and pod.requests() == []


KINDS = {"quota": "quota", "permission": "settings", "unavailable": "network", "stockout": "stockout"}


@pytest.mark.parametrize("fault", KINDS)
def test_a_refusal(pod, fault):
    pod.settings = settings.Settings("pod", "p", "us-central2-b", "v4-16")
    pod.cloud.add_fault("create", fault, times=20)  # what is unavailable is tried again
    with pytest.raises(PodError) as caught:
        pod.create()
    assert caught.value.kind == KINDS[fault] and pod.describe().state == "ABSENT"
    for file in (pod.cloud.root / "faults").iterdir():
        file.unlink()
