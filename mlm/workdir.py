"""The folder of a run: where each thing lies, and that one process at a time writes into it."""

from __future__ import annotations

import contextlib
import uuid

from mlm import lock
from mlm.errors import InputError
from mlm.paths import UPath, is_remote, make_folder


class Workdir:
    """Paths within a run's folder, local or gs://.

    Attributes:
      root, tokenizer, shards, checkpoints, export: folders.
      config, metrics, timing, advice, spikes, report: files.
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
        """Holds the folder for this process, or one part of a job on several hosts (see `lock.held`).

        Raises:
          InputError: another process holds it.
        """
        return lock.held(self.root, part=part)
