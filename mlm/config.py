"""Load a config file, apply overrides, refuse what can't be right, fingerprint and compare configs.

Nothing here imports jax, TensorFlow or transformers: a mistake is answered in a fraction of a second.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlm import logs
from mlm.config_rules import RULES, across
from mlm.errors import DamageError, InputError
from mlm.paths import UPath

BASE = Path(__file__).parents[1] / "configs" / "base.py"
# May differ between the config of a checkpoint and the one that resumes it: none of these changes a number that the run
# computes, or by rounding alone (mesh, remat). Tokenizer, shards and labelled rows are held to their fingerprints,
# skipped batches to a rule of their own (mlm/data/skip_batches.py).
MAY_CHANGE = re.compile(
    r"corpus\..*|tokenizer\..*|shards\..*|mesh\..*|evaluate\.(every|batch)|checkpoint\..*|log\..*|model\.remat\w*|"
    r"train\.guard_limit|pod\..*|data\.skip_batches|classify\.(train|validation|test)"
)
# Keys that were added later, and what runs without them did: they go on with that.
ADDED = {
    "masking.kind": "token",
    "masking.end_rate": 0.0,
    "masking.longest": 10,
    "masking.span_p": 0.2,
    "masking.static": False,
    "data.isolate_documents": False,
    "data.short_length": 0,
    "data.short_share": 0.9,
    "data.skip_batches": [],
    "train.init_from": "",
    "classify.train": "",
    "classify.validation": "",
    "classify.test": "",
    "classify.text": ["text"],
    "classify.label": "label",
    "classify.kind": "classes",
    "classify.length": 128,
    "classify.multiple": 32,
    "pod.port": 8474,
    "pod.jax_port": 8476,
}


def load(path: str, overrides: list[str]) -> ConfigDict:
    """Reads `get_config()` from a Python file, applies `group.key=value` overrides, validates and locks it.

    Raises:
      InputError: no such file, no `get_config` in it, an unknown key, a value of the wrong type or out of range.
    """
    if not Path(path).is_file():
        raise InputError(f"--config={path}: there is no such file.")
    try:
        config = runpy.run_path(path).get("get_config", lambda: None)()
    except Exception as error:
        words = " ".join(str(error).split())  # some of them have several lines
        raise InputError(f"--config={path}: {type(error).__name__} while reading it: {words}") from error
    if not isinstance(config, ConfigDict):
        raise InputError(f"--config={path}: the file defines no get_config() that returns a ConfigDict.")
    return _finish(config, overrides)


def load_saved(path: UPath, overrides: list[str]) -> ConfigDict:
    """Reads the config.json of a workdir, applies overrides, validates and locks it.

    Raises:
      InputError: nothing was trained there, or a value is wrong.
      DamageError: the file is not JSON.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; give --config, or train there first.")
    content = logs.read_object(path)
    try:
        return _finish(unflatten(flatten(content)), overrides)
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        raise DamageError(f"{path}: is not a config in JSON ({error}); give --config.") from None


def changed(config: ConfigDict, overrides: list[str]) -> ConfigDict:
    """Returns a copy of a config with overrides applied, validated and locked.

    Raises:
      InputError: as `load`.
    """
    return _finish(unflatten(flatten(config)), overrides)


def _finish(config: ConfigDict, overrides: list[str]) -> ConfigDict:
    for override in overrides:
        _override(config, override)
    validate(config)
    config.lock()
    return config


def _override(config: ConfigDict, text: str) -> None:
    """Sets one `group.key=value`, the value read as the type of the default."""
    key, equals, value = text.partition("=")
    flat = flatten(config)
    if key not in flat:
        near = difflib.get_close_matches(key, flat, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; configs/base.py lists every key."
        raise InputError(f"--config.{key}: there is no such key{hint}")
    if not equals:
        raise InputError(f"--config.{key}: give the value as --config.{key}=VALUE.")
    group, _, name = key.rpartition(".")
    config[group][name] = _parse(key, value, flat[key])


def _parse(key: str, text: str, default: Any) -> Any:
    """Reads `text` as a value of the type of `default`; raises InputError if it is not one."""
    kind = type(default)
    if kind is str:
        return text
    if kind is bool and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    try:
        if kind is int:
            return int(text.replace("_", ""))
        if kind is float:
            return float(text)
        if kind is tuple:
            value = ast.literal_eval(text)
            return tuple(value) if isinstance(value, tuple | list) else (value,)
    except (ValueError, SyntaxError):
        if kind is tuple and (not default or isinstance(default[0], str)):
            return (text,)  # one source or range, unquoted
    words = {int: "a whole number", float: "a number", bool: "true or false", tuple: "a tuple like (a, b)"}
    raise InputError(f"--config.{key}={text}: must be {words[kind]}.")


def flatten(config: ConfigDict | dict) -> dict[str, Any]:
    """Returns {"group.key": value}, sorted by key."""
    flat = {}
    for group, keys in config.items():
        if isinstance(keys, ConfigDict | dict):
            flat.update({f"{group}.{key}": value for key, value in keys.items()})
        else:
            flat[group] = keys  # of no group: validate refuses it
    return flat


def unflatten(flat: dict[str, Any]) -> ConfigDict:
    """Returns the config of a flattened one, keys `ADDED` later filled in.

    Lists, all that JSON knows of tuples, become tuples.
    """
    groups: dict[str, dict[str, Any]] = {}
    for key, value in {**ADDED, **flat}.items():
        group, _, name = key.rpartition(".")
        groups.setdefault(group, {})[name] = tuple(value) if isinstance(value, list) else value
    return ConfigDict(groups)


def validate(config: ConfigDict) -> None:
    """Raises InputError for the first value that can't be right, naming the key, the value and what is allowed."""
    flat = flatten(config)
    for key, value in flat.items():
        if key not in RULES:
            raise InputError(f"config.{key} is not a key of configs/base.py; mlm/config_rules.py has no rule for it.")
        check, words = RULES[key]
        if not check(value):
            raise InputError(f"config.{key} = {value!r}: must be {words}.")
    missing = RULES.keys() - flat.keys()
    if missing:
        raise InputError(f"config.{min(missing)} is missing; start a config from configs/base.py.")
    for key, bad, words in across(flat):
        if bad:
            raise InputError(f"config.{key} = {flat[key]!r}: {words}.")


def fingerprint(config: ConfigDict) -> str:
    """Returns the SHA-256 of the config as canonical JSON."""
    return hashlib.sha256(json.dumps(flatten(config), sort_keys=True).encode()).hexdigest()


def to_json(config: ConfigDict) -> str:
    """Returns the config as JSON: groups of keys, sorted."""
    return json.dumps(config.to_dict(), indent=1)


def diff(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns one line "key: old -> new" for each key that differs and must not, between two flattened configs."""
    old, new = ({k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()} for flat in (old, new))
    old = {**{key: value for key, value in ADDED.items() if key in new}, **old}
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if not MAY_CHANGE.fullmatch(key) and old.get(key) != new.get(key)
    ]
