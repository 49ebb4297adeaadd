"""A pod of the small TPU API, and a small repository, whose `python -m mlm` does what a test says.

Stand-ins for gcloud and for ssh, in this process; the hosts are folders here.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import host
import host_setup
import pytest
from pods import backend, follow, hosts, lifetime, supervise

from tests.launch.tpu_api import model
from tests.launch.tpu_api.model import ApiError

PYTHON = sys._base_executable  # starts in a third of the time: no site-packages
# a stand-in for the package: `python -m mlm ...` runs the Python that $STUB names
STUB = """import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["MLM_HOST_DIR"])
print(json.dumps(sys.argv[1:]), flush=True)
exec(os.environ["STUB"])
"""
# the handler first: a test sends SIGTERM as soon as it sees this line
WAITS = (
    "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(75)))\n"
    "print('up', flush=True)\n"
    "time.sleep(60)"
)
RUN = ("run", "configs/a.py")
MARK = "MLM_TEST_HOST"
METHODS = {"create": "POST", "delete": "DELETE", "describe": "GET"}
# What ssh says to each fault of a connection: it is lost before or after a command has run.
REASONS = {
    "before": "ssh: connect to host {ip} port 22: Connection timed out",
    "denied": "me@{ip}: Permission denied (publickey).",
    "after": "client_loop: send disconnect: Broken pipe",
}
SETTINGS = {
    "name": "my-pod",
    "project": "my-project",
    "zone": "us-central2-b",
    "accelerator_type": "v4-16",
    "bucket": "gs://my-bucket/runs",
}


def wait_for(condition, seconds: float = 60.0):
    """Returns what the condition gives, once it is true."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"it did not come true within {seconds} s")


def alive(process: int) -> bool:
    try:
        return (
            pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except FileNotFoundError:
        return False


def kill_marked(mark: str) -> None:
    """Kills all processes with a text in their environment, but this one."""
    running = [0]
    while running:  # a process may fork while we look (a zombie's environment reads as empty)
        running = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_marked = mark.encode() in (entry / "environ").read_bytes()
                if is_marked and int(entry.name) != os.getpid():
                    running.append(int(entry.name))
                    os.kill(int(entry.name), signal.SIGKILL)
        time.sleep(0.01)


class StandIn(model.Cloud):
    """The TPU API, whose hosts are folders, and gcloud, as far as the launcher uses it."""

    account = "me@example.com"

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__()
        self.folder = folder
        self.calls: list[list[str]] = []
        self.timeouts: list[float] = []  # of each call, in seconds
        self.ssh_faults: list[tuple[str, int, str]] = []  # (fault, worker, a word of the command)

    def home(self, worker: int) -> pathlib.Path:
        return self.folder / str(worker)

    def begin_hosts(self, name: str, count: int) -> None:
        for worker in range(count):
            self.home(worker).mkdir(parents=True)

    def end_hosts(self, name: str) -> None:
        kill_marked(f"{MARK}={self.folder}/")
        shutil.rmtree(self.folder, ignore_errors=True)

    def ssh_fault(self, worker: int, command: str) -> str:
        for fault in self.ssh_faults:
            if fault[1] == worker and fault[2] in command:
                self.ssh_faults.remove(fault)
                return fault[0]
        return ""

    def gcloud(self, argv: list[str], timeout: float = 0.0) -> backend.Result:
        """Returns what gcloud prints, and how it ends."""
        if argv[0] == "config":
            return backend.Result(0, f"{self.account}\n")
        self.calls.append(argv)
        self.timeouts.append(timeout)
        _, _, group, verb, name, *rest = argv
        flags = dict(word.partition("=")[::2] for word in rest)
        try:
            answer = self._do(group, verb, name, flags)
        except ApiError as refused:
            error = refused.error
            if error["code"] == 503:
                text = f"HttpError: response: <{{'status': 503}}>, content <{json.dumps({'error': error})}>"
            else:
                text = f"{error['status']}: {error['message']}"
            answer = backend.Result(1, "", f"ERROR: (gcloud.compute.tpus.{group}.{verb}) {text}")
        return answer

    def _do(self, group: str, verb: str, name: str, flags: dict[str, str]) -> backend.Result:
        parent = f"projects/{flags['--project']}/locations/{flags['--zone']}"
        if verb == "ssh":
            return self._ssh(parent, name, flags)
        kind = "nodes" if group == "tpu-vm" else "queuedResources"
        path = f"/v2/{parent}/{kind}"
        query = {}
        body = None
        if verb == "create":
            query = {"nodeId" if kind == "nodes" else "queuedResourceId": name}
            labels = dict([flags["--labels"].split("=")]) if "--labels" in flags else {}
            body = {"acceleratorType": flags["--accelerator-type"], "labels": labels}
            if kind != "nodes":
                body = {"tpu": {"nodeSpec": [{"node": body, "nodeId": flags["--node-id"]}]}}
        else:
            path += f"/{name}"
        if "--force" in flags:
            query = {"force": "true"}
        answer = self.request(METHODS[verb], path, query, body)
        if verb == "describe":
            return backend.Result(0, json.dumps(answer))
        error = self.request("GET", f"/v2/{answer['name']}").get("error")
        return backend.Result(int(bool(error)), "", f"ERROR: {json.dumps(error)}" if error else "")

    def _ssh(self, parent: str, target: str, flags: dict[str, str]) -> backend.Result:
        user, _, name = target.rpartition("@")
        node = self.request("GET", f"/v2/{parent}/nodes/{name}")
        ips = [end["ipAddress"] for end in node["networkEndpoints"]]
        if "--dry-run" in flags:
            alias = f"-o HostKeyAlias=tpu.{node['id']}"
            lines = [
                f"/bin/ssh -T -i /home/some one/.ssh/key {alias}-{worker} {user or 'me'}@{ip} -- true"
                for worker, ip in enumerate(ips)
            ]
            return backend.Result(0, "\n".join(lines))
        if self.ssh_fault(int(flags["--worker"]), "true"):
            return backend.Result(255, "", REASONS["before"].format(ip=ips[0]))
        return backend.Result(0)


class FakePod:
    """A v4-16, two hosts, a repository, and the launcher as a function."""

    def __init__(self, folder: pathlib.Path):
        self.repository = folder / "repository"
        self.cloud = StandIn(folder / "hosts")
        self.stub = ""
        self.capsys = None
        self.synced = False
        for name in ("mlm", "configs", "research"):
            (self.repository / name).mkdir(parents=True)
        for name, text in {
            ".gitignore": "/runs/\n",
            "mlm/__main__.py": STUB,
            "configs/a.py": "",
            "research/beside.py": "WORD = 'imported'\n",
            "research/rare.py": "import beside, sys\nprint(beside.WORD, *sys.argv[1:3])\n",
        }.items():
            (self.repository / name).write_text(text)
        self.settings()
        self.git("init", "-q", "-b", "main")
        self.git("add", "-A")
        self.git("commit", "-qm", "first")

    def settings(self, **values: object) -> None:
        """Writes pod.toml."""
        values = SETTINGS | {"python": PYTHON} | values
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in values.items()]
        (self.repository / "pod.toml").write_text("".join(lines))

    def enter(self, patch: pytest.MonkeyPatch, capsys) -> None:
        """Puts this process where a researcher would be, with little patience."""
        self.capsys = capsys
        self.real = backend.run
        patch.chdir(self.repository)
        patch.setattr(hosts, "BACKOFF", (0.05, 0.1))
        patch.setattr(lifetime, "EVERY", 0.01)
        patch.setattr(follow, "EVERY", 0.02)
        patch.setattr(supervise, "EVERY", 0.1)

        def answer(argv, timeout, stdin=b""):
            if argv[0] == "gcloud":
                return self.cloud.gcloud(list(argv[1:]), timeout)
            return self._ssh(list(argv), stdin)

        patch.setattr(backend, "run", answer)

    def leave(self) -> None:
        """Ends all runs, and removes what is left of them here and on the hosts."""
        kill_marked(f"{MARK}={self.cloud.folder}/")
        for folder in [*self.cloud.folder.glob("*/.mlm-pod/runs"), self.repository / "runs"]:
            shutil.rmtree(folder, ignore_errors=True)
        self.cloud.calls.clear()
        self.cloud.timeouts.clear()
        self.cloud.ssh_faults.clear()

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
        self.stub = stub
        if not self.synced:
            self.tpu("up")
            self.tpu("sync")
        self.synced = True

    def git(self, *words: str) -> None:
        """Runs git, with a clock that stands still."""
        who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
        when = {"GIT_COMMITTER_EMAIL": "a@b", "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z"}
        environment = os.environ | who | when | {"GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
        line = ["git", "-C", self.repository, *words]
        subprocess.run(line, check=True, capture_output=True, env=environment)

    def host_folder(self, worker: int, run: str = "a", attempt: int = 1) -> pathlib.Path:
        return self.cloud.home(worker) / ".mlm-pod" / "runs" / run / str(attempt)

    def processes(self) -> list[int]:
        return [
            number for worker in range(2) for number in host.processes(self.host_folder(worker))
        ]

    def starts(self) -> int:
        """Returns how many processes of runs have been started."""
        return len(list(self.cloud.folder.glob("*/.mlm-pod/runs/*/*/job.json")))

    def verbs(self) -> list[str]:
        """Returns what every gcloud so far was asked to do, such as "tpu-vm create"."""
        return [" ".join(call[2:4]) for call in self.cloud.calls]

    def _ssh(self, argv: list[str], stdin: bytes) -> backend.Result:
        """Returns what a command on a host comes to, over a connection that may be lost."""
        number, worker = re.search(r"HostKeyAlias=tpu\.([0-9]+)-([0-9]+)", " ".join(argv)).groups()
        node = self.cloud.nodes.get("my-pod", {})
        lost = backend.Result(255, "", REASONS["before"].format(ip="127.0.0.1"))
        if node.get("id") != number or node["state"] != "READY":
            return lost
        fault = self.cloud.ssh_fault(int(worker), argv[-1])
        if fault == "silent":
            return backend.Result(None)
        if fault in ("before", "denied"):
            return backend.Result(255, "", REASONS[fault].format(ip="127.0.0.1"))
        home = self.cloud.home(int(worker))
        words = shlex.split(argv[-1])
        if "start" in words:  # it forks, which this process of many threads must not
            variables = {"HOME": home, "PATH": "/usr/bin:/bin", MARK: home, "STUB": self.stub}
            pairs = [f"{name}={value}" for name, value in variables.items()]
            line = ["env", "-i", *pairs, PYTHON, "-S", "-E", *words[1:]]
            result = self.real(line, 60.0, stdin)
        else:
            result = host_here(words[words.index("host.py") + 1 :], home / ".mlm-pod", stdin)
        return backend.Result(255, "", REASONS["after"]) if fault else result


def host_here(words: list[str], root: pathlib.Path, stdin: bytes) -> backend.Result:
    """Runs host.py with a folder in this process, as many at once as there are hosts."""
    name, *words = words
    answer, *kinds = host.COMMANDS[name]
    arguments = [kind(word) for kind, word in zip(kinds, words, strict=True)]
    if name == "unpack":
        answer = host_setup.unpack
        arguments = [*arguments, stdin.partition(b"\n")[2]]
    try:
        report = answer(root, *arguments)
        code = 0
    except (host_setup.HostError, OSError, ValueError) as error:
        report = {"error": str(error)}
        code = 1
    return backend.Result(code, "mlm-host " + json.dumps(report))
