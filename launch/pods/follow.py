"""The logs of all hosts: one file each under runs/pods/{id}/{attempt}/, and every line on the terminal, prefixed."""

import base64
import collections
import contextlib
import functools
import time
from collections.abc import Callable

import host_setup

from pods.backend import ABSENT, GONE, Host, PodError
from pods.hosts import Answer, Hosts
from pods.runs import RunStatus, how_it_is, records, status

MOST = 1 << 20  # bytes of a log in one answer
REFUSALS = 10  # times in a row that a host answers with an error, after which nothing is waited for from it
SHOW = functools.partial(print, flush=True)


class Follower:
    """Brings the logs of one attempt here. A file's size is how far it has come, so it goes on where it was."""

    def __init__(self, hosts: Hosts, run: str, attempt: int, show: Callable[[str], None] = SHOW):
        self.hosts, self.run, self.attempt, self.show = hosts, run, attempt, show
        self.folder = records(run) / str(attempt)
        self.half: dict[Host, bytes] = {}  # a line that has not ended yet
        self.errors: dict[Host, str] = {}  # of those that do not answer
        self.refusals: collections.Counter[Host] = collections.Counter()  # in a row
        self.ended: set[Host] = set()

    def alone(self) -> contextlib.AbstractContextManager:
        """Holds the run's log files here. Raises PodError if another process does."""
        refusal = PodError(f"somebody follows this run here already: tail -f {self.folder}/*.log")
        return contextlib.nullcontext() if self.hosts.dry else host_setup.alone(self.folder / ".lock", refusal)

    def round(self) -> bool:
        """Asks every host once; returns whether all of them have ended and said all, or can't say it."""
        words = {
            host: ["logs", self.run, str(self.attempt), str(self._size(host)), str(MOST)]
            for host in self.hosts.all
            if host not in self.ended
        }
        for answer in self.hosts.ask(words):
            if not self.hosts.dry:
                self._take(answer)
        return self.hosts.dry or all(host in self.ended or self.refusals[host] >= REFUSALS for host in self.hosts.all)

    def _size(self, host: Host) -> int:
        file = self.folder / f"{host.worker}.log"
        return file.stat().st_size if file.exists() else 0

    def _take(self, answer: Answer) -> None:
        host, data, file = answer.host, answer.data, self.folder / f"{answer.host.worker}.log"
        before = self.errors.pop(host, "")
        self.refusals[host] = self.refusals[host] + 1 if answer.refused else 0
        if answer.error:
            self.errors[host] = answer.error
            if answer.error != before:
                self.show(f"{host} {'gives no log' if answer.refused else 'does not answer'}: {answer.error}")
            return
        if before:
            self.show(f"{host} answers again")
        self._require_same(data["launch"])
        new = base64.b64decode(data["data"])
        with file.open("ab") as log:
            log.write(new)
        has_ended = data["state"] != "running" and data["offset"] >= data["size"]
        *lines, self.half[host] = (self.half.get(host, b"") + new).split(b"\n")
        if has_ended and self.half[host]:
            lines.append(self.half[host])
        for line in lines:
            self.show(f"[{host.worker}] {line.decode(errors='replace')}")
        if has_ended:
            self.ended.add(host)
            self.show(f"{host}: {how_it_is(data['state'], data['exit'])}")

    def _require_same(self, launch: str | None) -> None:
        """Raises PodError if the files here are of another attempt of this number, which other hosts had."""
        mark = self.folder / "launch"
        known = mark.read_text() if mark.exists() else ""  # empty after a disk was full
        if launch and not known:
            mark.write_text(launch)
        elif launch and known != launch:
            sentence = f"{self.folder} has the logs of another run of this id: move it away, and ask again."
            raise PodError(sentence, "settings")


def follow(follower: Follower, every: float) -> RunStatus:
    """Follows until the run has ended on all hosts; returns how. Raises PodError if the pod is gone."""
    hosts = follower.hosts
    with follower.alone():
        while not follower.round():
            if follower.errors:
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
