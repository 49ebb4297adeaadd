"""What manifest.json must hold: the type and range of every field, so that whoever reads it need not ask again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from mlm.text import is_text

SHARD_NAME = re.compile(r"dataset-([0-9]{1,18})-([0-9]{1,18})\.tfrecord")
SPLITS = ("train", "validation")  # every folder of shards has these two

Rule = tuple[Callable[[Any], bool], str]  # whether a value is allowed, and what is, in words


def _whole(least: int, most: int = 2**63 - 1) -> Rule:
    return lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"


def _or_null(rule: Rule) -> Rule:
    return lambda value: value is None or rule[0](value), f"{rule[1]}, or null"


COUNT, SIZE = _whole(0), _whole(1, 2**31 - 1)  # ids are int32
HASH: Rule = (
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
    "a SHA-256 of 64 lower-case hexadecimal digits",
)
OBJECT: Rule = (lambda value: isinstance(value, dict), "an object")
LIST: Rule = (lambda value: isinstance(value, list), "a list")
MANIFEST: dict[str, Rule] = {
    "length": SIZE,
    "vocab_size": SIZE,
    "special_ids": OBJECT,
    "all_special_ids": LIST,
    "tokenizer_fingerprint": HASH,
    "full_rows": (lambda value: isinstance(value, bool), "true or false"),
    "inputs": (lambda value: value == "" or HASH[0](value), f"{HASH[1]}, or empty"),
    "source": (is_text, "a text"),
    "splits": OBJECT,
}
SPLIT: dict[str, Rule] = {
    "shards": LIST,
    **dict.fromkeys(("documents", "duplicates", "tokens", "dropped_tokens", "text_bytes"), _or_null(COUNT)),
    "unigram_entropy": _or_null(
        (lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a finite number from 0 up")
    ),
}
SHARD: dict[str, Rule] = {
    "file": (lambda value: isinstance(value, str), "the name of a file"),
    "records": COUNT,
    "bytes": COUNT,
    "sha256": _or_null(HASH),
}


def check(content: dict[str, Any], roles: tuple[str, ...]) -> None:
    """Raises ValueError with what is wrong in the content of a manifest.json, its "format" left out.

    Args:
      content: as JSON gives it.
      roles: the keys of "special_ids".
    """
    _fields("", content, MANIFEST)
    one_id = _whole(0, content["vocab_size"] - 1)
    _fields("special_ids.", content["special_ids"], dict.fromkeys(roles, one_id))
    for place, number in enumerate(content["all_special_ids"]):
        _value(f"all_special_ids[{place}]", number, one_id)
    missing = set(content["special_ids"].values()) - set(content["all_special_ids"])
    if missing:
        raise ValueError(f"all_special_ids lacks {min(missing)}, which special_ids has")
    _fields("splits.", content["splits"], dict.fromkeys(SPLITS, OBJECT))
    for split in SPLITS:
        _split(f"splits.{split}", split, content["splits"][split])


def _split(name: str, split: str, content: dict[str, Any]) -> None:
    _fields(f"{name}.", content, SPLIT)
    seen = set()
    for place, shard in enumerate(content["shards"]):
        where = f"{name}.shards[{place}]"
        _value(where, shard, OBJECT)
        _fields(f"{where}.", shard, SHARD)
        match = SHARD_NAME.fullmatch(shard["file"].removeprefix(f"{split}/"))
        named = match is not None and shard["file"].startswith(f"{split}/")
        if not named or int(match[2]) != shard["records"]:
            wanted = f"{split}/dataset-NUMBER-{shard['records']}.tfrecord, after its records"
            raise ValueError(f"{where}.file is {_shown(shard['file'])}, but must be {wanted}")
        if shard["file"] in seen:
            raise ValueError(f"{where}.file is {_shown(shard['file'])}, which is in the list already")
        seen.add(shard["file"])


def _fields(prefix: str, content: dict[str, Any], rules: dict[str, Rule]) -> None:
    unknown = [key for key in content if key not in rules]
    if unknown:
        raise ValueError(f"{prefix}{_shown(unknown[0])} is not a field of a manifest")
    for key, rule in rules.items():
        if key not in content:
            raise ValueError(f"{prefix}{key} is missing")
        _value(f"{prefix}{key}", content[key], rule)


def _value(name: str, value: Any, rule: Rule) -> None:
    allowed, words = rule
    if not allowed(value):
        raise ValueError(f"{name} is {_shown(value)}, but must be {words}")


def _shown(value: Any) -> str:
    """Returns a value as JSON, cut; no control character of it reaches a terminal."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
