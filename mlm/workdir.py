"""The folder of a run: where each thing lies, and that one process at a time writes into it."""

from __future__ import annotations

import contextlib
import fcntl
import uuid
from collections.abc import Iterator

from mlm.errors import InputError
from mlm.paths import UPath


class Workdir:
    """Paths within a run's folder, local or gs://.

    Attributes:
      root, tokenizer, shards, checkpoints, export: folders.
      config, metrics, timing, report: files.
    """

    def __init__(self, path: str, *, create: bool = True):
        """Makes the folder, or, with `create` off, only looks for it.

        Raises:
          InputError: no folder was named, it can't be made or written, or it is not there.
        """
        if not path:
            raise InputError("--workdir: name the folder of the run, as in --workdir=runs/first.")
        root = UPath(path)
        self.root = root if "://" in path else root.absolute()  # orbax wants absolute paths
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
        self.report = self.root / "report.html"

    def _make(self, path: str) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".writable.{uuid.uuid4().hex}"  # several hosts may do this at once
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"--workdir={path}: can't be written ({error.strerror or error}); choose another folder."
            ) from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder for this process; on gs:// there is no such lock.

        Raises:
          InputError: another process holds it.
        """
        if "://" in str(self.root):
            yield
            return
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(
                    f"--workdir={self.root}: another process is at work there; wait for it, or stop it."
                ) from None
            yield
