"""Where shards are made before they are in place: {folder}.tmp, which all hosts share.

    blocks-{corpus and tokenizer}/   a file per block, see blocks.py
    {inputs}/hosts/                  a file per host: it has started, and the hash of the corpus that it has read
    {inputs}/notes/                  which shards are complete, see shards.py
    {inputs}/scratch/                incomplete files of each host; for a bucket, in a temporary folder of the host
    {inputs}/shards/                 the shards, renamed to {folder} at the end. In a bucket they are put in place one
                                     by one, and the manifest last

The same command resumes from what is there, on any number of hosts. Other settings have folders of other names, which
are removed when the shards are complete.
"""

import contextlib
import hashlib
import json
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mlm import logs
from mlm.data.hosts import Hosts
from mlm.data.manifest import NAME, Manifest, load_manifest, work_folder
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, children, is_remote, make_folder, remove, write_text

RESTART_TIME = 60.0  # seconds to restart another host after the corpus was changed on all of them


class Work:
    """The folders for making the shards of one folder, and the hosts that share them."""

    def __init__(self, folder: str, texts: list[Any], settings: list[Any], hosts: Hosts, vocab_size: int):
        """Names the folders, by what decides the tokens (`texts`) and what else decides the shards (`settings`)."""
        self.folder, self.hosts = folder, hosts
        self.inputs = _hash([*texts, *settings])
        self.dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)  # of the tokens in a block's file
        self._target, self._root = UPath(folder), work_folder(folder)
        self.blocks, own = self._root / f"blocks-{_hash(texts)[:16]}", self._root / self.inputs[:16]
        self._host_files, self.notes, self.shards = own / "hosts", own / "notes", own / "shards"
        host = f"{hosts.index}-of-{hosts.count}"
        self.scratch = Path(str(own / "scratch" / host))
        self._corpus: str | None = None
        self._differs: dict[int, float] = {}  # hosts that have read another corpus, and since when
        if is_remote(folder):
            name = f"mlm-shards-{_hash([folder, self.inputs])[:16]}-{host}"
            self.shards, self.scratch = self._target, Path(tempfile.gettempdir(), name)

    def is_done(self) -> bool:
        """Returns whether the shards are in place; raises InputError if something else is there."""
        if not (self._target.is_file() or children(self._target)):
            return False
        if self.is_published():
            return True
        if is_remote(self.folder) and children(self._host_files):
            return False  # begun, and not finished
        raise InputError(
            f"{self.folder}: holds shards of another corpus, tokenizer or setting; use another --workdir or "
            "shards.dir, or restore the config."
        )

    def is_published(self) -> bool:
        """Returns whether the manifest of these shards is there."""
        return (self._target / NAME).is_file() and load_manifest(self.folder).inputs == self.inputs

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Makes the folders and removes incomplete files of this host; raises InputError if they can't be written."""
        try:
            remove(UPath(self.scratch))
            self.scratch.mkdir(parents=True)
            for folder in (self.blocks, self.notes, self._host_files):
                make_folder(folder)
            self.has_read(None)
            yield
        except OSError as error:
            raise InputError(
                f"{self.folder}: can't be written ({error.strerror or error}); make room there, or choose another "
                "shards.dir. What is written is kept for the next start."
            ) from error
        finally:
            remove(UPath(self.scratch))

    def local_blocks(self, names: list[str]) -> list[str]:
        """Returns the local files of blocks; those of a bucket are downloaded."""
        if not is_remote(self.folder):
            return [str(self.blocks / name) for name in names]
        files = [str(self.scratch / name) for name in names]
        self.blocks.fs.get([(self.blocks / name).path for name in names], files)
        return files

    def has_read(self, corpus: str | None) -> None:
        """Shows the other hosts a hash of the corpus that this one has read, None while it reads."""
        self._corpus = corpus
        write_text(self._host_file(self.hosts.index), json.dumps({"host": platform.node(), "stream": corpus}))

    def _host_file(self, index: int) -> UPath:
        return self._host_files / f"{index}-of-{self.hosts.count}.json"

    def _not_started(self, others: Iterable[int]) -> list[int]:
        """Returns which of some other hosts have not started yet; raises InputError if one reads another corpus."""
        absent = []
        for index in sorted(others):
            content = logs.read_object(self._host_file(index))
            if not {"host", "stream"} <= content.keys():
                absent.append(index)
            elif content["stream"] in (None, self._corpus):
                self._differs.pop(index, None)
            elif time.monotonic() - self._differs.setdefault(index, time.monotonic()) >= RESTART_TIME:
                raise InputError(
                    f"config.corpus: host {index} ({content['host']}) reads other documents than host "
                    f"{self.hosts.index} ({platform.node()}); give all hosts the same sources and packages, and "
                    "restart them."
                )
        return absent

    def wait(self, what: str, names: list, poll: Callable[[], dict]) -> list | None:
        """Waits until every host has written its items; returns them by `names`, None if the manifest came first."""
        found = {}

        def missing() -> list[int]:
            found.update(poll())
            numbers = [number for number, name in enumerate(names) if name not in found]
            if numbers and self.hosts.count > 1 and self.is_published():
                return []
            if any(map(self.hosts.owns, numbers)):
                raise DamageError(f"{self.folder}: {what} just written are not there; check the disk.")
            return numbers

        def describe(numbers: list[int]) -> str:
            owners = Counter(number % self.hosts.count for number in numbers)
            absent = self._not_started(owners)
            no_sign = f" (no sign of host {', '.join(map(str, absent))} in {self._host_files})" if absent else ""
            return ", ".join(f"{count} {what} of host {host}" for host, count in sorted(owners.items())) + no_sign

        self.hosts.wait(missing, describe)
        return [found[name] for name in names] if found.keys() >= set(names) else None

    def publish(self, manifest: Manifest) -> None:
        """Puts the finished shards in place, the manifest last, and removes the rest."""
        write_text(self.shards / NAME, manifest.to_json() + "\n")
        if not is_remote(self.folder):
            self.shards.rename(self.folder)
        remove(self._root)


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
