"""What the next command of a program, as in a notebook, must not take over: what was read, and where jax caches.

@of_a_command
@functools.cache
def ...
"""

from typing import Any

_caches: list[Any] = []
_program_caches: set[str | None] = {None}  # folders that no user has named


def of_a_command(cached: Any) -> Any:
    """Returns the function, of functools.cache, whose cache is cleared when a command starts."""
    _caches.append(cached)
    return cached


def forget() -> None:
    """Clears these caches."""
    for cached in _caches:
        cached.cache_clear()


def cache_programs(folder: str | None) -> None:
    """Has jax cache its compiled programs in a folder, or nowhere, unless the user has named one."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if jax.config.jax_compilation_cache_dir in _program_caches:
        _program_caches.add(folder)
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # that of an earlier command, which jax would keep
