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

from pods.backend import PodError, SettingsError

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
        path = pathlib.Path(os.path.realpath(host_setup.expand(file)))
        name = ""
        where = f"copy it into {self.root}, and git add it"
        if path.is_relative_to(self.root):
            name = path.relative_to(self.root).as_posix()
            where = "git add it"
        if name not in self.files:
            where = where if os.access(path, os.F_OK) else "there is no such file"
            raise SettingsError(f"{file} is not in the code that goes to the hosts: {where}.")
        return name


def pack() -> Code:
    """Returns the code of the repository that we are in. Raises SettingsError for a file that git does not know."""
    root = pathlib.Path(
        _git(pathlib.Path.cwd(), "rev-parse", "--show-toplevel").decode().rstrip("\n")
    )
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    forgotten = _files(root, "--others", "--exclude-standard", "--", *WATCHED)
    if forgotten:
        raise SettingsError(
            f"{', '.join(forgotten[:5])} {'are' if len(forgotten) > 1 else 'is'} not known to git and would not reach "
            "the hosts: git add what belongs to the code, or ignore it."
        )
    names = sorted(_files(root, "--recurse-submodules"))
    known = [name for name in names if (root / name).is_symlink() or (root / name).is_file()]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in known:
            # of nobody, and of no time
            path = root / name
            info = tarfile.TarInfo(name)
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
    is_changed = bool(_git(root, "diff", "--name-only", "HEAD"))
    label = f"code {digest[:12]} (commit {commit[:12]}{', changed' if is_changed else ''})"
    return Code(
        root, digest, data, label, frozenset(known), commit + ("-dirty" if is_changed else "")
    )


def _files(root: pathlib.Path, *words: str) -> list[str]:
    return [os.fsdecode(name) for name in _git(root, "ls-files", "-z", *words).split(b"\0") if name]


def _git(root: pathlib.Path, *words: str) -> bytes:
    try:
        argv = ["git", "-C", str(root), *words]
        english = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(argv, capture_output=True, check=False, env=english)
    except FileNotFoundError:
        raise PodError("git isn't on this machine's PATH: install it.", "missing") from None
    if b"not a git repository" in done.stderr:
        raise SettingsError(f"{root} is in no git repository: run this from the code's folder.")
    if b"ambiguous argument 'HEAD'" in done.stderr:
        raise SettingsError(
            f"{root} has no commit yet: git add what belongs to the code, and git commit."
        )
    if done.returncode:
        raise PodError(
            f"git {words[0]} failed in {root}: {' '.join(done.stderr.decode(errors='replace').split())}."
        )
    return done.stdout
