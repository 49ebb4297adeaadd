"""What manifest.json must hold: the type and range of every field, checked once, where it is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from mlm.data.tokenizer import ROLES
from mlm.text import is_text

SHARD_NAME = re.compile(r"dataset-([0-9]{1,18})-([0-9]{1,18})\.tfrecord")
SPLITS = ("train", "validation")  # every folder of shards has these two

Rule = tuple[Callable[[Any], bool], str]  # whether a value is allowed, and what is, in words
Schema = Rule | dict[str, "Schema"] | list["Schema"]  # a value; an object with exactly these fields; a list of these


def _integer(least: int, most: int = 2**63 - 1) -> Rule:
    return lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"


def _or_null(rule: Rule) -> Rule:
    return lambda value: value is None or rule[0](value), f"{rule[1]}, or null"


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


COUNT, SIZE = _integer(0), _integer(1, 2**31 - 1)  # ids are int32
HASH: Rule = _is_sha256, "a SHA-256 of 64 lower-case hexadecimal digits"
ENTROPY: Rule = lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a finite number from 0 up"
SPLIT: Schema = {
    "shards": [{"file": (is_text, "the name of a file"), "records": COUNT, "bytes": COUNT, "sha256": _or_null(HASH)}],
    **dict.fromkeys(("documents", "duplicates", "tokens", "dropped_tokens", "text_bytes"), _or_null(COUNT)),
    "unigram_entropy": _or_null(ENTROPY),
}


def check(content: dict[str, Any]) -> None:
    """Raises ValueError with what is wrong in the content of a manifest.json, its "format" left out."""
    size = content.get("vocab_size")
    token_id = _integer(0, size - 1) if type(size) is int else COUNT
    schema = {
        "length": SIZE,
        "vocab_size": SIZE,
        "special_ids": dict.fromkeys(ROLES, token_id),
        "all_special_ids": [token_id],
        "tokenizer_fingerprint": HASH,
        "full_rows": (lambda value: isinstance(value, bool), "true or false"),
        "inputs": (lambda value: value == "" or _is_sha256(value), f"{HASH[1]}, or empty"),
        "source": (is_text, "a text"),
        "splits": dict.fromkeys(SPLITS, SPLIT),
    }
    _check("", content, schema)
    missing = set(content["special_ids"].values()) - set(content["all_special_ids"])
    if missing:
        raise ValueError(f"all_special_ids lacks {min(missing)}, which special_ids has")
    for split in SPLITS:
        seen = set()
        for index, shard in enumerate(content["splits"][split]["shards"]):
            file, records = shard["file"], shard["records"]
            where = f"splits.{split}.shards[{index}].file is {_shown(file)}"
            match = re.fullmatch(f"{split}/{SHARD_NAME.pattern}", file)
            if match is None or int(match[2]) != records:
                expected = f"{split}/dataset-NUMBER-{records}.tfrecord"
                raise ValueError(f"{where}, but must be {expected}, after its records")
            if file in seen:
                raise ValueError(f"{where}, which is in the list already")
            seen.add(file)


def _check(name: str, value: Any, schema: Schema) -> None:
    kind = {dict: "an object", list: "a list"}.get(type(schema))
    allowed, words = (lambda value: isinstance(value, type(schema)), kind) if kind else schema
    if not allowed(value):
        raise ValueError(f"{name} is {_shown(value)}, but must be {words}")
    if isinstance(schema, list):
        for index, each in enumerate(value):
            _check(f"{name}[{index}]", each, schema[0])
    elif isinstance(schema, dict):
        prefix = f"{name}." if name else ""
        for key in value:
            if key not in schema:
                raise ValueError(f"{prefix}{_shown(key)} is not a field of a manifest")
        for key, inner in schema.items():
            if key not in value:
                raise ValueError(f"{prefix}{key} is missing")
            _check(prefix + key, value[key], inner)


def _shown(value: Any) -> str:
    """Returns a value as JSON, cut; no control character of it reaches a terminal."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
