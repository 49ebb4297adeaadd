import pytest

from tests.launch.pod import FakePod


@pytest.fixture
def pod(tmp_path, monkeypatch, capsys):
    """A pod that does not exist yet."""
    found = FakePod(tmp_path)
    found.enter(monkeypatch, capsys)
    yield found
    found.leave()


@pytest.fixture(scope="module")
def shared_pod(tmp_path_factory):
    """For `ready_pod`."""
    return FakePod(tmp_path_factory.mktemp("pod"))


@pytest.fixture
def ready_pod(shared_pod, monkeypatch, capsys):
    """A pod that is up and has the code; one for all tests of a file, without what their runs have left."""
    shared_pod.enter(monkeypatch, capsys)
    yield shared_pod
    shared_pod.leave()
