"""Expected ends of a command, each with its exit code (README, "Exit codes")."""


class StopError(Exception):
    """An expected end. The message is one sentence for a person: what is wrong, where, and what to do."""

    code = 1


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
