"""The folder in which the TPU API keeps everything, so that processes share it.

nodes.d, queued.d, operations.d   NAME.json: what GET answers, and keys of our own, which begin with "_"
faults/*.json                     what is to go wrong (see `add_fault`)
settings.json                     what differs from SETTINGS
"""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Collection, Iterator

SETTINGS = {
    "creating_describes": 1, "queue_describes": 1,
    "env": {},  # of commands on the hosts
    "addresses": [],  # of the hosts; default: those of the loopback
}  # fmt: skip


class Folder:
    def __init__(self, state: str | os.PathLike) -> None:
        self.root = pathlib.Path(state).resolve()
        for folder in ("nodes.d", "queued.d", "operations.d", "faults"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the state: there are many of us at once."""
        with (self.root / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def settings(self, **values: object) -> dict:
        """Sets some settings, and returns all."""
        file = self.root / "settings.json"
        settings = SETTINGS | (json.loads(file.read_text()) if file.exists() else {}) | values
        if values:
            file.write_text(json.dumps(settings))
        return settings

    def load(self, kind: str, name: str) -> dict | None:
        """Returns a resource ("nodes", "queued" or "operations"), or None."""
        file = self.root / f"{kind}.d" / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def save(self, kind: str, name: str, resource: dict | None) -> None:
        """None removes it."""
        file = self.root / f"{kind}.d" / f"{name}.json"
        if resource is None:
            file.unlink(missing_ok=True)
            return
        new = file.with_suffix(".new")
        new.write_text(json.dumps(resource, indent=1))
        new.rename(file)

    def change(self, kind: str, name: str, **fields: object) -> None:
        with self.lock():
            self.save(kind, name, self.load(kind, name) | fields)

    def all(self, kind: str) -> dict[str, dict]:
        names = sorted(file.stem for file in (self.root / f"{kind}.d").glob("*.json"))
        return {name: self.load(kind, name) for name in names}

    def add_fault(self, command: str, fault: str, times: int = 1, **more: object) -> None:
        """Plants a fault: the next `times` uses of a command ("create", "queued-resources create", ...) meet it."""
        number = len(list((self.root / "faults").iterdir()))
        file = self.root / "faults" / f"{number:03d}.json"
        file.write_text(json.dumps({"command": command, "fault": fault, "times": times, **more}))

    def fault(
        self, command: str, kinds: Collection[str], text: str, worker: int | None = None
    ) -> dict:
        """Returns the first fault that waits for such a command, and counts it down; {} if none does."""
        for file in sorted((self.root / "faults").glob("*.json")):
            fault = json.loads(file.read_text())
            if (
                fault["times"] > 0
                and fault["fault"] in kinds
                and fault["command"] in (command, command.partition(" ")[2])
                and fault.get("worker") in (None, worker)
                and fault.get("match", "") in text
            ):
                file.write_text(json.dumps(fault | {"times": fault["times"] - 1}))
                return fault
        return {}
