"""The type and range of every field of manifest.json."""

import json
import re
from collections.abc import Callable
from typing import Any

from mlm.config_rules import FLAG, FROM_ZERO, SHARD_ROWS, Rule, matching, whole
from mlm.data.tokenizer_checks import ROLES
from mlm.text import is_text

FORMAT = 2
SHARD_NAME = re.compile(r"dataset-([0-9]{1,18})-([0-9]{1,18})\.tfrecord")
SPLITS = ("train", "validation", "test")  # every folder of shards has the first two
Schema = Rule | dict[str, "Schema"] | list["Schema"]  # a value; an object with exactly these fields; a list of these


def _or_null(rule: Rule) -> Rule:
    return lambda value: value is None or rule[0](value), f"{rule[1]}, or null"


def _object(check: Callable[[Any], bool], words: str) -> Rule:
    return lambda value: isinstance(value, dict) and all(map(is_text, value)) and all(map(check, value.values())), words


COUNT, SIZE = whole(0, 2**63, "to 2^63 - 1"), whole(1, 2**31, "to 2^31 - 1")  # ids are int32
HASH: Rule = matching("[0-9a-f]{64}"), "a SHA-256 of 64 lower-case hexadecimal digits"
COUNTS = ("documents", "duplicates", "kept_out", "tokens", "dropped_tokens", "text_bytes")
ROW_COUNTS = ("cut_tokens", "padding_tokens", "joined_tokens")
OPTIONAL = ("unknown_tokens", "rows", *ROW_COUNTS, "unk")  # all but the last are new, that is not of every tokenizer
SPLIT: Schema = {
    "shards": [{"file": (is_text, "the name of a file"), "records": COUNT, "bytes": COUNT, "sha256": _or_null(HASH)}],
    **dict.fromkeys((*COUNTS, "unknown_tokens", *ROW_COUNTS), _or_null(COUNT)),
    "unigram_entropy": _or_null(FROM_ZERO),
    "sources": _or_null(_object(COUNT[0], "the tokens of each source")),
}


def check_content(content: dict[str, Any]) -> None:
    """Raises ValueError with what is wrong in the content of a manifest.json."""
    size, splits = content.get("vocab_size"), content.get("splits")
    names = SPLITS if isinstance(splits, dict) and "test" in splits else SPLITS[:2]
    token_id = whole(0, size, f"to {size - 1}") if type(size) is int else COUNT
    schema = {
        "format": (lambda value: type(value) is int, f"the number {FORMAT}"),
        "length": SIZE,
        "vocab_size": SIZE,
        "special_ids": dict.fromkeys(ROLES, token_id),
        "all_special_ids": [token_id],
        "tokenizer_fingerprint": HASH,
        "full_rows": FLAG,
        "rows": (lambda value: value in ("", *SHARD_ROWS), f"one of {', '.join(SHARD_ROWS)}, or empty"),
        "inputs": (matching("([0-9a-f]{64})?"), f"{HASH[1]}, or empty"),
        "source": (is_text, "a text"),
        "splits": dict.fromkeys(names, SPLIT),
        "left_out": _object(is_text, "why some documents are left out"),
    }
    _check("", content, schema)
    if missing := set(content["special_ids"].values()) - set(content["all_special_ids"]):
        raise ValueError(f"all_special_ids lacks {min(missing)}, which special_ids has")
    for split in names:
        files = [shard["file"] for shard in content["splits"][split]["shards"]]
        for index, shard in enumerate(content["splits"][split]["shards"]):
            file, records = shard["file"], shard["records"]
            where = f"splits.{split}.shards[{index}].file is {_shown(file)}"
            match = re.fullmatch(f"{split}/{SHARD_NAME.pattern}", file)
            if match is None or int(match[2]) != records:
                raise ValueError(f"{where}, but must be {split}/dataset-NUMBER-{records}.tfrecord, after its records")
            if file in files[:index]:
                raise ValueError(f"{where}, which is in the list already")


def _check(name: str, value: Any, schema: Schema) -> None:
    kind = {dict: "an object", list: "a list"}.get(type(schema))
    allowed, words = (lambda value: isinstance(value, type(schema)), kind) if kind else schema
    if not allowed(value):
        raise ValueError(f"{name} is {_shown(value)}, but must be {words}")
    if isinstance(schema, list):
        for index, item in enumerate(value):
            _check(f"{name}[{index}]", item, schema[0])
    elif isinstance(schema, dict):
        prefix = f"{name}." if name else ""
        for key in value:
            if key not in schema:
                raise ValueError(f"{prefix}{_shown(key)} is not a field of a manifest")
        for key, inner in schema.items():
            if key in value:
                _check(prefix + key, value[key], inner)
            elif key not in OPTIONAL:
                raise ValueError(f"{prefix}{key} is missing")


def _shown(value: Any) -> str:
    """Returns a value as JSON, cut; no control character of it reaches a terminal."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"{json.dumps(value):.80}"
