"""What a pod command can fail with. A message is one sentence for a person: what, where, and what to do."""

# kinds of PodError that may pass by themselves; the second ones only so many times
PASSING = ("network", "absent", "exists", "stockout")
TRIED = ("hosts", "internal", "other")


class PodError(Exception):
    """A foreseen end of a command."""

    # kind: one of those above, "absent" being a pod that is not there; or "quota", "permission", "login", "api",
    # "billing", "missing" (no gcloud here) or "settings", which no new try can fix
    code, kind = 1, "other"

    def __init__(self, message: str, kind: str = ""):
        super().__init__(message)
        self.kind = kind or self.kind


class SettingsError(PodError):
    """A key of pod.toml, a flag or an argument that can't be right."""

    code, kind = 2, "settings"
