"""The folder of an export: what may be replaced by a new one. Without jax."""

from mlm.errors import InputError
from mlm.paths import UPath, children, is_begun

PROOF = "proof.json"  # written last: a folder with it is an export


def check(folder: UPath) -> None:
    """Raises InputError unless the folder is absent, empty, or an earlier export."""
    is_empty = folder.is_dir() and not children(folder)
    if folder.exists() and not (
        is_empty or (folder / PROOF).is_file() or is_begun(folder, last=PROOF)
    ):
        raise InputError(
            f"{folder}: is not an export (it has no {PROOF}); name another folder, or move it away."
        )
