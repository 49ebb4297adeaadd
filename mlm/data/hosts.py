"""Several hosts that share only a folder: which one this process is, and waiting for the others."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mlm import logs
from mlm.errors import InputError, PreemptedError
from mlm.paths import UPath, make_folder, write_text

REPORT_EVERY = 10.0  # seconds between two lines about what is missing
RESTART_TIME = 60.0  # seconds to restart another host after the corpus was changed on all of them
PAUSES = (0.05, 5.0)  # seconds between two polls: the first, and the longest


def available_cores() -> int:
    """Returns the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Hosts(NamedTuple):
    """This process is host `index` of `count`; what is numbered is divided among them."""

    count: int = 1
    index: int = 0
    timeout: float = math.inf  # seconds without progress of the other hosts after which this one gives up

    def owner(self, number: int) -> int:
        """Returns the host that makes the item of that number."""
        return number % self.count

    def owns(self, number: int) -> bool:
        """Returns whether this host makes the item of that number."""
        return self.owner(number) == self.index

    def wait(self, missing: Callable[[], list[int]], describe: Callable[[list[int]], str]) -> None:
        """Polls until nothing is missing; raises PreemptedError after `timeout` seconds without progress."""
        changed = reported = time.monotonic()
        last, pause = None, PAUSES[0]
        while left := missing():
            now = time.monotonic()
            if left != last:
                last, changed, pause = left, now, PAUSES[0]
            if now - changed >= self.timeout:
                raise PreemptedError(
                    f"no progress for {self.timeout:.0f} s (config.shards.patience), still missing: {describe(left)}; "
                    "check those hosts, and start the same command on all of them: what is written is kept."
                )
            if now - reported >= REPORT_EVERY:
                reported = now
                print(f"shards: waiting for {describe(left)}", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(1.5 * pause, PAUSES[1])


class HostFiles:
    """A file of each host in a shared folder: that it has started, and the hash of the corpus that it has read."""

    def __init__(self, folder: UPath, hosts: Hosts):
        """Names the folder without making it."""
        self.folder, self._hosts = folder, hosts
        self._corpus: str | None = None
        self._differs: dict[int, float] = {}

    def write(self, corpus: str | None) -> None:
        """Writes the hash of the corpus that this host has read, None while it reads."""
        self._corpus = corpus
        make_folder(self.folder)
        write_text(self._file(self._hosts.index), json.dumps({"host": platform.node(), "stream": corpus}))

    def _file(self, index: int) -> UPath:
        return self.folder / f"{index}-of-{self._hosts.count}.json"

    def not_started(self, others: Iterable[int]) -> list[int]:
        """Returns which of some other hosts have not started yet; raises InputError if one reads another corpus."""
        absent = []
        for index in sorted(set(others)):
            content = logs.read_object(self._file(index))
            if not {"host", "stream"} <= content.keys():
                absent.append(index)
            elif content["stream"] in (None, self._corpus):
                self._differs.pop(index, None)
            elif time.monotonic() - self._differs.setdefault(index, time.monotonic()) >= RESTART_TIME:
                raise InputError(
                    f"config.corpus: host {index} ({content['host']}) reads other documents than host "
                    f"{self._hosts.index} ({platform.node()}); give all hosts the same sources and packages, and "
                    "restart them."
                )
        return absent
