"""The archive that goes to the hosts: what is in it, and that its name says so."""

import hashlib
import io
import json
import tarfile

import pytest
from pods import code
from pods.errors import PodError, SettingsError


def content(packed: code.Code) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as tar:
        return {member.name: tar.extractfile(member).read() if member.isfile() else b"" for member in tar}


@pytest.mark.standard
def test_the_committed_code(pod):
    packed = code.pack(pod.repository)
    assert packed.hash == hashlib.sha256(packed.data).hexdigest()
    found = content(packed)
    assert set(found) == {
        "requirements.txt", ".gitignore", "mlm/__init__.py", "mlm/__main__.py", "configs/a.py", "stub.py", "pod.toml",
        ".mlm-code.json",
    }  # fmt: skip
    assert json.loads(found[".mlm-code.json"]) == {"commit": packed.commit, "patch": None}
    assert packed.files == found.keys() and packed.patch == ""


def test_bytes_depend_on_the_content_alone(pod):
    first = code.pack(pod.repository)
    for path in pod.repository.rglob("*.py"):
        path.chmod(0o600)  # who may read it here is nobody's business there
        path.touch()
    assert code.pack(pod.repository).data == first.data


@pytest.mark.standard
def test_a_dirty_tree_is_patched_and_named(pod):
    clean = code.pack(pod.repository)
    (pod.repository / "stub.py").write_text("changed")
    (pod.repository / "configs" / "a.py").unlink()
    (pod.repository / "configs" / "new.py").write_bytes(b"\0\xff")
    (pod.repository / "link").symlink_to("stub.py")
    (pod.repository / "run.sh").touch(0o755)
    pod.git("add", "configs/new.py", "link", "run.sh")
    packed = code.pack(pod.repository)
    found = content(packed)
    assert found["stub.py"] == b"changed" and found["configs/new.py"] == b"\0\xff" and "configs/a.py" not in found
    assert packed.hash != clean.hash and packed.commit == clean.commit
    assert json.loads(found[".mlm-code.json"])["patch"] == packed.patch and len(packed.patch) == 64
    assert f"commit {packed.commit[:12]} with patch {packed.patch[:12]}" in packed.label
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as tar:
        assert tar.getmember("link").linkname == "stub.py" and tar.getmember("run.sh").mode == 0o755
    pod.git("checkout", "-q", "-f", "HEAD", "--", ".")
    pod.git("reset", "-q", "--hard")
    assert code.pack(pod.repository).data == clean.data


@pytest.mark.standard
@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("target", ["/etc/passwd", "../../elsewhere", "../configs/../../x"])
def test_a_link_that_leaves_the_repository_is_refused(pod, target, is_committed):
    (pod.repository / "configs" / "inside.py").symlink_to("../stub.py")
    (pod.repository / "configs" / "data").symlink_to(target)
    pod.git("add", "-A")
    if is_committed:
        pod.git("commit", "-qm", "links")
    with pytest.raises(SettingsError, match="a link that leaves the repository") as caught:
        code.pack(pod.repository)
    assert f"configs/data (to {target})" in str(caught.value) and "inside" not in str(caught.value)
    (pod.repository / "configs" / "data").unlink()  # the working tree counts, not what was committed
    assert "configs/inside.py" in code.pack(pod.repository).files


@pytest.mark.standard
def test_a_forgotten_file_is_refused(pod):
    (pod.repository / "mlm" / "new module.py").touch()
    with pytest.raises(SettingsError, match=r"mlm/new module.py is not known to git and would not reach the hosts"):
        code.pack(pod.repository)
    pod.git("add", "-A")
    assert "mlm/new module.py" in code.pack(pod.repository).files
    (pod.repository / "notes.txt").touch()  # elsewhere it is nobody's business
    code.pack(pod.repository)


def test_configs_must_be_in_it(pod, monkeypatch):
    packed = code.pack(pod.repository)
    assert code.path_in(pod.repository, packed, "configs/a.py") == "configs/a.py"
    monkeypatch.chdir(pod.repository / "configs")
    assert code.path_in(pod.repository, packed, "a.py") == "configs/a.py"
    for bad in ("b.py", "/etc/passwd", "../../x.py"):
        with pytest.raises(SettingsError, match="is not in the code that goes to the hosts"):
            code.path_in(pod.repository, packed, bad)


def test_outside_of_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(SettingsError, match="is in no git repository"):
        code.repository()
    with pytest.raises(PodError, match="git rev-parse failed"):
        code.pack(tmp_path)
