"""Several hosts that share only a folder: which one this process is, and waiting for the others."""

import math
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from mlm.errors import PreemptedError

REPORT_EVERY = 10.0  # seconds between two lines about what is missing
PAUSES = (0.05, 5.0)  # seconds between two polls: the first, and the longest


def available_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS


class Hosts(NamedTuple):
    """This process is host `index` of `count`; what is numbered is divided among them."""

    count: int = 1
    index: int = 0
    timeout: float = math.inf  # seconds without progress of the other hosts after which this one gives up

    def owns(self, number: int) -> bool:
        """Returns whether this host makes the item of that number."""
        return number % self.count == self.index

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
