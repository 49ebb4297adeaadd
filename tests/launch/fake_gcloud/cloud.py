"""The TPU API of tests/launch/tpu_api whose hosts are folders and processes of this machine.

In the folder of the API ($FAKE_GCLOUD_STATE):
    NAME/I/home               host I of TPU NAME: its home folder
    calls.jsonl, ssh.jsonl    every command line of gcloud, and every one of ssh alone
"""

import contextlib
import json
import os
import pathlib
import signal
import time

from tests.launch.tpu_api import model

# PATH of a host's ssh session: nothing of the caller's environment goes over ssh.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MARK = "FAKE_GCLOUD_WORKER"
SSH_FAULTS = {"ssh255_before", "ssh255_after", "drop_midstream", "silent", "keys_not_propagated"}


class Cloud(model.Cloud):
    """The API's folder, and its hosts."""

    user, user_home = "me", "/home/some one"  # of whoever calls gcloud

    def look(self, resource: str) -> dict | None:
        """Returns a node without letting time pass, or None."""
        node = self.load("nodes", resource.rpartition("/")[2])
        return node if node and node["name"] == resource else None

    def note_call(self, argv: list[str]) -> None:
        """Appends a command line to its file."""
        alone = argv[0] == "--ssh"
        with (self.root / ("ssh.jsonl" if alone else "calls.jsonl")).open("a") as file:
            file.write(json.dumps(["ssh", *argv[1:]] if alone else argv) + "\n")

    def calls(self, name: str = "calls.jsonl") -> list[list[str]]:
        """Returns every command line so far."""
        file = self.root / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def home(self, name: str, worker: int) -> pathlib.Path:
        """Returns a host's home folder."""
        return self.root / name / str(worker) / "home"

    def begin_hosts(self, name: str, addresses: list[str]) -> None:
        """Makes the homes of a node's hosts."""
        for worker in range(len(addresses)):
            self.home(name, worker).mkdir(parents=True, exist_ok=True)

    def end_hosts(self, name: str, keep_disks: bool) -> None:
        """Kills what runs on the hosts of a node."""
        self.kill(name)
        if not keep_disks:
            import shutil  # slow, and seldom needed

            shutil.rmtree(self.root / name, ignore_errors=True)

    def environment(self, name: str, worker: int) -> dict[str, str]:
        """Returns what a command on a host finds in its environment."""
        home = str(self.home(name, worker))
        variables = {"HOME": home, "USER": "me", "LOGNAME": "me", "SHELL": "/bin/bash", "LANG": "C.UTF-8", "PATH": PATH}
        return variables | {MARK: home} | self.settings()["env"]

    def processes(self, name: str) -> list[int]:
        """Returns the ids of all processes that run on a TPU, whatever their session."""
        prefix = f"{self.root / name}/"
        marks, running = (f"{MARK}={prefix}".encode(), f"HOME={prefix}".encode()), []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if any(variable.startswith(marks) for variable in variables):
                    running.append(int(entry.name))
        return running

    def kill(self, name: str) -> None:
        """Kills all processes of a TPU: what happens when the machines go away."""
        # A process may fork while we look: look again until there is none (a zombie's environment reads as empty).
        while running := self.processes(name):
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)

    def add_fault(self, command: str, fault: str, times: int = 1, **more: object) -> None:
        """Plants a fault of the API, or, for "ssh", of a connection.

        more: worker (an index; None: any), match (a part of the command on the host, or of the resource's name).
        """
        if fault not in model.FAULTS | SSH_FAULTS:
            raise ValueError(f"no such fault: {fault}; there are {sorted(model.FAULTS | SSH_FAULTS)}")
        super().add_fault(command, fault, times, **more)

    def stop(self, name: str) -> None:
        """Stops a TPU, as `tpu-vm stop` does: its processes are gone, its disks stay."""
        self.kill(name)
        self.change("nodes", name, state="STOPPED")
