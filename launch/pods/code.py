"""The code that goes to the hosts: one archive of HEAD, with what the working tree changes, named by its hash.

The archive's bytes depend on its content alone.
"""

import dataclasses
import gzip
import hashlib
import io
import os
import pathlib
import subprocess
import tarfile

import host_setup

from pods.backend import SettingsError

WATCHED = ("mlm", "configs")  # an untracked file here is one that was forgotten


@dataclasses.dataclass(frozen=True)
class Code:
    """root: of the repository; hash: SHA-256 of the archive; label: for a person; files: the paths in it.

    commit: its own, with "-dirty" where the working tree has changed it.
    """

    root: pathlib.Path
    hash: str
    data: bytes
    label: str
    files: frozenset[str]
    commit: str

    def path_of(self, file: str) -> str:
        """Returns the path of a config, or of a researcher's file, in the code. Raises SettingsError without one."""
        name = os.path.relpath(os.path.realpath(host_setup.expand(file)), self.root)
        if name not in self.files:
            raise SettingsError(
                f"{file} is not in the code that goes to the hosts: it must be a file in {self.root}; git add it."
            )
        return name


def pack() -> Code:
    """Returns the code of the repository that we are in. Raises SettingsError for a file that git does not know."""
    root = pathlib.Path(_git(pathlib.Path.cwd(), "rev-parse", "--show-toplevel").rstrip("\n"))
    commit = _git(root, "rev-parse", "HEAD").strip()
    forgotten = _files(root, "--others", "--exclude-standard", "--", *WATCHED)
    if forgotten:
        raise SettingsError(
            f"not known to git, and would not reach the hosts: {', '.join(forgotten[:5])}; git add what belongs to the "
            "code, or ignore it."
        )
    names = [name for name in sorted(_files(root)) if os.path.lexists(root / name)]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            path = root / name
            info = tarfile.TarInfo(name)  # of nobody, and of no time
            content = b""
            if path.is_symlink():  # as it is: hosts refuse one that leaves the code
                info.type = tarfile.SYMTYPE
                info.linkname = str(path.readlink())
            else:
                content = path.read_bytes()
                info.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data = gzip.compress(archive.getvalue(), compresslevel=6, mtime=0)
    digest = hashlib.sha256(data).hexdigest()
    if _git(root, "diff", "--name-only", "HEAD"):
        commit += "-dirty"
    label = f"code {digest[:12]} (commit {commit})"
    return Code(root, digest, data, label, frozenset(names), commit)


def _files(root: pathlib.Path, *words: str) -> list[str]:
    return [name for name in _git(root, "ls-files", "-z", *words).split("\0") if name]


def _git(root: pathlib.Path, *words: str) -> str:
    argv = ["git", "-C", str(root), *words]
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise SettingsError(f"git {words[0]} failed in {root}: {said}")
    return os.fsdecode(done.stdout)
