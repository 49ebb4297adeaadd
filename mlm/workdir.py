"""The folder of a run: where each thing lies, and the lock that lets one process at a time write there.

In a bucket, the lock is an object that is created only if it isn't there, which the service decides. Its holder renews
it every RENEW seconds; one that is not renewed for STALE seconds was left by a process that was killed, and is taken
over. A holder that finds its lock gone ends at once: it was stopped for so long that another has taken its place.
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
        """Makes the folder, or, with `create` off, only looks for it.

        Raises:
          InputError: no folder was named, it can't be made or written, or it is not there.
        """
        if not path:
            raise InputError("--workdir: name the folder of the run, as in --workdir=runs/first.")
        root = UPath(path)
        self.root = root if is_remote(path) else root.absolute()  # orbax wants absolute paths
        if create:
            self._make(path)
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
        """Returns the folder of the shards: that of config.shards.dir, or the workdir's own."""
        return config.shards.dir or str(self.shards)

    def _make(self, path: str) -> None:
        try:
            make_folder(self.root)
            probe = self.root / f".writable.{uuid.uuid4().hex}"  # several hosts may do this at once
            probe.write_text("")
            probe.unlink()
        except Exception as error:  # a bucket's client raises its own
            if not isinstance(error, OSError) and not is_remote(path):
                raise
            words = getattr(error, "strerror", None) or error
            raise InputError(f"--workdir={path}: can't be written ({words}); choose another folder.") from None

    def locked(self, *, part: str = "") -> contextlib.AbstractContextManager[None]:
        """Holds the folder for this process, or one part of a job on several hosts (see `held`).

        Raises:
          InputError: another process holds it.
        """
        return held(self.root, part=part)


@contextlib.contextmanager
def held(folder: UPath, *, part: str = "") -> Iterator[None]:
    """Holds a folder for this process; other parts of the same job may be held beside it.

    Args:
      folder: local, or in a bucket of Google Cloud Storage; folders elsewhere are not locked.
      part: which part of a job on several hosts this process is; "" for all of it.

    Raises:
      InputError: another process holds it.
    """
    if str(folder).startswith("gs://"):
        with _bucket_lock(folder / (f"{LOCK}.{part}" if part else LOCK)):
            yield
    elif is_remote(folder):
        yield
    else:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_file_lock(folder / LOCK, fcntl.LOCK_SH if part else fcntl.LOCK_EX))
            if part:
                stack.enter_context(_file_lock(folder / f"{LOCK}.{part}", fcntl.LOCK_EX))
            yield


@contextlib.contextmanager
def _file_lock(path: UPath, kind: int) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError:
            raise _refusal(path.parent, "") from None
        yield


def _refusal(folder: UPath, who: str) -> InputError:
    return InputError(f"--workdir={folder}: another process{who} is at work there; wait for it, or stop it.")


@contextlib.contextmanager
def _bucket_lock(path: UPath) -> Iterator[None]:
    lock = _Object(path)
    lock.take()
    done = threading.Event()
    renewing = threading.Thread(target=lock.renew_until, args=(done,), daemon=True, name="lock")
    renewing.start()
    try:
        yield
    finally:
        done.set()
        renewing.join()
        lock.give_back()


class _Object:
    """A lock in a bucket: who created the object's generation holds it; each renewal changes its metadata."""

    def __init__(self, path: UPath):
        self._path, self._fs = path, path.fs
        self._bucket, _, self._key = path.path.partition("/")
        self._generation = ""

    def take(self) -> None:
        """Creates the object; raises InputError if another process renews it."""
        content = json.dumps({"host": platform.node(), "process": os.getpid()}).encode()
        seen, since = "", time.monotonic()
        while True:
            try:
                self._fs.pipe_file(self._path.path, content, mode="create")
                self._generation = self._info()["generation"]
                return
            except FileExistsError:
                pass
            try:
                info = self._info()
                holder = json.loads(self._path.read_text())
            except FileNotFoundError:
                continue  # given back between the two
            state = f"{info['generation']} {info.get('metadata')}"
            who = printable(f" (on {holder['host']}, process {holder['process']})")
            if seen and state != seen:
                raise _refusal(self._path.parent, who)
            if not seen:
                seen = state
                print(f"{self._path}: was left by another process{who}; is it still there?", file=sys.stderr)
            gone = holder["host"] == platform.node() and not _alive(holder["process"])
            if gone or time.monotonic() - since > STALE:
                self._delete(info["generation"])
                seen, since = "", time.monotonic()
            else:
                time.sleep(1)

    def renew_until(self, done: threading.Event) -> None:
        """Renews the lock every RENEW seconds; ends the process if another one has it."""
        count = 0
        while not done.wait(RENEW):
            count += 1
            try:
                body = {"metadata": {"renewed": str(count)}}
                self._fs.call(
                    "PATCH", "b/{}/o/{}", self._bucket, self._key, json=body, ifGenerationMatch=self._generation
                )
                lost = self._info()["generation"] != self._generation
            except FileNotFoundError:
                lost = True
            except Exception as error:  # the network: as long as nobody else takes it, it is ours
                lost = "412" in str(error) or getattr(error, "code", None) == 412
            if lost and not done.is_set():
                words = "this process lost its lock, as after a long stop, and ends; start it again if no other runs."
                print(f"{self._path}: {words}", file=sys.stderr, flush=True)
                os._exit(InputError.code)

    def give_back(self) -> None:
        """Deletes the object, if it is still ours."""
        with contextlib.suppress(Exception):  # it goes stale by itself
            self._delete(self._generation)

    def _delete(self, generation: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.call("DELETE", "b/{}/o/{}", self._bucket, self._key, ifGenerationMatch=generation)

    def _info(self) -> dict:
        return self._fs.info(self._path.path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
