"""Several hosts that share nothing but a folder: which of them this process is, and how one waits for the others."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mlm import logs
from mlm.errors import InputError, PreemptedError
from mlm.paths import UPath, make_folder, write_text

SAY_EVERY = 10.0  # seconds between two lines about what is missing
DIFFERS_AFTER = 60.0  # seconds that another host has to be started anew, after the corpus was changed on all of them
PAUSES = (0.05, 5.0)  # seconds between two looks: the first, and the longest


Words = Callable[[], str]  # says what is missing, for a person


class Hosts(NamedTuple):
    """Of `count` hosts this process is number `index`; each has its share of whatever is numbered."""

    count: int = 1
    index: int = 0

    def owns(self, number: int) -> bool:
        """Returns whether this host makes the thing of that number."""
        return self.owner(number) == self.index

    def owner(self, number: int) -> int:
        """Returns the host that makes the thing of that number."""
        return number % self.count

    def share(self, numbers: Iterable[int], what: str) -> str:
        """Returns in words how many of the missing things each host has to make."""
        counts = Counter(map(self.owner, numbers))
        return ", ".join(f"{count} {what} of host {host}" for host, count in sorted(counts.items()))


def wait(look: Callable[[], tuple[int, Words]], *, patience: float) -> None:
    """Looks again and again until nothing is missing.

    Args:
      look: returns how much is missing, and a function that says what, for a person.
      patience: seconds without a change after which there is no hope.

    Raises:
      PreemptedError: nothing came for `patience` seconds; what this process has made is kept.
    """
    since = said = time.monotonic()
    least, pause = None, PAUSES[0]
    while True:
        left, words = look()
        if not left:
            return
        now = time.monotonic()
        if left != least:
            least, since, pause = left, now, PAUSES[0]
        if now - since >= patience:
            raise PreemptedError(
                f"nothing has come for {patience:.0f} s (config.shards.patience), and this is missing: {words()}; see "
                "to those hosts, and start the same command on all of them: what is written is kept."
            )
        if now - said >= SAY_EVERY:
            said = now
            print(f"shards: waiting for {words()}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(1.5 * pause, PAUSES[1])


class Notes:
    """What each host says of itself in a shared folder: that it is there, and the hash of the corpus it has read."""

    def __init__(self, folder: UPath, hosts: Hosts):
        """Says that this host is there."""
        self._folder, self._hosts = folder, hosts
        self._differs: dict[int, float] = {}
        self._stream: str | None = None
        make_folder(folder)
        self.say(None)

    def say(self, stream: str | None) -> None:
        """Says which corpus this host has read; None while it reads."""
        self._stream = stream
        write_text(self._file(self._hosts.index), json.dumps({"host": platform.node(), "stream": stream}))

    def _file(self, index: int) -> UPath:
        return self._folder / f"{index}-of-{self._hosts.count}.json"

    def check(self, others: Iterable[int]) -> list[int]:
        """Returns which of the hosts have not come yet.

        Raises:
          InputError: one has read another corpus than this one, and has not been started anew in DIFFERS_AFTER seconds.
        """
        absent = []
        for index in sorted(set(others) - {self._hosts.index}):
            note = logs.read_object(self._file(index))
            if not {"host", "stream"} <= note.keys():
                absent.append(index)
                continue
            if note["stream"] in (None, self._stream):
                self._differs.pop(index, None)
            elif time.monotonic() - self._differs.setdefault(index, time.monotonic()) >= DIFFERS_AFTER:
                raise InputError(
                    f"config.corpus: host {index} ({note['host']}) reads other documents than host {self._hosts.index} "
                    f"({platform.node()}); give all hosts the same sources and packages, and start them again."
                )
        return absent
