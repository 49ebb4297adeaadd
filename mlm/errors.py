"""What a command can end with, other than success: each kind of end has one exit code (see README, "Exit codes")."""


class StopError(Exception):
    """An end that was foreseen. The message is one sentence for a person: what, where, and what to do."""

    code = 1


class InputError(StopError):
    """A config value or an input that the command cannot work with."""

    code = 2


class NumericsError(StopError):
    """The numerics guard stopped the run: too many non-finite updates in a row."""

    code = 3


class DamageError(StopError):
    """Data or a checkpoint on disk is not what was written."""

    code = 4


class PreemptedError(StopError):
    """The run was asked to end, has saved its state, and goes on from there when started again."""

    code = 75
