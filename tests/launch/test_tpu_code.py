"""The archive that goes to the hosts: what is in it, and that its name says so."""

import hashlib
import io
import subprocess
import tarfile

import pytest
from pods import code
from pods.backend import SettingsError

pytestmark = pytest.mark.standard


@pytest.fixture
def repository(pod):
    return pod.repository


def content(packed: code.Code) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as tar:
        return {
            member.name: tar.extractfile(member).read() if member.isfile() else b""
            for member in tar
        }


def test_the_committed_code(repository):
    packed = code.pack()
    assert packed.hash == hashlib.sha256(packed.data).hexdigest() and "dirty" not in packed.label
    found = content(packed)
    files = {
        path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()
    }
    assert packed.files == found.keys() == {name for name in files if name[:5] != ".git/"}
    for path in repository.rglob("*.py"):
        path.chmod(0o600)  # who may read it here is nobody's business there
        path.touch()
    assert code.pack().data == packed.data


def test_a_dirty_tree_is_packed_and_named(pod, repository):
    clean = code.pack()
    (repository / "research" / "rare.py").write_text("changed")
    (repository / "configs" / "a.py").unlink()
    (repository / "configs" / "new.py").write_bytes(b"\0\xff")
    (repository / "link").symlink_to("research/rare.py")
    (repository / "run.sh").touch(0o755)
    pod.git("add", "configs/new.py", "link", "run.sh")
    packed = code.pack()
    found = content(packed)
    assert (
        found["research/rare.py"] == b"changed"
        and found["configs/new.py"] == b"\0\xff"
        and "configs/a.py" not in found
    )
    assert packed.hash != clean.hash and packed.label.endswith("-dirty)")
    # as the card of an export does
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    assert (
        packed.commit
        == f"{clean.commit}-dirty"
        == subprocess.check_output(describe, text=True).strip()
    )
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as tar:
        assert (
            tar.getmember("link").linkname == "research/rare.py"
            and tar.getmember("run.sh").mode == 0o755
        )
    pod.git("reset", "-q", "--hard")
    assert code.pack().data == clean.data


def test_a_forgotten_file_is_refused(pod, repository):
    (repository / "mlm" / "new module.py").touch()
    with pytest.raises(SettingsError, match=r"not known to git.*mlm/new module.py"):
        code.pack()
    pod.git("add", "-A")
    assert "mlm/new module.py" in code.pack().files
    (repository / "notes.txt").touch()  # elsewhere it is nobody's business
    code.pack()


def test_configs_must_be_in_it(repository, monkeypatch):
    packed = code.pack()
    assert packed.path_of("configs/a.py") == "configs/a.py"
    monkeypatch.chdir(repository / "configs")
    assert packed.path_of("a.py") == "configs/a.py"
    for bad in ("b.py", "/etc/passwd", "../../x.py"):
        with pytest.raises(SettingsError, match=f"{bad} is not in the code .* in {repository}"):
            packed.path_of(bad)
