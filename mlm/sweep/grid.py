"""The grid of --vary: its values, and a name for each run. Nothing here imports jax."""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from mlm.errors import InputError

LONGEST = 100  # characters of a name, without its digest


def read(entries: Sequence[str]) -> dict[str, list[str]]:
    """Returns {key: texts of its values} of "KEY=V1,V2" entries; raises InputError."""
    varied: dict[str, list[str]] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not key or not equals:
            raise InputError(f"--vary {entry}: give a key and its values, as in train.seed=0,1,2.")
        if key in varied:
            raise InputError(f"--vary {entry}: {key} is varied twice; name all its values at once.")
        varied[key] = split(text)
    return varied


def split(text: str) -> list[str]:
    """Splits at commas outside brackets and quotes.

    A value that is quoted as a whole loses its quotes.
    """
    values: list[str] = []
    for part in text.split(","):
        if values and _is_open(values[-1]):
            values[-1] += f",{part}"
        else:
            values.append(part)
    if _is_open(values[-1]):
        raise InputError(
            f"--vary: {text} has a quote or a bracket without its other half; write both."
        )
    return [re.sub(r"^(['\"])([^'\"]*)\1$", r"\2", value) for value in values]


def _is_open(text: str) -> bool:
    """Returns whether a bracket or a quote in it still has to be closed."""
    brackets = any(
        text.count(opening) > text.count(closing) for opening, closing in ("()", "[]", "{}")
    )
    return brackets or any(text.count(quote) % 2 for quote in "'\"")


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """Returns {key: its last part, or all of it if another key ends in the same one}."""
    lasts = Counter(key.rpartition(".")[2] for key in keys)
    return {key: last if lasts[last := key.rpartition(".")[2]] == 1 else key for key in keys}


def name(values: dict[str, Any]) -> str:
    """Returns a name for the folder of a run, which does not depend on the other runs: "learning_rate=1e-05,seed=0".

    In letters, digits and a few signs; a digest tells apart what looks the same then.
    """
    short = short_keys(values)
    text = ",".join(f"{short[key]}={value}" for key, value in values.items())
    slug = re.sub(r"[^A-Za-z0-9.@+_,=-]+", "-", text)[:LONGEST]
    return text if slug == text else f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
