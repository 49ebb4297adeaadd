import pytest

from tests.launch.fake_gcloud.cloud import kill_marked
from tests.launch.host_folder import HostFolder
from tests.launch.pod import FakePod


@pytest.fixture
def host(tmp_path):
    found = HostFolder(tmp_path / "host root")  # a space, as in some homes
    yield found
    kill_marked(str(found.root))  # which stands in the environment of all that runs there


@pytest.fixture
def pod(tmp_path, monkeypatch, capsys):
    """A pod that does not exist yet, and a folder of code that git does not know yet."""
    found = FakePod(tmp_path)
    found.enter(monkeypatch, capsys)
    yield found
    found.leave()


@pytest.fixture(scope="module")
def shared_pod(tmp_path_factory):
    """For `ready_pod`."""
    found = FakePod(tmp_path_factory.mktemp("pod"))
    found.commit()
    return found


@pytest.fixture
def ready_pod(shared_pod, monkeypatch, capsys):
    """A pod that is up and has the code; one for all tests of a file, without what their runs have left."""
    shared_pod.enter(monkeypatch, capsys)
    yield shared_pod
    shared_pod.leave()
