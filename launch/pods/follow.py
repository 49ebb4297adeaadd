"""The logs of all hosts: one file each under runs/pods/{id}/{attempt}/, and every line on the terminal, prefixed."""

from __future__ import annotations

import base64
import contextlib
import pathlib
import time
from collections.abc import Callable, Collection

import host_setup

from pods.backend import ABSENT, GONE, Host
from pods.errors import PodError
from pods.hosts import Answer, Hosts, label
from pods.runs import RunStatus, how_it_ended, records, status

MOST = 1 << 20  # bytes of a log in one answer


class Follower:
    """Brings the logs of one attempt here. A file's size is how far it has come, so it goes on where it was."""

    def __init__(self, hosts: Hosts, run: str, attempt: int, *, only: Collection[int] = (), show: Callable = print):
        """only: workers whose lines are shown (default: all); show: takes a line."""
        self.hosts, self.run, self.attempt, self.only, self.show = hosts, run, attempt, only, show
        self.folder = records(run) / str(attempt)
        self.half: dict[Host, bytes] = {}
        self.faults: dict[Host, str] = {}
        self.ended: dict[Host, dict] = {}

    def alone(self) -> contextlib.AbstractContextManager:
        """Holds the run's log files here. Raises PodError if another process does."""
        refusal = PodError(f"somebody follows this run here already: tail -f {self.folder}/*.log")
        return contextlib.nullcontext() if self.hosts.dry else host_setup.alone(self.folder / ".lock", refusal)

    def round(self) -> bool:
        """Asks every host once; returns whether all of them have ended and said all."""
        words = {}
        for host in [host for host in self.hosts.all if host not in self.ended]:
            file = self._file(host)
            offset = file.stat().st_size if file.exists() else 0
            words[host] = ["logs", "--", self.run, str(self.attempt), str(offset), str(MOST)]
        for answer in self.hosts.ask(words):
            self._take(answer)
        return not self.hosts.dry and len(self.ended) == len(self.hosts.all)

    def _file(self, host: Host) -> pathlib.Path:
        return self.folder / f"{host.worker}.log"

    def _take(self, answer: Answer) -> None:
        host, data, file = answer.host, answer.data, self._file(answer.host)
        if answer.error:
            if self.faults.get(host) != answer.error:
                self.show(f"{label(host)} does not answer: {answer.error}")
            self.faults[host] = answer.error
            return
        if not data:  # a dry run
            return
        if self.faults.pop(host, None):
            self.show(f"{label(host)} answers again")
        if file.exists() and data["size"] < file.stat().st_size:  # it is another host by now, with a log of its own
            file.rename(file.with_suffix(f".{int(time.time())}.log"))
            return
        if new := base64.b64decode(data["data"]):
            with file.open("ab") as log:
                log.write(new)
        self._print(host, new)
        if data["state"] != "running" and data["offset"] >= data["size"]:
            self._print(host, b"\n" if self.half.get(host) else b"")
            self.ended[host] = data
            self.show(", ".join([f"{label(host)}: {data['state']}", *how_it_ended(data["exit"])]))

    def _print(self, host: Host, new: bytes) -> None:
        *whole, rest = (self.half.get(host, b"") + new).split(b"\n")
        self.half[host] = rest
        if not self.only or host.worker in self.only:
            for line in whole:
                self.show(f"[{host.worker}] {line.decode(errors='replace')}")


def follow(follower: Follower, *, every: float, check: Callable[[], str]) -> RunStatus:
    """Follows until the run has ended on all hosts; returns how. Raises PodError if the pod is gone, by `check`."""
    hosts = follower.hosts
    pause = max(every, len(hosts.all) / 8)  # each question costs a process here
    with follower.alone():
        while not follower.round():
            if hosts.dry:
                break
            if follower.faults and (state := _state(check)) in (*GONE, ABSENT):
                sentence = f"{hosts.pod.name} is {state}: launch/tpu.py supervise gets another and goes on."
                raise PodError(sentence, "absent")
            time.sleep(pause)
    return status(hosts, follower.run, follower.attempt)


def _state(check: Callable[[], str]) -> str:
    try:
        return check()
    except PodError as error:
        if error.kind != "network":
            raise
        return ""
