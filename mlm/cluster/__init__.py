"""Which process of how many this is, how they meet, agree and stop together."""

from mlm.cluster.watch import barrier, is_primary, progress, with_progress

__all__ = ["barrier", "is_primary", "progress", "with_progress"]
