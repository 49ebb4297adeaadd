"""One kind of path for local files and gs:// alike: `pathlib`'s interface, by universal_pathlib."""

from upath import UPath

__all__ = ["UPath"]
