"""The grid of --vary: its values, and a name for each run. Nothing here imports jax."""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from mlm.errors import InputError

LONGEST, LONGEST_NAME = 40, 200  # characters of a value in a name, and of a name


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
    """Splits at commas outside brackets and quotes; a value that is quoted as a whole loses its quotes."""
    values = [""]
    depth = 0
    quote = ""
    for char in text:
        if quote or char in "'\"":
            quote = "" if char == quote else quote or char
        else:
            depth += (char in "([{") - (char in ")]}")
        if char == "," and not quote and depth == 0:
            values.append("")
        else:
            values[-1] += char
    if quote or depth:
        raise InputError(f"--vary: {text} has a quote or a bracket without its other half; write both.")
    return [re.sub(r"^'([^']*)'$|^\"([^\"]*)\"$", r"\1\2", value) for value in values]


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """Returns {key: its last part, or all of it if another key ends in the same one}."""
    lasts = Counter(key.rpartition(".")[2] for key in keys)
    return {key: last if lasts[last := key.rpartition(".")[2]] == 1 else key for key in keys}


def name(values: dict[str, Any]) -> str:
    """Returns a name for the folder of a run, which does not depend on the other runs: "learning_rate=1e-05,seed=0"."""
    short = short_keys(values)
    return _shorten(",".join(f"{short[key]}={_slug(str(value))}" for key, value in values.items()), LONGEST_NAME)


def _slug(text: str) -> str:
    """Returns a value in letters, digits and a few signs; a digest tells apart what looks the same then."""
    slug = re.sub(r"[^A-Za-z0-9.@+_-]+", "-", text).strip("-") or "empty"
    return _shorten(slug, LONGEST) if slug == text else f"{_shorten(slug, LONGEST)}-{_digest(text)}"


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 7]}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
