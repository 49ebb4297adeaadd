"""The folder of a run: where each thing lies, and the lock that lets one process at a time write there.

In a bucket, the lock is an object created on condition that it does not exist. Its holder renews it every RENEW
seconds; one that is not renewed for STALE seconds was left by a killed process and is taken over. A holder that finds
its lock gone exits at once: it was stopped for so long that another process has taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psutil
from ml_collections import ConfigDict

from mlm.errors import InputError
from mlm.paths import UPath, is_remote, make_folder
from mlm.text import printable

LOCK = ".lock"
RENEW = 10.0  # seconds
STALE = 45.0  # seconds


class Workdir:
    """Paths within a run's folder, local or gs://.

    Attributes:
      root, tokenizer, shards, checkpoints, export: folders.
      config, metrics, timing, advice, spikes, report: files.
      classification: file with a classifier's {"split", "step", "scores"}, and of classes {"labels", "confusion":
        [true][predicted]}.
    """

    def __init__(self, path: str, *, create: bool = True):
        """Creates the folder, or with `create` off requires it; raises InputError if it can't be used."""
        if not path:
            raise InputError("--workdir: name the folder of the run, as in --workdir=runs/first.")
        root = UPath(path)
        self.root = root if is_remote(path) else root.absolute()  # orbax wants absolute paths
        if create:
            self._create(path)
        elif not self.root.is_dir():
            raise InputError(f"--workdir={path}: there is no such folder.")
        self.tokenizer = self.root / "tokenizer"
        self.shards = self.root / "shards"
        self.checkpoints = self.root / "checkpoints"
        self.export = self.root / "export"
        self.config = self.root / "config.json"
        self.metrics = self.root / "metrics.jsonl"
        self.timing = self.root / "timing.jsonl"
        self.advice = self.root / "advice.jsonl"
        self.spikes = self.root / "spikes.jsonl"
        self.report = self.root / "report.html"
        self.classification = self.root / "classification.json"

    def shards_of(self, config: ConfigDict) -> str:
        """Returns the folder of the shards: config.shards.dir, or the workdir's own."""
        return config.shards.dir or str(self.shards)

    def _create(self, path: str) -> None:
        try:
            make_folder(self.root)
            probe = self.root / f".writable.{uuid.uuid4().hex}"  # several hosts may do this at once
            probe.write_text("")
            probe.unlink()
        except Exception as error:  # a bucket's client raises its own
            if not isinstance(error, OSError) and not is_remote(path):
                raise
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"--workdir={path}: can't be written ({reason}); choose another folder.") from None

    def locked(self, *, part: str = "") -> contextlib.AbstractContextManager[None]:
        """Locks the folder for this process, or one part of a job on several hosts, see `lock`."""
        return lock(self.root, part=part)


@contextlib.contextmanager
def lock(folder: UPath, *, part: str = "") -> Iterator[None]:
    """Keeps other processes out of a folder; raises InputError if one has locked it.

    Args:
      folder: local or gs://; other remote folders are not locked.
      part: of a job on several hosts, whose parts may be locked at the same time; "" for all of it.
    """
    path = folder / (f"{LOCK}.{part}" if part else LOCK)
    with contextlib.ExitStack() as stack:
        if str(folder).startswith("gs://"):
            stack.enter_context(_BucketLock(path))
        elif not is_remote(folder):
            if part:
                _lock_file(stack, folder / LOCK, fcntl.LOCK_SH)
            _lock_file(stack, path, fcntl.LOCK_EX)
        yield


def _lock_file(stack: contextlib.ExitStack, path: UPath, kind: int) -> None:
    file = stack.enter_context(path.open("a"))
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        raise _in_use(path.parent) from None


def _in_use(folder: UPath, holder: str = "") -> InputError:
    return InputError(f"--workdir={folder}: another process{holder} is using it; wait for it, or stop it.")


class _BucketLock:
    """A lock in a bucket: whoever created the object's generation holds it; each renewal changes its metadata."""

    def __init__(self, path: UPath):
        self._path, self._fs = path, path.fs
        self._generation = ""
        self._released = threading.Event()
        self._renewing = threading.Thread(target=self._renew, daemon=True, name="lock")

    def __enter__(self) -> None:
        """Creates the object; raises InputError if another process renews it."""
        content = json.dumps({"host": platform.node(), "process": os.getpid()}).encode()
        first, since = "", time.monotonic()
        while True:
            with contextlib.suppress(FileExistsError):
                self._fs.pipe_file(self._path.path, content, mode="create")
                self._generation = self._info()["generation"]
                break
            try:
                info = self._info()
                holder = json.loads(self._path.read_text())
            except FileNotFoundError:
                continue  # released between the two
            state = f"{info['generation']} {info.get('metadata')}"
            who = printable(f" (on {holder['host']}, process {holder['process']})")
            if not first:
                first = state
                print(f"{self._path}: is held by another process{who}; waiting to see if it is alive", file=sys.stderr)
            if state != first:
                raise _in_use(self._path.parent, who)
            dead = holder["host"] == platform.node() and not psutil.pid_exists(holder["process"])
            if dead or time.monotonic() - since > STALE:
                with contextlib.suppress(FileNotFoundError):
                    self._call("DELETE", info["generation"])
                first, since = "", time.monotonic()
            else:
                time.sleep(1)
        self._renewing.start()

    def __exit__(self, *exception: object) -> None:
        """Stops renewing, and deletes the object if it is still ours."""
        self._released.set()
        self._renewing.join()
        with contextlib.suppress(Exception):  # it becomes stale by itself
            self._call("DELETE", self._generation)

    def _renew(self) -> None:
        """Renews the lock every RENEW seconds; exits the process if another one has taken it."""
        count = 0
        while not self._released.wait(RENEW):
            count += 1
            try:
                self._call("PATCH", self._generation, json={"metadata": {"renewed": str(count)}})
                lost = self._info()["generation"] != self._generation
            except FileNotFoundError:
                lost = True
            except Exception as error:  # the network: the lock is ours as long as nobody else takes it
                lost = "412" in str(error) or getattr(error, "code", None) == 412
            if lost and not self._released.is_set():
                message = "this process was stopped so long that it lost its lock; restart it if no other is running."
                print(f"{self._path}: {message}", file=sys.stderr, flush=True)
                os._exit(InputError.code)

    def _call(self, method: str, generation: str, **kwargs: Any) -> None:
        bucket, _, key = self._path.path.partition("/")
        self._fs.call(method, "b/{}/o/{}", bucket, key, ifGenerationMatch=generation, **kwargs)

    def _info(self) -> dict:
        return self._fs.info(self._path.path)
