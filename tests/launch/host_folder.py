"""host.py on this machine, with a folder of its own."""

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

import host
import host_setup
import pytest

from tests import ROOT

LAUNCH = ROOT / "launch"
# a stand-in for the package: `python -m mlm CODE ...` runs the Python that its first argument or $STUB names
STUB = """import json, os, pathlib, signal, sys, time
print(json.dumps(sys.argv[1:]), flush=True)
folder = pathlib.Path(os.environ["MLM_HOST_DIR"])
exec(os.environ.get("STUB") or pathlib.Path("stub.py").read_text())
"""
HOSTILE = [
    "a b",
    "--flag=$(touch pwned)",
    "`touch pwned`",
    "'\"\\",
    "line\nline",
    "ü-语-\u202e",
    "-x",
    "",
    "*",
    "~",
]


def wait_for(condition, seconds: float = 20.0):
    """Returns what the condition gives, once it is true."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"it did not come true within {seconds} s")


def alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def keeper_of(process: int) -> int:
    # its parent
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


class HostFolder:
    """host.py on this machine, with a folder and code of its own."""

    PYTHON = sys._base_executable  # starts in a third of the time: no site-packages

    def __init__(self, root: pathlib.Path):
        self.root = root
        files = {
            "requirements.txt": b"",
            "stub.py": b"",
            "mlm/__init__.py": b"",
            "mlm/__main__.py": STUB.encode(),
        }
        self.archive, self.code = self.pack(files)
        self.unpack(self.code, self.archive)
        self.packages = "packages"
        (root / "venv" / "packages").mkdir(parents=True)
        host_setup.write(root / "venv" / "packages" / "python.json", {"python": self.PYTHON})

    def pack(
        self, files: dict[str, bytes], links: dict[str, str] | None = None
    ) -> tuple[bytes, str]:
        """Returns an archive, and its SHA-256; links: {name: what it points to}."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, target in (links or {}).items():
                info = tarfile.TarInfo(name)
                info.type = tarfile.SYMTYPE
                info.linkname = target
                tar.addfile(info)
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest()

    def unpack(self, code: str, archive: bytes) -> dict:
        return self.ask("unpack", code, stdin=archive)

    def popen(self, *argv: str, **more: str) -> subprocess.Popen:
        program = [self.PYTHON, "-S", str(LAUNCH / "host.py"), argv[0], str(self.root), *argv[1:]]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(program, text=True, env={**os.environ, **more}, **pipes)

    def ask(self, *argv: str, stdin: str | bytes = "", code: int = 0, **more: str) -> dict:
        if argv[0] == "install" and len(argv) == 2:
            argv = (*argv, self.PYTHON)
        if argv[0] == "start" and not code:  # it forks, which this process of many threads must not
            process = self.popen(*argv, **more)
            out, err = process.communicate(stdin, timeout=60)
            found = process.returncode
        else:
            with (
                pytest.MonkeyPatch.context() as patch,
                contextlib.redirect_stdout(io.StringIO()) as stdout,
            ):
                for name, value in more.items():
                    patch.setenv(name, value)
                data = stdin if isinstance(stdin, bytes) else stdin.encode()
                patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
                before = signal.getsignal(signal.SIGHUP)
                found = host.main([argv[0], str(self.root), *argv[1:]])
                signal.signal(signal.SIGHUP, before)
            out = stdout.getvalue()
            err = ""
        assert found == code, (out, err)
        lines = [line for line in out.splitlines() if line.startswith("mlm-host ")]
        assert len(lines) == 1, (out, err)
        return json.loads(lines[0].removeprefix("mlm-host "))

    def job(self, stub: str, run: str = "a", attempt: int = 1, argv=(), **env: str) -> str:
        job = {
            "id": run,
            "attempt": attempt,
            "code": self.code,
            "packages": self.packages,
            "argv": list(argv),
        }
        return json.dumps({**job, "program": "", "place": [], "env": {"STUB": stub, **env}})

    def start(self, stub: str, **more) -> dict:
        return self.ask("start", stdin=self.job(stub, **more))

    def running(self, stub: str, **more) -> int:
        """Starts a process, and returns its number."""
        assert self.start(stub, **more)["started"]
        return min(wait_for(lambda: host.processes(self.folder(more.get("run", "a")))))

    def status(self, run: str = "a", attempt: int = 1) -> dict:
        return self.ask("status", run, str(attempt))

    def folder(self, run: str = "a", attempt: int = 1) -> pathlib.Path:
        return self.root / "runs" / run / str(attempt)

    def ended(self, run: str = "a", attempt: int = 1) -> dict:
        file = self.folder(run, attempt) / "exit.json"
        wait_for(file.exists)
        return json.loads(file.read_text())
