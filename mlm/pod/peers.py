"""A line from every process of a run to every other: who is there, who has failed and why. Without jax.

Process 0 holds the hub (hub.py) at the coordinator's address; every process, 0 too, is connected to it and sends a
sign of life every second. So each learns at once, in words, that another one has failed, is gone, or has fallen silent;
jax would only abort. The hub also compares what all must have in common, and says where jax's own service will be.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from mlm.errors import InputError, StopError
from mlm.pod import hub
from mlm.pod.hub import End, Hub, Line

TELL = 30.0  # seconds for which one that has failed before the others came waits to tell them


def address(text: str) -> tuple[str, int]:
    """Returns (host, port) of "host:port"; raises InputError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--coordinator={text}: must be HOST:PORT, with the address of the first process.")
    return host.strip("[]"), int(port)


class Peers:
    """This process's connection to the hub; in process 0, the hub as well."""

    def __init__(self, coordinator: str, processes: int, process: int, on_end: Callable[[End], None]):
        """Starts to connect, and goes on trying.

        Args:
          coordinator: "host:port" of process 0.
          processes, process: how many, and which of them this is.
          on_end: called in a thread when the run ends, unless it is by `tell` or after `close`.

        Raises:
          InputError: the numbers or the address can't be, or process 0 can't listen there.
        """
        self._where, self._on_end = address(coordinator), on_end
        self._hello = {"hello": process, "processes": processes, "host": socket.gethostname()}
        self._hub = Hub(self._where, processes) if process == 0 else None
        self._line: Line | None = None
        self._changed = threading.Condition()
        self._heard: set[str] = set()  # names of what the hub has said
        self._go = ""
        self._barriers = 0  # passed
        self._closed = False
        self._heartbeat = hub.PATIENCE
        threading.Thread(target=self._talk, daemon=True, name="peers").start()

    def ready(self, facts: dict[str, Any], *, start_timeout: float, heartbeat: float) -> str:
        """Waits until all are ready and alike; returns "host:port" for jax's service.

        Args:
          facts: what all must have in common.
          start_timeout: seconds to wait for the others.
          heartbeat: seconds of silence after which a process counts as dead, from now on.

        Raises:
          StopError: process 0 does not answer.
        """
        begin = time.monotonic()
        self._heartbeat = heartbeat
        if not self._wait("connected", start_timeout):
            host, port = self._where
            raise StopError(
                f"host 0 has not answered at {host}:{port} within {start_timeout:g} s (config.pod.start_timeout); see "
                "whether it runs there, and why not."
            )
        self._line.patience(heartbeat)
        self._line.send(ready=facts, start_timeout=start_timeout, heartbeat=heartbeat)
        left = start_timeout + begin - time.monotonic()
        if not self._wait("go", left + hub.LINGER):  # the hub, which knows who is missing, speaks before that
            raise StopError(f"host 0 was not ready within {start_timeout:g} s (config.pod.start_timeout).")
        return self._go

    def barrier(self, name: str) -> None:
        """Waits until all have come here, as long as they live; all come to the same ones in the same order."""
        self._barriers += 1
        name = f"{self._barriers} {name}"
        self._line.send(barrier=name)
        self._wait(f"barrier {name}", None)

    def tell(self, end: End) -> None:
        """Tells the others that this process ends the run; waits until they know, at most `TELL` seconds."""
        self._closed = True
        if self._wait("connected", TELL) and "end" not in self._heard:
            self._line.send(failed=dataclasses.asdict(end))
            self._wait("end", hub.COLLECT + hub.LINGER)
        self.leave(TELL)

    def close(self) -> None:
        """Leaves the run in good order."""
        self._closed = True
        if self._line is not None:
            self._line.send(bye=True)
        self.leave(hub.LINGER)

    def leave(self, seconds: float = TELL) -> None:
        """Closes the connection; process 0 waits until the others have heard the end and left.

        Args:
          seconds: for those who have not come yet.
        """
        if self._line is not None:
            self._line.close()
        if self._hub is not None:
            self._hub.finish(seconds)

    def _wait(self, name: str, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: name in self._heard, seconds)

    def _hear(self, name: str) -> None:
        with self._changed:
            self._heard.add(name)
            self._changed.notify_all()

    def _connect(self) -> Line:
        while True:
            try:
                return Line(socket.create_connection(self._where, timeout=hub.PATIENCE))
            except OSError:
                time.sleep(0.1)

    def _talk(self) -> None:
        self._line = line = self._connect()
        line.send(**self._hello)
        threading.Thread(target=_ping, args=(line,), daemon=True, name="peers ping").start()
        self._hear("connected")
        kind, what = "gone", "is gone: its connection broke without a word"
        try:
            for message in line:
                if "end" in message:
                    return self._ended(End(**message["end"]))
                self._go = message.get("go", self._go)
                for name, value in message.items():
                    self._hear(f"barrier {value}" if name == "barrier" else name)
        except TimeoutError:
            kind, what = "silent", hub.silence(self._heartbeat)
        except (OSError, ValueError):
            pass
        return self._ended(End(0, self._where[0], kind, 1, what))

    def _ended(self, end: End) -> None:
        self._hear("end")
        if not self._closed:
            self._on_end(end)


def _ping(line: Line) -> None:
    while True:
        time.sleep(hub.PING)
        line.send(ping=True)
