"""The logs of all hosts: one file each under runs/pods/{id}/{attempt}/, and every line on the terminal, prefixed."""

import base64
import contextlib
import functools
import time
from collections.abc import Callable

import host_setup

from pods.backend import ABSENT, GONE, Host, PodError
from pods.hosts import Answer, Hosts
from pods.runs import RunStatus, how_it_is, records, status

MOST = 1 << 20  # bytes of a log in one answer
SHOW = functools.partial(print, flush=True)


class Follower:
    """Brings the logs of one attempt here. A file's size is how far it has come, so it goes on where it was."""

    def __init__(self, hosts: Hosts, run: str, attempt: int, show: Callable[[str], None] = SHOW):
        self.hosts = hosts
        self.run = run
        self.attempt = attempt
        self.show = show
        self.folder = records(run) / str(attempt)
        self.half: dict[Host, bytes] = {}  # a line that has not ended yet
        self.errors: dict[Host, str] = {}  # of those that do not answer
        self.ended: set[Host] = set()

    def alone(self) -> contextlib.AbstractContextManager:
        """Holds the run's log files here. Raises PodError if another process does."""
        refusal = PodError(f"somebody follows this run here already: tail -f {self.folder}/*.log")
        return (
            contextlib.nullcontext()
            if self.hosts.dry
            else host_setup.alone(self.folder / ".lock", refusal)
        )

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
        return self.hosts.dry or len(self.ended) == len(self.hosts.all)

    def _size(self, host: Host) -> int:
        file = self.folder / f"{host.worker}.log"
        return file.stat().st_size if file.exists() else 0

    def _take(self, answer: Answer) -> None:
        host = answer.host
        data = answer.data
        file = self.folder / f"{host.worker}.log"
        before = self.errors.pop(host, "")
        if answer.error:
            self.errors[host] = answer.error
            if answer.error != before:
                self.show(f"{host} does not answer: {answer.error}")
            return
        if before:
            self.show(f"{host} answers again")
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
        raise PodError(
            f"{hosts.pod.name} is {state}: launch/tpu.py supervise gets another and goes on.",
            "absent",
        )
