"""The folder of a run: where each thing lies, and the lock that lets one process at a time write there."""

import contextlib
import errno
import fcntl
import io
import os
import re
import uuid
from collections.abc import Iterator

from ml_collections import ConfigDict

from mlm import lease
from mlm.errors import InputError
from mlm.paths import UPath, canonical, check_reachable, is_remote, make_folder, refusing
from mlm.text import printable, say

LOCK = ".lock"
LOCKED = (errno.EWOULDBLOCK, errno.EACCES)  # by another process
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
# patterns to orbax, as are backslashes; top folders that it takes for gs:// and the like; what is not UTF-8
UNFIT = re.compile(r"[*?[\]\\\ud800-\udfff]|^/(gs|s3|az|hf)(?=/|$)")


class Workdir:
    """Paths within a run's folder, local or gs://."""

    def __init__(self, path: str, *, create: bool | None = True):
        """Creates the folder, or with False requires it, with None neither; raises InputError if it can't be used."""
        if not path:
            raise InputError("--workdir: name the folder of the run, as in --workdir=runs/first.")
        check_reachable(path)
        root = UPath(path)
        self.root = root if is_remote(path) else root.absolute()  # orbax wants absolute paths
        if match := UNFIT.search(str(self.root)):
            raise InputError(
                f"--workdir={printable(path)}: has {printable(match[0])} in it, which orbax takes for a pattern or a "
                "bucket, or which is not UTF-8; choose another folder."
            )
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
    path = folder / LOCK
    with contextlib.ExitStack() as stack:
        if str(folder).startswith("gs://"):
            stack.enter_context(lease.hold(path))
        elif not is_remote(folder):
            _make_writable(folder)
            fix = "ask its owner for `chmod a+rw` on it, or use another --workdir"
            with refusing(
                f"{path}: can't be locked, which keeps a second run out of the folder", fix
            ):
                # of a colleague, it can be locked all the same
                mode = (
                    os.O_RDWR | os.O_CREAT
                    if os.access(path, os.W_OK) or not path.exists()
                    else os.O_RDONLY
                )
                _lock_file(stack.enter_context(io.FileIO(os.open(path, mode, 0o666))), folder)
        yield


def _lock_file(file: io.FileIO, folder: UPath) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in LOCKED:
            raise InputError(
                f"{folder}: another process is using it; wait for it, or stop it."
            ) from None
        if error.errno not in NO_LOCKS:
            raise
        say(
            f"warning: {folder}: there are no locks on its file system ({error.strerror}); start no second run in it "
            "while one is running."
        )


def _make_writable(folder: UPath) -> None:
    """Creates a folder; raises InputError if nothing can be written there."""
    with refusing(f"{folder}: can't be written", "choose another folder"):
        make_folder(folder)
        probe = folder / f".writable.{uuid.uuid4().hex}"  # several hosts may do this at once
        probe.write_text("")
        probe.unlink()
