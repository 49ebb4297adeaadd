"""The folder of a run: where each thing lies, and the lock that lets one process at a time write there.

In a bucket, and on a file system without locks, the lock is a lease: an object or file created on condition that it
does not exist. Its holder renews it every RENEW seconds; one that is not renewed for STALE seconds was left by a killed
process, and is deleted, on condition that it is still the same, by whoever waits for it: of several, one creates its
own. A holder that finds another's exits at once: it was stopped for so long that another process has taken over.
"""

import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psutil
from ml_collections import ConfigDict

from mlm.errors import InputError
from mlm.paths import UPath, canonical, check_reachable, is_remote, make_folder, refusing
from mlm.text import is_text, printable, say

LOCK = ".lock"
LEASE = ".lock.json"  # instead, on a file system without locks
LOCKED = (errno.EWOULDBLOCK, errno.EACCES)  # by another process
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
RENEW = 10.0  # seconds
STALE = 45.0  # seconds
BUCKETS = [("gs",), ("s3",), ("az",), ("hf",)]  # top folders that orbax takes for gs:// and the like


class Workdir:
    """Paths within a run's folder, local or gs://."""

    def __init__(self, path: str, *, create: bool | None = True):
        """Creates the folder, or with False requires it, with None neither; raises InputError if it can't be used."""
        if not path:
            raise InputError("--workdir: name the folder of the run, as in --workdir=runs/first.")
        check_reachable(path)
        root = UPath(path)
        self.root = root if is_remote(path) else root.absolute()  # orbax wants absolute paths
        if not is_remote(path) and ("\\" in str(self.root) or self.root.parts[1:2] in BUCKETS):
            reason = f"{self.root} has a backslash in it, or begins with the name of a kind of bucket (/gs/)"
            raise InputError(f"--workdir={path}: {reason}, which orbax takes for another path; choose another folder.")
        if not is_text(str(self.root)):
            shown = printable(str(self.root))
            raise InputError(f"--workdir={shown}: is not UTF-8, as libraries need it; rename that part of the path.")
        if create:
            _make_writable(self.root)
        elif create is False and not self.root.is_dir():
            raise InputError(f"--workdir={path}: there is no such folder.")
        self.tokenizer = self.root / "tokenizer"
        self.shards = self.root / "shards"
        self.checkpoints = self.root / "checkpoints"
        self.export = self.root / "export"
        self.config = self.root / "config.json"
        self.metrics = self.root / "metrics.jsonl"
        self.timing = self.root / "timing.jsonl"
        self.norms = self.root / "norms.jsonl"
        self.advice = self.root / "advice.jsonl"
        self.spikes = self.root / "spikes.jsonl"
        self.glue = self.root / "glue.json"  # {step: the newest table of the command `glue`}
        self.report = self.root / "report.html"
        # A classifier's {"split", "step", "scores", "sets": {NAME: scores}}, and of classes {"labels",
        # "confusion": [true][predicted]}.
        self.classification = self.root / "classification.json"
        self.predictions = self.root / "predictions"  # of a classifier's best checkpoint: SPLIT.tsv

    @property
    def tokenizer_folder(self) -> str | None:
        """The folder `tokenizer`, None as long as there is no tokenizer in it."""
        return str(self.tokenizer) if (self.tokenizer / "tokenizer.json").is_file() else None

    def shards_of(self, config: ConfigDict) -> str:
        """Returns the folder of the shards: config.shards.dir, or the workdir's own."""
        return config.shards.dir or str(self.shards)

    def export_of(self, step: int | None) -> UPath:
        """Returns the folder of the export of a step: `export` for None, which is the newest or best one."""
        return self.export if step is None else self.root / f"export-{step}"


def work_folder(folder: str) -> UPath:
    """Returns the folder, named {folder}.tmp, that exists while the shards are being made."""
    root = UPath(canonical(folder))  # of a link, beside what it leads to
    if not root.name:
        raise InputError(f"{folder}: shards need a folder of their own; name one inside it.")
    return root.with_name(root.name + ".tmp")


@contextlib.contextmanager
def lock(folder: UPath) -> Iterator[None]:
    """Keeps other processes out of a folder, local or gs://; raises InputError if one has locked it, or it can't be."""
    path, problem = folder / LOCK, None
    with contextlib.ExitStack() as stack:
        if str(folder).startswith("gs://"):
            stack.enter_context(_held(_Object(path), folder))
        elif not is_remote(folder):
            _make_writable(folder)
            fix = "ask its owner for `chmod a+rw` on it, remove it if no run uses the folder, or use another --workdir"
            with refusing(f"{path}: can't be locked, which keeps a second run out of the folder", fix):
                try:
                    number = os.open(str(path), os.O_RDWR | os.O_CREAT, 0o666)
                except PermissionError:  # a colleague's, which can be locked all the same, except on NFS
                    number = os.open(str(path), os.O_RDONLY)
                file = stack.enter_context(io.FileIO(number))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    problem = error
                    if error.errno not in (*LOCKED, *NO_LOCKS):
                        raise
        if problem and problem.errno in LOCKED:
            raise _in_use(folder)
        if problem:
            remark = f"there are no locks on its file system ({problem.strerror}); {LEASE} keeps other runs out"
            say(f"{folder}: {remark}")
            stack.enter_context(_held(_File(folder / LEASE), folder))
        yield


def _make_writable(folder: UPath) -> None:
    """Creates a folder; raises InputError if nothing can be written there."""
    with refusing(f"{folder}: can't be written", "choose another folder"):
        make_folder(folder)
        probe = folder / f".writable.{uuid.uuid4().hex}"  # several hosts may do this at once
        probe.write_text("")
        probe.unlink()


def _in_use(folder: UPath, holder: str = "") -> InputError:
    return InputError(f"{folder}: another process{holder} is using it; wait for it, or stop it.")


class _Object:
    """A lease in a bucket: a new one has another generation, and a renewal changes its metadata."""

    def __init__(self, path: UPath):
        self.path = path

    def create(self, holder: dict[str, Any]) -> str:
        """Returns what tells this lease from others; raises FileExistsError."""
        self.path.fs.pipe_file(self.path.path, json.dumps(holder).encode(), mode="create")
        return self.path.fs.info(self.path.path)["generation"]

    def read(self) -> tuple[str, str, dict[str, Any]]:
        """Returns (what `create` returned, what each renewal changes, holder); raises FileNotFoundError."""
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
            self.path.fs.call(method, "b/{}/o/{}", bucket, key, ifGenerationMatch=generation, json=body)
        except Exception as error:
            if "412" in str(error) or getattr(error, "code", None) == 412:  # precondition failed
                raise FileNotFoundError(f"{self.path}: is another lease") from error
            raise


class _File:
    """A lease on a file system without locks, where a file can at least be created once: the same methods."""

    def __init__(self, path: UPath):
        self.path, self._holder = path, {}

    def create(self, holder: dict[str, Any]) -> str:
        self._holder = holder | {"token": uuid.uuid4().hex}
        with self.path.open("x", encoding="utf-8") as file:
            file.write(self._line(0))
        return self._holder["token"]

    def read(self) -> tuple[str, str, dict[str, Any]]:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        try:
            holder = dict(json.loads(text))
        except (ValueError, TypeError):  # its process was killed before it had written it
            holder = {}
        return holder.get("token", ""), text, holder

    def renew(self, token: str, count: int) -> bool:
        try:
            if self.read()[0] != token:
                return False
            with self.path.open("r+", encoding="utf-8") as file:
                file.write(self._line(count))
        except FileNotFoundError:
            return False
        except OSError:
            pass  # as of a network's file system that does not answer
        return True

    def delete(self, token: str) -> None:
        if self.read()[0] != token:
            return
        taken = _File(self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}"))
        self.path.rename(taken.path)  # of several processes, one succeeds
        if taken.read()[0] == token:
            taken.path.unlink()
        else:  # another process has just replaced it
            taken.path.rename(self.path)

    def _line(self, count: int) -> str:
        return json.dumps(self._holder | {"renewed": f"{count:010}"}) + "\n"  # always of one length


@contextlib.contextmanager
def _held(lease: _Object | _File, folder: UPath) -> Iterator[None]:
    """Holds a lease and renews it; raises InputError if another process does."""
    generation, released = _acquire(lease, folder), threading.Event()
    renewing = threading.Thread(target=_renew, args=(lease, generation, released), daemon=True, name="lock")
    renewing.start()
    try:
        yield
    finally:
        released.set()
        renewing.join()
        with contextlib.suppress(Exception):  # it becomes stale by itself
            lease.delete(generation)


def _acquire(lease: _Object | _File, folder: UPath) -> str:
    """Creates the lease and returns its generation; raises InputError if another process renews it."""
    first, since = None, time.monotonic()
    while True:
        with contextlib.suppress(FileExistsError):
            return lease.create({"host": platform.node(), "process": os.getpid()})
        try:
            generation, renewal, holder = lease.read()
        except FileNotFoundError:
            time.sleep(0.1)  # released between the two
            continue
        host, process, state = holder.get("host"), holder.get("process"), (generation, renewal)
        name = printable(f" (on {host}, process {process})") if holder else ""
        if first is None:
            first = state
            say(f"{lease.path}: is held by another process{name}; waiting to see if it is alive")
        if state != first:
            raise _in_use(folder, name)
        dead = host == platform.node() and isinstance(process, int) and not psutil.pid_exists(process)
        if dead or time.monotonic() - since > STALE:
            with contextlib.suppress(FileNotFoundError):
                lease.delete(generation)
            first, since = None, time.monotonic()
        else:
            time.sleep(1)


def _renew(lease: _Object | _File, generation: str, released: threading.Event) -> None:
    """Renews the lease every RENEW seconds; exits the process if another one has taken it."""
    for count in itertools.count(1):
        if released.wait(RENEW):
            return
        if not lease.renew(generation, count) and not released.is_set():
            message = "this process was stopped so long that it lost its lock; restart it if no other is running."
            say(f"{lease.path}: {message}")
            os._exit(InputError.code)
