"""The state of the fake cloud: TPUs, queued resources, faults, and the processes that run on its workers.

All of it lies in one folder ($FAKE_GCLOUD_STATE):
    nodes.d/NAME.json, queued.d/NAME.json   what describe shows, and a few keys of our own that start with "_"
    NAME/I/home                             worker I of TPU NAME: its home folder
    faults/*.json                           faults to inject (see `add_fault`)
    settings.json                           {"creating_describes": n, "queue_describes": n, "quota_chips": n or null,
                                            "retry_seconds": s, "env": {...} of the workers}
    calls.jsonl, ssh.jsonl                  every command line of gcloud, and every one of ssh alone
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import signal
import time
from collections.abc import Iterator

SETTINGS = {"creating_describes": 1, "queue_describes": 1, "quota_chips": None, "retry_seconds": 0.05, "env": {}}
# PATH of a worker's ssh session: nothing of the caller's environment goes over ssh.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MARK = "FAKE_GCLOUD_WORKER"
FAULTS = (
    "stockout", "quota", "permission", "unavailable", "internal", "ssh255_before", "ssh255_after",
    "drop_midstream", "silent", "keys_not_propagated", "suspended", "failed",
)  # fmt: skip


class Cloud:
    """The folder and how to read and change it."""

    def __init__(self, state: str | os.PathLike) -> None:
        self.root = pathlib.Path(state).resolve()
        for folder in ("nodes.d", "queued.d", "faults"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the state: one ssh per worker means many of us at once."""
        with (self.root / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def settings(self) -> dict:
        """Returns the settings, defaults filled in."""
        file = self.root / "settings.json"
        return SETTINGS | (json.loads(file.read_text()) if file.exists() else {})

    def note_call(self, argv: list[str], name: str = "calls.jsonl") -> None:
        """Appends a command line to calls.jsonl."""
        line = json.dumps({"time": time.time(), "argv": argv}) + "\n"
        with (self.root / name).open("a") as file:
            file.write(line)

    def calls(self, name: str = "calls.jsonl") -> list[list[str]]:
        """Returns every command line so far."""
        file = self.root / name
        return [json.loads(line)["argv"] for line in file.read_text().splitlines()] if file.exists() else []

    def load(self, kind: str, name: str) -> dict | None:
        """Returns a resource ("nodes" or "queued"), or None."""
        file = self.root / f"{kind}.d" / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def save(self, kind: str, name: str, resource: dict | None) -> None:
        """Writes a resource; None removes it."""
        file = self.root / f"{kind}.d" / f"{name}.json"
        if resource is None:
            file.unlink(missing_ok=True)
            return
        new = file.with_suffix(".new")
        new.write_text(json.dumps(resource, indent=1))
        new.rename(file)

    def names(self, kind: str) -> list[str]:
        """Returns the names of all resources of a kind."""
        return sorted(file.stem for file in (self.root / f"{kind}.d").glob("*.json"))

    def home(self, name: str, worker: int) -> pathlib.Path:
        """Returns a worker's home folder."""
        return self.root / name / str(worker) / "home"

    def environment(self, name: str, worker: int) -> dict[str, str]:
        """Returns what a command on a worker finds in its environment."""
        home = str(self.home(name, worker))
        own = {"HOME": home, "USER": "me", "LOGNAME": "me", "SHELL": "/bin/bash", "LANG": "C.UTF-8", "PATH": PATH}
        return own | {MARK: home} | self.settings()["env"]

    def processes(self, name: str, worker: int | None = None) -> list[int]:
        """Returns the ids of all processes that run on a TPU, or on one worker of it, whatever their session."""
        prefix = str(self.root / name / ("" if worker is None else str(worker))).rstrip("/") + "/"
        marks = (f"{MARK}={prefix}".encode(), f"HOME={prefix}".encode())
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if any(variable.startswith(marks) for variable in variables):
                    found.append(int(entry.name))
        return found

    def signal(self, name: str, worker: int | None, number: int) -> list[int]:
        """Sends a signal to all processes of a worker (of all of them: None), and returns whom it reached."""
        hit = []
        for process in self.processes(name, worker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
                hit.append(process)
        return hit

    def kill(self, name: str, worker: int | None = None) -> list[int]:
        """Kills all processes of a TPU or of one worker: what happens when the machine goes away."""
        hit = []
        # A process may fork while we look: look again until there is none (a zombie's environment reads as empty).
        while new := self.signal(name, worker, signal.SIGKILL):
            hit += new
            time.sleep(0.01)
        return hit

    def remove_node(self, name: str) -> None:
        """Kills what runs on a TPU and removes it with its disks."""
        import shutil  # slow, and seldom needed

        self.kill(name)
        shutil.rmtree(self.root / name, ignore_errors=True)
        self.save("nodes", name, None)

    def fault(self, group: str, verb: str, worker: int | None, remote: str, kept: tuple[str, ...] = ()) -> dict | None:
        """Returns the first fault that waits for such a command, and counts it down. Call it under the lock.

        kept: faults that are not counted down.
        """
        for file in sorted((self.root / "faults").glob("*.json")):
            fault = json.loads(file.read_text())
            if (
                fault["times"] > 0
                and fault["command"] in (verb, f"{group} {verb}")
                and fault.get("worker") in (None, worker)
                and (fault.get("match") or "") in remote
            ):
                fault["times"] -= fault["fault"] not in kept
                file.write_text(json.dumps(fault))
                return fault
        return None


def add_fault(state: str | os.PathLike, command: str, fault: str, *, times: int = 1, **more: object) -> pathlib.Path:
    """Plants a fault: the next `times` invocations of `command` meet it. Returns its file.

    command: "create", "describe", "delete", "list", "ssh", or with its group: "queued-resources create".
    more: worker (an index; None: any), match (a substring of the remote command); for faults of the
    connection also attempts (how many of gcloud's ten attempts in one invocation fail; 10 = all, so that gcloud gives
    up with 255; 1 = gcloud itself runs the command again and gets through), bytes (drop_midstream: what still gets
    through) and seconds (silent: how long it hangs).
    """
    if fault not in FAULTS:
        raise ValueError(f"no such fault: {fault}; there are {', '.join(FAULTS)}")
    cloud = Cloud(state)
    number = len(list((cloud.root / "faults").iterdir()))
    file = cloud.root / "faults" / f"{number:03d}-{re.sub('[^a-z]', '-', command)}-{fault}.json"
    file.write_text(json.dumps({"command": command, "fault": fault, "times": times, **more}))
    return file


def preempt(state: str | os.PathLike, name: str) -> list[int]:
    """Takes a TPU away: all its processes die at once, its state is PREEMPTED, its queued resource is SUSPENDED.

    Returns the ids of the processes that died.
    """
    cloud = Cloud(state)
    with cloud.lock():
        node = cloud.load("nodes", name)
        if node is None:
            raise ValueError(f"no TPU {name} in {cloud.root}")
        node["state"] = "PREEMPTED"
        cloud.save("nodes", name, node)
        queued = node.get("queuedResource", "").rpartition("/")[2]
        if queued and (resource := cloud.load("queued", queued)):
            resource["state"]["state"] = "SUSPENDED"
            cloud.save("queued", queued, resource)
    return cloud.kill(name)


def stop(state: str | os.PathLike, name: str) -> None:
    """Stops a TPU, as `tpu-vm stop` does: its processes are gone, its disks stay."""
    cloud = Cloud(state)
    cloud.kill(name)
    with cloud.lock():
        cloud.save("nodes", name, cloud.load("nodes", name) | {"state": "STOPPED"})


def settings(state: str | os.PathLike, **values: object) -> None:
    """Sets some of SETTINGS."""
    cloud = Cloud(state)
    unknown = values.keys() - SETTINGS.keys()
    if unknown:
        raise ValueError(f"no such setting: {sorted(unknown)}")
    (cloud.root / "settings.json").write_text(json.dumps(cloud.settings() | values))
