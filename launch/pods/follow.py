"""The logs of all hosts: one file each under runs/pods/{id}/{attempt}/, and every line on the terminal, prefixed."""

import base64
import pathlib
import time

from pods.backend import ABSENT, GONE, Host, PodError
from pods.hosts import Answer, Hosts
from pods.runs import RunStatus, how_it_is, records, status

EVERY = 5.0  # seconds between two rounds


class Log:
    """One host's. Its file's size is how far it has come; of two followers, each writes the same bytes there."""

    def __init__(self, host: Host, folder: pathlib.Path):
        self.host = host
        self.file = folder / f"{host.worker}.log"
        self.file.touch()
        self.offset = self.file.stat().st_size
        self.half = b""  # a line that has not ended yet
        self.is_silent = False
        self.has_ended = False

    def take(self, answer: Answer) -> None:
        """Keeps and shows what a host has said since."""
        if answer.error:
            if not self.is_silent:
                print(answer.error, flush=True)
            self.is_silent = True
            return
        self.is_silent = False
        data = answer.data
        new = base64.b64decode(data["data"])
        with self.file.open("r+b") as log:
            log.seek(self.offset)
            log.write(new)
        self.offset += len(new)
        *lines, self.half = (self.half + new).split(b"\n")
        self.has_ended = data["state"] != "running" and self.offset >= data["size"]
        if self.has_ended and self.half:
            lines.append(self.half)
        for line in lines:
            print(f"[{self.host.worker}] {line.decode(errors='replace')}", flush=True)
        if self.has_ended:
            print(f"{self.host}: {how_it_is(data['state'], data['exit'])}", flush=True)


def follow(hosts: Hosts, run: str, attempt: int) -> RunStatus:
    """Follows until the run has ended on all hosts; returns how. Raises PodError if the pod is gone."""
    folder = records(run) / str(attempt)
    folder.mkdir(parents=True, exist_ok=True)
    logs = {host: Log(host, folder) for host in hosts.all}
    while True:
        left = [log for log in logs.values() if not log.has_ended]
        words = {log.host: ["logs", run, str(attempt), str(log.offset)] for log in left}
        for answer in hosts.ask(words):
            logs[answer.host].take(answer)
        if all(log.has_ended for log in left):
            return status(hosts, run, attempt)
        if any(log.is_silent for log in left):
            state = hosts.cloud.describe().state
            if state in (*GONE, ABSENT):
                raise PodError(
                    f"{hosts.pod.name} is {state}: launch/tpu.py supervise gets another and goes on.",
                    "absent",
                )
        time.sleep(max(EVERY, len(hosts.all) / 8))  # each question costs a process here
