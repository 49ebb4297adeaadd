"""Where shards are made before they are in their place: {folder}.tmp, which all hosts share.

    blocks-{corpus and tokenizer}/   a file a block, see blocks.py
    {inputs}/hosts/                  which hosts are there
    {inputs}/notes/                  which shards are whole, see rows.py
    {inputs}/scratch/                what each host has begun; for a bucket, in a temporary folder of the host
    {inputs}/shards/                 the shards, renamed to {folder} at the end. In a bucket they are put in their place
                                     as they come, and the manifest last

What lies there is taken up when the same command is started again, on any number of hosts. What other settings made
lies in folders of other names, and is removed when the shards are complete.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlm.data.blocks import Block
from mlm.data.hosts import Hosts
from mlm.data.manifest import NAME, Manifest, load_manifest, work_folder
from mlm.errors import InputError
from mlm.paths import UPath, children, is_remote, make_folder, remove, write_text

FETCHES = 8  # blocks fetched from a bucket at once


class Work:
    """The folders of one writing of shards.

    Attributes:
      folder: of the finished shards, as it was named.
      inputs: fingerprint of all that the shards are made from.
      blocks, hosts, notes, shards: shared folders.
      scratch: this host's own, local folder.
    """

    def __init__(self, folder: str, texts: list[Any], settings: list[Any], hosts: Hosts):
        """Names the folders and makes none.

        Args:
          folder: of the finished shards.
          texts: JSON, what decides the tokens.
          settings: JSON, what else decides the shards.
          hosts: which of the hosts this is.
        """
        self.folder = folder
        self.inputs = _hash([*texts, *settings])
        self._target, self._root = UPath(folder), work_folder(folder)
        own = self._root / self.inputs[:16]
        self.blocks = self._root / f"blocks-{_hash(texts)[:16]}"
        self.hosts, self.notes = own / "hosts", own / "notes"
        self.shards = self._target if is_remote(folder) else own / "shards"
        name = f"{hosts.index}-of-{hosts.count}"
        if is_remote(folder):
            name = f"mlm-shards-{_hash([folder, self.inputs])[:16]}-{name}"
            self.scratch = Path(tempfile.gettempdir(), name)
        else:
            self.scratch = Path(str(own / "scratch" / name))

    def is_done(self) -> bool:
        """Returns whether the shards are in their place; while others may yet write them, see `is_published`.

        Raises:
          InputError: something else is there.
        """
        if self._target.is_file() or children(self._target):
            if self.is_published():
                return True
            if not is_remote(self.folder) or not children(self.hosts):
                raise InputError(
                    f"{self.folder}: holds shards of another corpus, tokenizer or setting; use another --workdir or "
                    "shards.dir, or set the config back."
                )
        return False

    def is_published(self) -> bool:
        """Returns whether the manifest of these shards is there."""
        return (self._target / NAME).is_file() and load_manifest(self.folder).inputs == self.inputs

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Makes the folders, and takes away what this host has begun and not finished.

        Raises:
          InputError: they can't be made, or something can't be written.
        """
        try:
            remove(UPath(self.scratch))
            self.scratch.mkdir(parents=True)
            for folder in (self.blocks, self.notes):
                make_folder(folder)
            yield
        except OSError as error:
            raise InputError(
                f"{self.folder}: can't be written ({error.strerror or error}); make room there, or choose another "
                "shards.dir. What is written is kept for the next start."
            ) from error
        finally:
            remove(UPath(self.scratch))

    def local_blocks(self, blocks: list[Block]) -> list[str]:
        """Returns local files of the blocks; those of a bucket are fetched."""
        if not is_remote(self.folder):
            return [str(self.blocks / block.name) for block in blocks]

        def fetch(block: Block) -> str:
            file = self.scratch / block.name
            self.blocks.fs.get_file((self.blocks / block.name).path, str(file))
            return str(file)

        with concurrent.futures.ThreadPoolExecutor(FETCHES) as pool:
            return list(pool.map(fetch, blocks))

    def publish(self, manifest: Manifest) -> None:
        """Puts the finished shards in their place, the manifest last, and removes the rest."""
        write_text(self.shards / NAME, manifest.to_json() + "\n")
        if not is_remote(self.folder):
            self.shards.rename(self.folder)
        remove(self._root)


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
