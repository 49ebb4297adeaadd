"""The TPU API of tests/launch/tpu_api whose hosts are folders and processes of this machine.

In the folder of the API:
    NAME/I/home               host I of TPU NAME: its home folder
    calls.jsonl, ssh.jsonl    every command line of gcloud, and every one of ssh alone
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import time

from tests.launch.tpu_api import model

MARK = "FAKE_GCLOUD_WORKER"
# What ssh says to each fault of a connection: it is lost before or after a command has run, or in its answer.
REASONS = {
    "ssh255_before": "ssh: connect to host {ip} port 22: Connection timed out",
    "ssh255_after": "client_loop: send disconnect: Broken pipe",
    "drop_midstream": "Connection to {ip} closed by remote host.\nclient_loop: send disconnect: Broken pipe",
    "silent": "",
}


class Cloud(model.Cloud):
    """The API's folder, and its hosts."""

    user = "me"
    user_home = "/home/some one"  # of whoever calls gcloud
    account = "me@example.com"

    def note_call(self, argv: list[str], name: str = "calls.jsonl") -> None:
        with (self.root / name).open("a") as file:
            file.write(json.dumps(argv) + "\n")

    def calls(self, name: str = "calls.jsonl") -> list[list[str]]:
        file = self.root / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def home(self, name: str, worker: int) -> pathlib.Path:
        return self.root / name / str(worker) / "home"

    def begin_hosts(self, name: str, addresses: list[str]) -> None:
        for worker in range(len(addresses)):
            self.home(name, worker).mkdir(parents=True, exist_ok=True)

    def end_hosts(self, name: str, keep_disks: bool) -> None:
        """Kills what runs on the hosts of a node."""
        self.kill(name)
        if not keep_disks:
            shutil.rmtree(self.root / name, ignore_errors=True)

    def environment(self, name: str, worker: int) -> dict[str, str]:
        """Returns what a command on a host finds in its environment: nothing of the caller's goes over ssh."""
        home = str(self.home(name, worker))
        variables = {
            "HOME": home,
            "USER": "me",
            "LOGNAME": "me",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
        }
        return variables | {MARK: home} | self.settings()["env"]

    def kill(self, name: str) -> None:
        """Kills all processes of a TPU, whatever their session: what happens when the machines go away."""
        kill_marked(f"{MARK}={self.root / name}/")

    def stop(self, name: str) -> None:
        """Stops a TPU, as `tpu-vm stop` does: its processes are gone, its disks stay."""
        self.kill(name)
        self.change("nodes", name, state="STOPPED")


def kill_marked(mark: str) -> None:
    """Kills all processes with a text in their environment, but this one."""
    running = [0]
    while running:  # a process may fork while we look (a zombie's environment reads as empty)
        running = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (
                    int(entry.name) != os.getpid()
                    and mark.encode() in (entry / "environ").read_bytes()
                ):
                    running.append(int(entry.name))
                    os.kill(int(entry.name), signal.SIGKILL)
        time.sleep(0.01)
