"""The lock of a folder in a bucket: an object that is created on condition that it does not exist.

Its holder renews it every RENEW seconds; one that is not renewed for STALE seconds was left by a killed process, and is
deleted, on condition that it is still the same, by whoever waits for it: of several, one creates its own. A holder that
finds another's exits at once: it was stopped for so long that another process has taken over.
"""

import contextlib
import itertools
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from mlm.errors import InputError
from mlm.paths import UPath
from mlm.text import printable, say

RENEW = 10.0  # seconds
STALE = 45.0  # seconds


@contextlib.contextmanager
def hold(path: UPath) -> Iterator[None]:
    """Holds the lease at a path and renews it; raises InputError if another process does."""
    lease = Lease(path)
    generation = lease.acquire()
    released = threading.Event()
    renewing = threading.Thread(
        target=lease.keep, args=(generation, released), daemon=True, name="lock"
    )
    renewing.start()
    try:
        yield
    finally:
        released.set()
        renewing.join()
        with contextlib.suppress(Exception):  # it becomes stale by itself
            lease.delete(generation)


class Lease:
    """An object in a bucket: a new one has another generation, and a renewal changes its metadata."""

    def __init__(self, path: UPath):
        self.path = path

    def acquire(self) -> str:
        """Creates the lease and returns its generation; raises InputError if another process renews it."""
        seen = None  # the lease of another process, when it was first read
        while True:
            with contextlib.suppress(FileExistsError):
                return self.create({"host": platform.node(), "process": os.getpid()})
            try:
                generation, renewal, holder = self.read()
            except FileNotFoundError:
                time.sleep(0.1)  # released between the two
                continue
            name = printable(f" (on {holder.get('host')}, process {holder.get('process')})")
            if seen is None:
                seen = (generation, renewal)
                since = time.monotonic()
                say(f"{self.path}: is held by another process{name}; waiting to see if it is alive")
            if (generation, renewal) != seen:
                raise InputError(
                    f"{self.path.parent}: another process{name} is using it; wait for it, or stop it."
                )
            # killed on this machine, or silent for too long
            is_gone = holder.get("host") == platform.node() and not psutil.pid_exists(
                holder["process"]
            )
            if is_gone or time.monotonic() - since > STALE:
                with contextlib.suppress(FileNotFoundError):
                    self.delete(generation)
                seen = None
            else:
                time.sleep(1)

    def keep(self, generation: str, released: threading.Event) -> None:
        """Renews the lease every RENEW seconds; exits the process if another one has taken it."""
        for count in itertools.count(1):
            if released.wait(RENEW):
                return
            if not self.renew(generation, count) and not released.is_set():
                message = "this process was stopped so long that it lost its lock; restart it if no other is running."
                say(f"{self.path}: {message}")
                os._exit(InputError.code)

    def create(self, holder: dict[str, Any]) -> str:
        """Returns the generation of a new lease; raises FileExistsError."""
        self.path.fs.pipe_file(self.path.path, json.dumps(holder).encode(), mode="create")
        return self.path.fs.info(self.path.path)["generation"]

    def read(self) -> tuple[str, str, dict[str, Any]]:
        """Returns (generation, what each renewal changes, holder); raises FileNotFoundError."""
        info = self.path.fs.info(self.path.path)
        return info["generation"], str(info.get("metadata")), json.loads(self.path.read_text())

    def renew(self, generation: str, count: int) -> bool:
        """Returns whether the lease is still there, which a failing network is no reason to doubt."""
        try:
            self._call("PATCH", generation, {"metadata": {"renewed": str(count)}})
            return self.path.fs.info(self.path.path)["generation"] == generation
        except FileNotFoundError:
            return False
        except Exception:
            return True

    def delete(self, generation: str) -> None:
        """Deletes this lease; raises FileNotFoundError if it is gone, or another one is there."""
        self._call("DELETE", generation)

    def _call(self, method: str, generation: str, body: dict[str, Any] | None = None) -> None:
        bucket, _, key = self.path.path.partition("/")
        try:
            self.path.fs.call(
                method, "b/{}/o/{}", bucket, key, ifGenerationMatch=generation, json=body
            )
        except Exception as error:
            if "412" in str(error) or getattr(error, "code", None) == 412:  # precondition failed
                raise FileNotFoundError(f"{self.path}: is another lease") from error
            raise
