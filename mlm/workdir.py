"""The folder of a run: where each thing lies, and the lock that lets one process at a time write there.

In a bucket, the lock is an object created on condition that it does not exist. Its holder renews it every RENEW
seconds; one that is not renewed for STALE seconds was left by a killed process and is taken over. A holder that finds
its lock gone exits at once: it was stopped for so long that another process has taken over.
"""

import contextlib
import fcntl
import itertools
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
from mlm.paths import UPath, is_remote, make_folder, refusing
from mlm.text import printable

LOCK = ".lock"
RENEW = 10.0  # seconds
STALE = 45.0  # seconds


class Workdir:
    """Paths within a run's folder, local or gs://."""

    def __init__(self, path: str, *, create: bool = True):
        """Creates the folder, or with `create` off requires it; raises InputError if it can't be used."""
        if not path:
            raise InputError("--workdir: name the folder of the run, as in --workdir=runs/first.")
        root = UPath(path)
        self.root = root if is_remote(path) else root.absolute()  # orbax wants absolute paths
        if create:
            with refusing(f"--workdir={path}: can't be written", "choose another folder"):
                make_folder(self.root)
                probe = self.root / f".writable.{uuid.uuid4().hex}"  # several hosts may do this at once
                probe.write_text("")
                probe.unlink()
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
        self.glue = self.root / "glue.json"  # {step: the newest table of the command `glue`}
        self.report = self.root / "report.html"
        # A classifier's {"split", "step", "scores", "sets": {NAME: scores}}, and of classes {"labels",
        # "confusion": [true][predicted]}.
        self.classification = self.root / "classification.json"
        self.predictions = self.root / "predictions"  # of a classifier's best checkpoint: SPLIT.tsv

    def shards_of(self, config: ConfigDict) -> str:
        """Returns the folder of the shards: config.shards.dir, or the workdir's own."""
        return config.shards.dir or str(self.shards)

    def export_of(self, step: int | None) -> UPath:
        """Returns the folder of the export of a step: `export` for None, which is the newest or best one."""
        return self.export if step is None else self.root / f"export-{step}"


def work_folder(folder: str) -> UPath:
    """Returns the folder, named {folder}.tmp, that exists while the shards are being made."""
    root = UPath(folder)
    if not root.name:
        raise InputError(f"{folder}: shards need a folder of their own; name one inside it.")
    return root.with_name(root.name + ".tmp")


@contextlib.contextmanager
def lock(folder: UPath) -> Iterator[None]:
    """Keeps other processes out of a folder, local or gs://; raises InputError if one has locked it."""
    with contextlib.ExitStack() as stack:
        if str(folder).startswith("gs://"):
            stack.enter_context(_lock_object(folder / LOCK))
        elif not is_remote(folder):
            file = stack.enter_context((folder / LOCK).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise _in_use(folder) from None
        yield


def _in_use(folder: UPath, holder: str = "") -> InputError:
    return InputError(f"--workdir={folder}: another process{holder} is using it; wait for it, or stop it.")


@contextlib.contextmanager
def _lock_object(path: UPath) -> Iterator[None]:
    """Locks in a bucket: whoever created the object's generation holds it; each renewal changes its metadata."""
    generation, released = _acquire(path), threading.Event()
    renewing = threading.Thread(target=_renew, args=(path, generation, released), daemon=True, name="lock")
    renewing.start()
    try:
        yield
    finally:
        released.set()
        renewing.join()
        with contextlib.suppress(Exception):  # it becomes stale by itself
            _call("DELETE", path, generation)


def _acquire(path: UPath) -> str:
    """Creates the object and returns its generation; raises InputError if another process renews it."""
    content = json.dumps({"host": platform.node(), "process": os.getpid()}).encode()
    first, since = "", time.monotonic()
    while True:
        with contextlib.suppress(FileExistsError):
            path.fs.pipe_file(path.path, content, mode="create")
            return path.fs.info(path.path)["generation"]
        try:
            info = path.fs.info(path.path)
            holder = json.loads(path.read_text())
        except FileNotFoundError:
            continue  # released between the two
        state = f"{info['generation']} {info.get('metadata')}"
        who = printable(f" (on {holder['host']}, process {holder['process']})")
        if not first:
            first = state
            print(f"{path}: is held by another process{who}; waiting to see if it is alive", file=sys.stderr)
        if state != first:
            raise _in_use(path.parent, who)
        dead = holder["host"] == platform.node() and not psutil.pid_exists(holder["process"])
        if dead or time.monotonic() - since > STALE:
            with contextlib.suppress(FileNotFoundError):
                _call("DELETE", path, info["generation"])
            first, since = "", time.monotonic()
        else:
            time.sleep(1)


def _renew(path: UPath, generation: str, released: threading.Event) -> None:
    """Renews the lock every RENEW seconds; exits the process if another one has taken it."""
    for count in itertools.count(1):
        if released.wait(RENEW):
            return
        try:
            _call("PATCH", path, generation, json={"metadata": {"renewed": str(count)}})
            lost = path.fs.info(path.path)["generation"] != generation
        except FileNotFoundError:
            lost = True
        except Exception as error:  # the network: the lock is ours as long as nobody else takes it
            lost = "412" in str(error) or getattr(error, "code", None) == 412
        if lost and not released.is_set():
            message = "this process was stopped so long that it lost its lock; restart it if no other is running."
            print(f"{path}: {message}", file=sys.stderr, flush=True)
            os._exit(InputError.code)


def _call(method: str, path: UPath, generation: str, **kwargs: Any) -> None:
    bucket, _, key = path.path.partition("/")
    path.fs.call(method, "b/{}/o/{}", bucket, key, ifGenerationMatch=generation, **kwargs)
