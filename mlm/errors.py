"""Expected ends of a command, each with its exit code (README, "Exit codes")."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)  # no file can have it


class StopError(Exception):
    """An expected end. The message is one sentence for a person: what is wrong, where, and what to do."""

    code = 1

    def __init__(self, message: str, code: int | None = None):
        super().__init__(message)
        self.code = self.code if code is None else code


class InputError(StopError):
    """A config value or an input that the command cannot work with."""

    code = 2


class NumericsError(StopError):
    """The nonfinite guard stopped the run."""

    code = 3


class DamageError(StopError):
    """Data or a checkpoint on disk is not what was written."""

    code = 4


class PreemptedError(StopError):
    """The run was told to stop, saved its state, and continues when it is started again."""

    code = 75


def of_storage(error: BaseException) -> InputError | None:
    """Returns the sentence for what a disk refuses, None for any other error."""
    if not isinstance(error, OSError):
        return None
    reason = f"({error.strerror or error})"
    file = error.filename
    if error.errno in FULL:
        file = file or "a file, or the output,"
        return InputError(
            f"{file} can't be written {reason}; make room, then run the same command again."
        )
    if "No usable temporary directory" in reason:
        return InputError(
            f"no folder for temporary files can be written {reason}; set TMPDIR to one that can."
        )
    if file and error.errno in REFUSED:
        fix = "change its permissions, or use another folder"
        return InputError(f"{file}: this user can't read or write it {reason}; {fix}.")
    if file and error.errno in NO_NAME:
        return InputError(
            f"{file}: no file or folder can have this name {reason}; use another one."
        )
    return None
