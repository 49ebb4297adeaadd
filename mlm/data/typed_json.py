"""Checks that JSON holds what the fields of a dataclass are annotated with, before anything is made of it."""

import dataclasses
import json
import math
import types
import typing
from typing import Any

from mlm.text import is_text, printable

PLAIN = {
    int: (lambda value: type(value) is int and 0 <= value < 2**63, "a whole number from 0 to 2^63 - 1"),
    float: (lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a finite number from 0 up"),
    bool: (lambda value: type(value) is bool, "true or false"),
    str: (is_text, "a text"),
    tuple: (lambda value: isinstance(value, list), "a list"),
    dict: (lambda value: isinstance(value, dict) and all(map(is_text, value)), "an object"),
}


def check_typed(name: str, value: Any, kind: Any) -> None:
    """Raises ValueError, which names the field, unless a value of JSON is of a kind.

    Args:
        name: of the field; "" for the outermost value.
        kind: int, float, bool, str, X | None, tuple[X, ...], dict[str, X] or a dataclass; fields of it with a default
            may be missing, and those whose metadata has "saved": False must be.
    """
    if isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]
        if value is None:
            return
    is_object = dataclasses.is_dataclass(kind)
    base = dict if is_object else typing.get_origin(kind) or kind
    is_allowed, allowed = PLAIN[base]
    if not is_allowed(value):
        raise ValueError(f"{name or 'it'} is {show_json(value)}, but must be {allowed}")
    prefix = f"{name}." if name else ""
    if is_object:
        fields = {field.name: field for field in dataclasses.fields(kind) if field.metadata.get("saved", True)}
        if other := next((key for key in value if key not in fields), None):
            raise ValueError(f"{prefix}{show_json(other)} is not a field of it")
        hints = typing.get_type_hints(kind)
        for key, field in fields.items():
            if key in value:
                check_typed(prefix + key, value[key], hints[key])
            elif field.default is field.default_factory:  # both are missing
                raise ValueError(f"{prefix}{key} is missing")
    elif base is tuple:
        for index, item in enumerate(value):
            check_typed(f"{name}[{index}]", item, typing.get_args(kind)[0])
    elif base is dict:
        for key, item in value.items():
            check_typed(f"{prefix}{printable(key):.40}", item, typing.get_args(kind)[1])


def show_json(value: Any) -> str:
    """Returns a value as JSON, cut; no control character of it reaches a terminal."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"{json.dumps(value):.80}"
