"""What a pod command can fail with. A message is one sentence for a person: what, where, and what to do."""

from __future__ import annotations


class PodError(Exception):
    """A foreseen end of a command."""

    # kind: "stockout", "quota", "permission", "login", "api", "absent" (no such resource), "exists", "missing" (no
    # gcloud here), "network", "internal" (a fault of the cloud's own), "hosts" (some failed), "settings" or "other"
    code, kind = 1, "other"

    def __init__(self, message: str, kind: str = ""):
        super().__init__(message)
        self.kind = kind or self.kind


class SettingsError(PodError):
    """A key of pod.toml, a flag or an argument that can't be right."""

    code, kind = 2, "settings"
