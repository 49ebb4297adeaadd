"""The logs of all hosts: one file each under runs/pods/{id}/{attempt}/, and every line on the terminal, prefixed."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import pathlib
import time
from collections.abc import Callable, Collection

from pods.backend import GONE, Host
from pods.errors import PodError
from pods.fanout import label
from pods.hosts import Answer, Hosts
from pods.runs import Look, look, records

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

    def path(self, host: Host) -> pathlib.Path:
        """Returns the file of a host's log."""
        return self.folder / f"{host.worker}.log"

    def round(self) -> bool:
        """Asks every host once; returns whether all of them have ended and said all."""
        open_hosts = [host for host in self.hosts.all if host not in self.ended]
        offsets = {host: self._offset(host) for host in open_hosts}
        words = {
            host: ["logs", "--", self.run, str(self.attempt), str(offset), str(MOST)]
            for host, offset in offsets.items()
        }
        for answer in self.hosts.ask(words):
            self._take(answer, offsets[answer.host])
        return not self.hosts.dry and len(self.ended) == len(self.hosts.all)

    def _offset(self, host: Host) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self.path(host).stat().st_size
        return 0

    def _take(self, answer: Answer, offset: int) -> None:
        host, data = answer.host, answer.data
        if answer.error:
            if self.faults.get(host) != answer.error:
                self.show(f"{label(host)} does not answer: {answer.error}")
            self.faults[host] = answer.error
            return
        if not data:  # a dry run
            return
        if self.faults.pop(host, None):
            self.show(f"{label(host)} answers again")
        if data["size"] < offset:  # it is another host by now, with a log of its own
            self.path(host).rename(self.path(host).with_suffix(f".{int(time.time())}.log"))
            return
        new = base64.b64decode(data["data"])
        if new:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path(host).open("ab") as file:
                file.write(new)
        self._print(host, new)
        if data["state"] != "running" and data["offset"] >= data["size"]:
            self._print(host, b"\n" if self.half.get(host) else b"")
            self.ended[host] = data
            end = data["exit"] or {}
            code = f"signal {end['signal']}" if end.get("signal") else f"exit code {end.get('code')}"
            self.show(f"{label(host)}: {data['state']}" + (f", {code}" if end else ""))

    def _print(self, host: Host, new: bytes) -> None:
        *whole, rest = (self.half.get(host, b"") + new).split(b"\n")
        self.half[host] = rest
        if not self.only or host.worker in self.only:
            for line in whole:
                self.show(f"[{host.worker}] {line.decode(errors='replace')}")


def follow(follower: Follower, *, every: float, check: Callable[[], str]) -> Look:
    """Follows until the run has ended on all hosts; returns how.

    every: seconds between two rounds; check: the state of the pod, asked when hosts do not answer. Raises PodError if
    the pod is gone. Of two who follow one run in one folder, the second only waits.
    """
    hosts = follower.hosts
    pause = max(every, len(hosts.all) / 8)  # each question costs a process here
    with only_one(follower):
        while not follower.round():
            if hosts.dry:
                break
            if follower.faults:
                state = check()
                if state in (*GONE, "ABSENT"):
                    raise PodError(
                        f"{hosts.settings.name} is {state}: launch/tpu.py supervise gets another and goes on.", "absent"
                    )
            time.sleep(pause)
    return look(hosts, follower.run, follower.attempt)


@contextlib.contextmanager
def only_one(follower: Follower):
    """Holds the run's log files here. Raises PodError if somebody else does."""
    if follower.hosts.dry:
        yield
        return
    with held(follower.folder / ".lock", f"somebody follows this run here already: tail -f {follower.folder}/*.log"):
        yield


@contextlib.contextmanager
def held(file: pathlib.Path, refusal: str):
    """Holds a lock file for this process. Raises PodError(refusal) if another one does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PodError(refusal) from error
    else:
        yield
    finally:
        os.close(lock)
