"""Which process of how many this is, how they meet, agree and stop together."""

from mlm.cluster.watch import barrier, beats, is_primary, progress

__all__ = ["barrier", "beats", "is_primary", "progress"]
