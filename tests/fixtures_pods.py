"""A host's folder, and a pod of the fake cloud with a small repository, whose `python -m mlm` does what a test says."""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import time

import pytest

LAUNCH = pathlib.Path(__file__).parents[1] / "launch"
FAKE = pathlib.Path(__file__).parent / "fake_gcloud"
# a stand-in for the package: `python -m mlm CODE ...` runs the Python that its first argument or $STUB names
STUB = """import json, os, pathlib, signal, sys, time
print(json.dumps(sys.argv[1:]), flush=True)
folder = pathlib.Path(os.environ["MLM_HOST_DIR"])
exec(os.environ.get("STUB") or pathlib.Path("stub.py").read_text())
"""


def wait_for(condition, seconds: float = 20.0):
    """Returns what the condition gives, once it is true."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"it did not come true within {seconds} s")


class HostFolder:
    """host.py on this machine, with a folder and code of its own."""

    PYTHON = sys._base_executable  # starts in a third of the time: no site-packages

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.environment = {**os.environ, "MLM_POD_ROOT": str(root), "MLM_POD_PYTHON": self.PYTHON}
        files = {"requirements.txt": b"", "stub.py": b"", "mlm/__init__.py": b"", "mlm/__main__.py": STUB.encode()}
        self.archive, self.code = self.pack(files)
        self.ask("unpack", self.code, str(self.archive))
        self.requirements = self.ask("install", self.code)["requirements"]

    def pack(self, files: dict[str, bytes]) -> tuple[pathlib.Path, str]:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        path = self.root.parent / "code.tar.gz"
        path.write_bytes(buffer.getvalue())
        return path, hashlib.sha256(buffer.getvalue()).hexdigest()

    def popen(self, *argv: str, **more) -> subprocess.Popen:
        program = [self.PYTHON, "-I", str(LAUNCH / "host.py"), *argv]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(program, text=True, env={**self.environment, **more}, **pipes)

    def ask(self, *argv: str, stdin: str = "", code: int = 0, **more: str) -> dict:
        if argv[0] == "start":  # it forks, which this process of many threads must not
            process = self.popen(*argv, **more)
            out, err = process.communicate(stdin, timeout=60)
            found = process.returncode
        else:
            import host

            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as stdout:
                for name, value in {**self.environment, **more}.items():
                    patch.setenv(name, value)
                found = host.main(list(argv))
            out, err = stdout.getvalue(), ""
        assert found == code, (out, err)
        lines = [line for line in out.splitlines() if line.startswith("mlm-host ")]
        assert len(lines) == 1, (out, err)
        return json.loads(lines[0].removeprefix("mlm-host "))

    def job(self, stub: str, run: str = "a", attempt: int = 1, argv=(), **env: str) -> str:
        job = {"id": run, "attempt": attempt, "code": self.code, "requirements": self.requirements, "argv": list(argv)}
        return json.dumps({**job, "env": {"STUB": stub, **env}, "process": 0, "processes": 1})

    def start(self, stub: str, **more) -> dict:
        return self.ask("start", stdin=self.job(stub, **more))

    def folder(self, run: str = "a", attempt: int = 1) -> pathlib.Path:
        return self.root / "runs" / run / str(attempt)

    def ended(self, run: str = "a", attempt: int = 1) -> dict:
        file = self.folder(run, attempt) / "exit.json"
        wait_for(file.exists)
        return json.loads(file.read_text())

    def kill_all(self) -> None:
        """Kills whatever still carries this folder in its environment."""
        mark = str(self.root).encode()
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(process.name) != os.getpid() and mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture
def host(tmp_path):
    found = HostFolder(tmp_path / "host root")  # a space, as in some homes
    yield found
    found.kill_all()


class FakePod:
    """A v4-32 of the fake cloud, four hosts, and the launcher as a function."""

    def __init__(self, folder: pathlib.Path, capsys):
        self.state, self.repository, self.capsys = folder / "cloud", folder / "repository", capsys
        self.home = self.state / "my-pod"

    def tpu(self, *argv: str, code: int | None = 0) -> str:
        """Runs launch/tpu.py in this process; returns what it printed, and then what it said on stderr."""
        import tpu

        found = tpu.main([argv[0], *argv[1:]])
        out, err = self.capsys.readouterr()
        assert code is None or found == code, (found, out, err)
        return out + err

    def stub(self, text: str) -> None:
        """Sets what `python -m mlm` does, and commits it."""
        (self.repository / "stub.py").write_text(text)
        self.git("add", "-A")
        self.git("commit", "-qm", "stub", "--allow-empty")

    def git(self, *words: str) -> None:
        subprocess.run(["git", "-C", str(self.repository), *words], check=True, capture_output=True)

    def ready(self, stub: str = "") -> None:
        """Brings the pod up and the code to it."""
        self.stub(stub)
        self.tpu("up", "--every=0.01")
        self.tpu("sync")

    def host_folder(self, worker: int, run: str = "a", attempt: int = 1) -> pathlib.Path:
        return self.home / str(worker) / "home" / ".mlm-pod" / "runs" / run / str(attempt)

    def calls(self) -> list[list[str]]:
        file = self.state / "calls.jsonl"
        return [json.loads(line)["argv"] for line in file.read_text().splitlines()] if file.exists() else []

    def fault(self, command: str, fault: str, **more) -> None:
        fake_cloud().add_fault(self.state, command, fault, **more)


def fake_cloud():
    """Returns the module of the fake gcloud."""
    if str(FAKE) not in sys.path:
        sys.path.append(str(FAKE))
    import cloud

    return cloud


@pytest.fixture
def pod(tmp_path, monkeypatch, capsys):
    found = FakePod(tmp_path, capsys)
    (found.repository / "mlm").mkdir(parents=True)
    (found.repository / "configs").mkdir()
    for name, text in {
        "requirements.txt": "",
        ".gitignore": "/runs/\n",
        "mlm/__init__.py": "",
        "mlm/__main__.py": STUB,
        "configs/a.py": "",
        "stub.py": "",
        "pod.toml": 'name = "my-pod"\nproject = "my-project"\nzone = "us-central2-b"\naccelerator_type = "v4-32"\n'
        f'bucket = "gs://my-bucket/runs"\npython = "{sys.executable}"\n',
    }.items():
        (found.repository / name).write_text(text)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.com")
        monkeypatch.setenv(f"GIT_{name}_DATE", "2026-01-01T00:00:00Z")
    found.git("init", "-q", "-b", "main")
    found.git("add", "-A")
    found.git("commit", "-qm", "first")
    monkeypatch.chdir(found.repository)
    monkeypatch.setenv("PATH", f"{FAKE}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_GCLOUD_STATE", str(found.state))
    from pods import fanout

    monkeypatch.setattr(fanout, "BACKOFF", (0.05, 0.1))
    fake_cloud().settings(found.state, retry_seconds=0.01)
    yield found
    fake_cloud().Cloud(found.state).kill("my-pod")
