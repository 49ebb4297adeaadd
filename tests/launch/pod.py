"""A pod of the fake cloud, and a small repository, whose `python -m mlm` does what a test says."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading

import host
import host_checks
import host_setup
import pytest
from pods import backend, hosts

from tests.launch.fake_gcloud import commands, synopsis
from tests.launch.fake_gcloud.cloud import REASONS, Cloud
from tests.launch.host_folder import STUB, HostFolder

WAITS = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(75))); time.sleep(60)"
RUN = ("run", "configs/a.py", "--every=0.05")
PLACE = ("--project=my-project", "--zone=us-central2-b")
NODE = ("--accelerator-type=v4-16", "--version=tpu-ubuntu2204-base")
PRINTED = threading.Lock()  # what is printed belongs to one gcloud


class FakePod:
    """A v4-16 of the fake cloud, two hosts, a repository, and the launcher as a function.

    gcloud and the hosts answer in this process, but for runs that start.
    """

    def __init__(self, folder: pathlib.Path):
        self.state = folder / "cloud"
        self.repository = folder / "repository"
        self.bin = folder / "bin"
        self.home = self.state / "my-pod"
        self.capsys = None
        self.synced = False
        with (
            socket.create_server(("127.0.0.1", 0)) as one,
            socket.create_server(("127.0.0.1", 0)) as other,
        ):
            # other tests have pods of their own
            self.numbers = [server.getsockname()[1] for server in (one, other)]
        self.bin.mkdir()
        for name in ("gcloud", "python3", "ssh"):
            (self.bin / name).write_text(f'#!/bin/sh\nexec {HostFolder.PYTHON} -S -E "$@"\n')
            # it starts in a third of the time, without site-packages
            (self.bin / name).chmod(0o755)
        for name in ("mlm", "configs", "research", "launch"):
            (self.repository / name).mkdir(parents=True)
        for name, text in {
            "requirements.txt": "",
            ".gitignore": "/runs/\n",
            "mlm/__init__.py": "",
            "mlm/__main__.py": STUB,
            "configs/a.py": "",
            "stub.py": "",
            "research/beside.py": "WORD = 'imported'\n",
            "research/rare.py": "import beside, sys\nprint(beside.WORD, *sys.argv[1:3])\n",
            "pod.toml": 'name = "my-pod"\nproject = "my-project"\nzone = "us-central2-b"\n'
            'accelerator_type = "v4-16"\nbucket = "gs://my-bucket/runs"\n'
            f'python = "{self.bin}/python3"\n',
        }.items():
            (self.repository / name).write_text(text)
        self.cloud = Cloud(self.state)
        self.cloud.connect = self._connect

    def commit(self) -> None:
        self.git("init", "-q", "-b", "main")
        self.git("add", "-A")
        self.git("commit", "-qm", "first")

    def enter(self, patch: pytest.MonkeyPatch, capsys) -> None:
        """Puts this process where a researcher would be."""
        self.capsys = capsys
        run = backend.Runner.run
        patch.chdir(self.repository)
        patch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("HOME", str(self.bin))  # ssh's sockets
        patch.setattr(host_checks, "PORTS", self.numbers)
        patch.setattr(hosts, "BACKOFF", (0.05, 0.1))

        def answer(runner, argv, timeout, stdin=b""):
            if runner.dry or pathlib.Path(shutil.which(argv[0]) or "/").parent != self.bin:
                return run(runner, argv, timeout, stdin)
            words = list(argv[1:])
            return self._gcloud(words) if argv[0] == "gcloud" else self._ssh(words, stdin)

        self.run = lambda argv, stdin: run(backend.Runner(), argv, 60.0, stdin)
        patch.setattr(backend.Runner, "run", answer)

    def leave(self) -> None:
        """Ends all runs, and removes what is left of them here and on the hosts."""
        self.cloud.kill("my-pod")
        for folder in [*self.home.glob("*/home/.mlm-pod/runs"), self.repository / "runs"]:
            shutil.rmtree(folder, ignore_errors=True)
        for file in [
            self.state / "calls.jsonl",
            self.state / "ssh.jsonl",
            *(self.state / "faults").iterdir(),
        ]:
            file.unlink(missing_ok=True)

    def tpu(self, *argv: str, code: int = 0) -> str:
        """Runs launch/tpu.py in this process; returns what it printed, and then what it said on stderr."""
        import tpu

        self.capsys.readouterr()
        found = tpu.main(list(argv))
        out, err = self.capsys.readouterr()
        assert found == code, (found, out, err)
        return out + err

    def ready(self, stub: str = "") -> None:
        """Brings the pod up and the code to it, once; `python -m mlm` is to do what the stub says."""
        self.cloud.settings(env={"STUB": stub, "PATH": f"{self.bin}:/usr/bin:/bin"})
        if not self.synced:
            self.tpu("up", "--every=0.01")
            self.tpu("sync")
        self.synced = True

    def git(self, *words: str) -> None:
        """Runs git, with a clock that stands still."""
        who = {
            f"GIT_{name}_{key}": "a@b"
            for name in ("AUTHOR", "COMMITTER")
            for key in ("NAME", "EMAIL")
        }
        when = {f"GIT_{name}_DATE": "2026-01-01T00:00:00Z" for name in ("AUTHOR", "COMMITTER")}
        environment = {**os.environ, **who, **when}
        subprocess.run(
            ["git", "-C", str(self.repository), *words],
            check=True,
            capture_output=True,
            env=environment,
        )

    def by_hand(self, *words: str) -> str:
        """Runs gcloud as a colleague does, without the launcher; returns what it prints."""
        result = self._gcloud(["compute", "tpus", *words, *PLACE])
        assert result.code == 0, result.stderr
        return result.stdout

    def host_folder(self, worker: int, run: str = "a", attempt: int = 1) -> pathlib.Path:
        return self.home / str(worker) / "home" / ".mlm-pod" / "runs" / run / str(attempt)

    def processes(self, run: str = "a", attempt: int = 1) -> list[int]:
        folders = [self.host_folder(worker, run, attempt) for worker in range(2)]
        return [process for folder in folders for process in host.processes(folder)]

    def starts(self) -> int:
        """Returns how many processes of runs have been started."""
        return len(list(self.home.glob("*/home/.mlm-pod/runs/*/*/job.json")))

    def verbs(self) -> list[str]:
        """Returns what every gcloud so far was asked to do, such as "tpu-vm create"."""
        return [" ".join(call[2:4]) for call in self.cloud.calls()]

    def _gcloud(self, argv: list[str]) -> backend.Result:
        if argv[0] != "config":
            self.cloud.note_call(argv)
        return gcloud_here(self.cloud, argv)

    def _ssh(self, argv: list[str], stdin: bytes) -> backend.Result:
        self.cloud.note_call(argv, "ssh.jsonl")
        alias = re.search(r"HostKeyAlias=tpu\.([0-9]+)-([0-9]+)-", " ".join(argv))
        node = self.cloud.load("nodes", "my-pod")
        ends = (
            [end["ipAddress"] for end in node["networkEndpoints"]]
            if node and node["id"] == alias[1]
            else []
        )
        ip = argv[-3].rpartition("@")[2]
        if ip not in ends or node["state"] != "READY":
            return backend.Result(255, "", REASONS["ssh255_before"].format(ip=ip))
        return self._on_host(int(alias[2]), argv[-1], stdin)

    def _connect(self, node: dict, worker: int, words: list[str]) -> int:
        result = self._on_host(worker, words[-1])
        print(result.stdout, end="")
        print(result.stderr, file=sys.stderr)
        return result.code

    def _on_host(self, worker: int, command: str, stdin: bytes = b"") -> backend.Result:
        """Returns what a command on a host comes to, over a connection that may be lost."""
        with self.cloud.lock():
            fault = self.cloud.fault("tpu-vm ssh", REASONS, command, worker).get("fault")
        lost = backend.Result(255, "", REASONS.get(fault, "").format(ip=f"127.0.0.{worker + 1}"))
        if fault == "silent":
            return backend.Result(None)
        if fault == "ssh255_before":
            return lost
        home = self.cloud.home("my-pod", worker)
        words = shlex.split(command)
        if command == "true":
            result = backend.Result(0)
        elif "start" in words:  # it forks
            variables = [
                f"{name}={value}"
                for name, value in self.cloud.environment("my-pod", worker).items()
            ]
            result = self.run(
                ["env", "-i", "-C", str(home), *variables, "/bin/bash", "-c", command], stdin
            )
        else:
            result = host_here(words[words.index("host.py") + 1 :], home, stdin)
        middle = len(result.stdout) // 2 if fault == "drop_midstream" else 0
        return dataclasses.replace(lost, stdout=result.stdout[:middle]) if fault else result


def host_here(words: list[str], home: pathlib.Path, stdin: bytes) -> backend.Result:
    """Runs host.py for a home in this process, as many at once as there are hosts."""
    name, root, *words = words
    answer, *kinds = host.COMMANDS[name]
    arguments = [kind(word) for kind, word in zip(kinds, words, strict=True)]
    if name == "unpack":
        answer = host_setup.unpack
        arguments = [*arguments, stdin.partition(b"\n")[2]]
    try:
        report = answer(pathlib.Path(root.replace("~", str(home))), *arguments)
        code = 0
    except (host_setup.HostError, OSError, ValueError) as error:
        report = {"error": str(error)}
        code = 1
    return backend.Result(code, "mlm-host " + json.dumps(report))


def gcloud_here(cloud: Cloud, argv: list[str]) -> backend.Result:
    if argv[0] == "config":
        return backend.Result(0, f"{cloud.account}\n")
    with (
        PRINTED,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = commands.run(cloud, synopsis.parse(argv))
        except synopsis.RefusedError as error:
            code = error.code
            print(error, file=sys.stderr)
    return backend.Result(code, out.getvalue(), err.getvalue())
