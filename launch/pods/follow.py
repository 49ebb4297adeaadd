"""The logs of all hosts: one file each under runs/pods/{id}/{attempt}/, and every line on the terminal, prefixed."""

from __future__ import annotations

import base64
import contextlib
import functools
import time
from collections.abc import Callable, Collection

import host_setup

from pods.backend import ABSENT, GONE, Host
from pods.errors import PodError
from pods.hosts import Answer, Hosts, label
from pods.runs import RunStatus, how_it_ended, records, status

MOST = 1 << 20  # bytes of a log in one answer
SHOW = functools.partial(print, flush=True)


class Follower:
    """Brings the logs of one attempt here. A file's size is how far it has come, so it goes on where it was."""

    def __init__(self, hosts: Hosts, run: str, attempt: int, *, only: Collection[int] = (), show: Callable = SHOW):
        """only: workers whose lines are shown (default: all); show: takes a line."""
        self.hosts, self.run, self.attempt, self.only, self.show = hosts, run, attempt, only, show
        self.folder = records(run) / str(attempt)
        self.files = {host: self.folder / f"{host.worker}.log" for host in hosts.all}
        self.half: dict[Host, bytes] = {}  # a line that has not ended yet
        self.faults: dict[Host, str] = {}
        self.ended: set[Host] = set()

    def alone(self) -> contextlib.AbstractContextManager:
        """Holds the run's log files here. Raises PodError if another process does."""
        refusal = PodError(f"somebody follows this run here already: tail -f {self.folder}/*.log")
        return contextlib.nullcontext() if self.hosts.dry else host_setup.alone(self.folder / ".lock", refusal)

    def round(self) -> bool:
        """Asks every host once; returns whether all of them have ended and said all."""
        words = {}
        for host, file in self.files.items():
            if host not in self.ended:
                offset = file.stat().st_size if file.exists() else 0
                words[host] = ["logs", "--", self.run, str(self.attempt), str(offset), str(MOST)]
        for answer in self.hosts.ask(words):
            if not self.hosts.dry:
                self._take(answer)
        return self.hosts.dry or len(self.ended) == len(self.files)

    def _take(self, answer: Answer) -> None:
        host, data, file = answer.host, answer.data, self.files[answer.host]
        if answer.error:
            if self.faults.get(host) != answer.error:
                self.show(f"{label(host)} does not answer: {answer.error}")
            self.faults[host] = answer.error
            return
        if self.faults.pop(host, None):
            self.show(f"{label(host)} answers again")
        if file.exists() and data["size"] < file.stat().st_size:  # it is another host by now, with a log of its own
            file.rename(file.with_suffix(f".{int(time.time())}.log"))
            return
        new = base64.b64decode(data["data"])
        with file.open("ab") as log:
            log.write(new)
        self._show(host, new)
        if data["state"] != "running" and data["offset"] >= data["size"]:
            self._show(host, b"\n" if self.half[host] else b"")
            self.ended.add(host)
            self.show(", ".join([f"{label(host)}: {data['state']}", *how_it_ended(data["exit"])]))

    def _show(self, host: Host, new: bytes) -> None:
        *whole, self.half[host] = (self.half.get(host, b"") + new).split(b"\n")
        if not self.only or host.worker in self.only:
            for line in whole:
                self.show(f"[{host.worker}] {line.decode(errors='replace')}")


def follow(follower: Follower, every: float) -> RunStatus:
    """Follows until the run has ended on all hosts; returns how. Raises PodError if the pod is gone."""
    hosts = follower.hosts
    with follower.alone():
        while not follower.round():
            if follower.faults:
                _require_pod(hosts)
            time.sleep(max(every, len(hosts.all) / 8))  # each question costs a process here
    return status(hosts, follower.run, follower.attempt)


def _require_pod(hosts: Hosts) -> None:
    try:
        state = hosts.cloud.describe().state
    except PodError as error:
        if error.kind != "network":
            raise
        return
    if state in (*GONE, ABSENT):
        raise PodError(f"{hosts.pod.name} is {state}: launch/tpu.py supervise gets another and goes on.", "absent")
