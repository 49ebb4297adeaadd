"""What a command remembers of disks and servers: the next one in the same program, as in a notebook, reads them again.

@of_a_command
@functools.cache
def ...
"""

from typing import Any

_caches: list[Any] = []


def of_a_command(cached: Any) -> Any:
    """Has what a function of functools' caches returned forgotten when a command starts."""
    _caches.append(cached)
    return cached


def forget() -> None:
    """Clears all these caches."""
    for cached in _caches:
        cached.cache_clear()
