"""The grid of --vary: its values, and a name for each run. Nothing here imports jax."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mlm.errors import InputError

LONGEST, LONGEST_NAME = 40, 200  # characters of a value in a name, and of a name


def read(entries: Sequence[str]) -> dict[str, list[str]]:
    """Returns {key: texts of its values} of "KEY=V1,V2" entries; raises InputError."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not key or not equals:
            raise InputError(f"--vary {entry}: give a key and its values, as in train.seed=0,1,2.")
        if key in found:
            raise InputError(f"--vary {entry}: {key} is varied twice; name all its values at once.")
        found[key] = split(text)
        check_distinct(key, found[key])
    return found


def split(text: str) -> list[str]:
    """Splits at commas outside brackets and quotes; a value within quotes loses them."""
    values, depth, quote = [""], 0, ""
    for char in text:
        if quote or char in "'\"":
            quote = "" if char == quote else quote or char
        depth += 0 if quote else (char in "([{") - (char in ")]}")
        if char == "," and not quote and depth == 0:
            values.append("")
        else:
            values[-1] += char
    if quote or depth:
        raise InputError(f"--vary: {text} has a quote or a bracket without its other half; write both.")
    return [value[1:-1] if re.fullmatch(r"'[^']*'|\"[^\"]*\"", value) else value for value in values]


def check_distinct(key: str, values: Sequence[Any]) -> None:
    """Raises InputError if a value is given twice."""
    value, count = Counter(values).most_common(1)[0]
    if count > 1:
        raise InputError(f"--vary {key}: the value {value!r} is given twice; name each value once.")


def is_seed(key: str) -> bool:
    """Returns whether scores are summarized over the values of a key."""
    return key.endswith("seed")


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Returns {key: its last part, or all of it if another key ends in the same one}."""
    lasts = Counter(key.rpartition(".")[2] for key in keys)
    return {key: last if lasts[last := key.rpartition(".")[2]] == 1 else key for key in keys}


def label(values: dict[str, Any]) -> str:
    """Returns "learning_rate=1e-05, warmup_steps=100" of {key: value}."""
    short = short_keys(list(values))
    return ", ".join(f"{short[key]}={text_of(value)}" for key, value in values.items())


def text_of(value: Any) -> str:
    """Returns a value for a table."""
    return str(value) or '""'


def names(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a name for each run of {key: value}, which is a folder's, and does not depend on the other runs."""
    short = short_keys(list(cases[0]))
    found = (",".join(f"{short[key]}={_slug(value)}" for key, value in case.items()) for case in cases)
    return [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 7]}-{_digest(name)}" for name in found]


def _slug(value: Any) -> str:
    """Returns a value in letters, digits and a few signs; a digest tells those apart that look the same so."""
    text = str(value)
    slug = re.sub(r"[^A-Za-z0-9.@+_-]+", "-", text)
    if slug == text and 0 < len(slug) <= LONGEST:
        return slug
    return f"{slug.strip('-')[-LONGEST + 8 :] or 'empty'}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
