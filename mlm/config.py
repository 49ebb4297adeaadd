"""Load a config file, apply overrides, validate, fingerprint and compare configs; at once, so without jax or numpy."""

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
# Keys that may change on resume: they change no number, or by rounding alone (mesh, remat, train.accumulate).
# Tokenizer, shards and labelled rows are compared by fingerprint, skipped batches by mlm/data/skip_batches.py.
MAY_CHANGE = re.compile(
    r"corpus\..*|tokenizer\..*|shards\..*|mesh\..*|evaluate\.(every|batch|sets)|checkpoint\..*|log\..*|model\.remat\w*|"
    r"train\.(guard_limit|accumulate)|pod\..*|data\.(mixture|skip_batches)|classify\.(train|validation|test|predict)"
)
# Keys that a branch (train.branch_from) may change: all but those that decide what the parts of its state mean.
BRANCH_MAY_CHANGE = re.compile(
    rf"{MAY_CHANGE.pattern}|data\..*|masking\..*|schedule\..*|evaluate\..*|classify\..*|train\..*|"
    r"optimizer\.(?!name).*|model\.(positions|\w+_rope_theta|\w+_dropout|dtype|attention|init|init_stddev)"
)
PRETRAINING, CLASSIFICATION = "pretraining", "classification"
NOT_READ = {  # keys that a task doesn't read, so rules that tie them to others don't apply
    PRETRAINING: re.compile(r"classify\..*"),
    CLASSIFICATION: re.compile(
        r"(corpus|shards|masking)\..*|data\.(mixture|short_length|skip_batches|batch_stages)|evaluate\.(sets|count)"
    ),
}
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", tuple: "a tuple like (a, b)"}


def split_overrides(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns (the other arguments, ["group.key=value", ...]); --config.group.key value is accepted too."""
    others, overrides = [], []
    rest = iter(argv)
    for argument in rest:
        if argument.startswith("--config."):
            key = argument.removeprefix("--config.")
            overrides.append(key if "=" in key else f"{key}={next(rest, '')}")
        else:
            others.append(argument)
    return others, overrides


def load(path: str, overrides: list[str], *, task: str = PRETRAINING, flag: str = "--config") -> ConfigDict:
    """Runs `get_config()` of a Python file, applies overrides, validates by the task's rules and locks the config."""
    if not Path(path).is_file():
        raise InputError(f"{flag}={path}: there is no such file.")
    config = run_file(path, "get_config", f"{flag}={path}")
    if not isinstance(config, ConfigDict):
        raise InputError(f"{flag}={path}: the file defines no get_config() that returns a ConfigDict.")
    return _finish(config, parse(config, overrides), task)


def run_file(path: str, function: str, flag: str) -> Any:
    """Returns what a function of a Python file returns, None if it has no such function; raises InputError."""
    try:
        return runpy.run_path(path).get(function, lambda: None)()
    except Exception as error:
        message = " ".join(str(error).split())  # on one line
        raise InputError(f"{flag}: {type(error).__name__} while reading it: {message}") from error


def load_saved(path: UPath, overrides: list[str], *, task: str = PRETRAINING) -> ConfigDict:
    """Reads the config.json of a workdir, then does as `load`; raises DamageError if it is not a config."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; give --config, or train there first.")
    try:
        flat = flatten(logs.read_object(path))
        missing = RULES.keys() - flat.keys()
        if missing:
            what = f"has no {min(missing)}, as if another version of this code had written it"
            raise InputError(f"{path}: {what}; give --config, or use another --workdir.")
        config = unflatten(flat)
        return _finish(config, parse(config, overrides), task)
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        raise DamageError(f"{path}: is not a config in JSON ({error}); give --config.") from None


def replace(config: ConfigDict, values: dict[str, Any], *, task: str = PRETRAINING) -> ConfigDict:
    """Returns a copy with the values of some "group.key" replaced, validated and locked."""
    return _finish(unflatten(flatten(config)), values, task)


def _finish(config: ConfigDict, values: dict[str, Any], task: str) -> ConfigDict:
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        config[group][name] = value
    _validate(config, task)
    return config.lock()


def parse(config: ConfigDict, overrides: list[str]) -> dict[str, Any]:
    """Returns {"group.key": value} of "group.key=value" texts, each value read as the type of the config's."""
    flat, values = flatten(config), {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if key not in flat:
            near = difflib.get_close_matches(key, flat, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; configs/base.py lists every key."
            raise InputError(f"--config.{key}: there is no such key{hint}")
        if not equals:
            raise InputError(f"--config.{key}: give the value as --config.{key}=VALUE.")
        values[key] = _parse(key, text, flat[key])
    return values


def _parse(key: str, text: str, default: Any) -> Any:
    kind = type(default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is tuple:
            value = ast.literal_eval(text)
            return _as_tuples(value) if isinstance(value, tuple | list) else (value,)
        return int(text.replace("_", "")) if kind is int else kind(text)
    except (ValueError, SyntaxError, KeyError):
        if kind is tuple and (not default or isinstance(default[0], str)):
            return (text,)  # one source or range, unquoted
    raise InputError(f"--config.{key}={text}: must be {TYPE_NAMES[kind]}.")


def flatten(config: ConfigDict | dict) -> dict[str, Any]:
    """Returns {"group.key": value}."""
    flat = {}
    for group, keys in config.items():
        if isinstance(keys, ConfigDict | dict):
            flat.update({f"{group}.{key}": value for key, value in keys.items()})
        else:
            flat[group] = keys  # without a group: refused by `_validate`
    return flat


def unflatten(flat: dict[str, Any]) -> ConfigDict:
    """Returns the config of a flattened one; lists become tuples, which JSON does not have."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        group, _, name = key.rpartition(".")
        groups.setdefault(group, {})[name] = _as_tuples(value)
    return ConfigDict(groups)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _validate(config: ConfigDict, task: str) -> None:
    flat = flatten(config)
    for key, value in flat.items():
        if key not in RULES:
            raise InputError(f"config.{key} is not a key of configs/base.py; mlm/config_rules.py has no rule for it.")
        check, allowed = RULES[key]
        if not check(value):
            raise InputError(f"config.{key} = {value!r}: must be {allowed}.")
    missing = RULES.keys() - flat.keys()
    if missing:
        raise InputError(f"config.{min(missing)} is missing; start a config from configs/base.py.")
    fixes = {"branch_from": "start with train.init_from", "hours": "set train.epochs or train.steps"}
    for key, fix in (fixes | {"init_tiled": "set it to false"}).items():
        if task == CLASSIFICATION and flat[f"train.{key}"]:
            raise InputError(f"config.train.{key}: is for pretraining alone; {fix}.")
    for key, broken, allowed in across(config):
        if broken and not NOT_READ[task].fullmatch(key):
            raise InputError(f"config.{key} = {flat[key]!r}: {allowed}.")


def fingerprint(config: ConfigDict) -> str:
    """Returns the SHA-256 of the config as canonical JSON."""
    return hashlib.sha256(json.dumps(flatten(config), sort_keys=True).encode()).hexdigest()


def diff(old: dict[str, Any], new: dict[str, Any], allowed: re.Pattern[str] = MAY_CHANGE) -> list[str]:
    """Returns a line "key: old -> new" for each change of two flattened configs that is not allowed, as on resume."""
    old, new = (json.loads(json.dumps(flat)) for flat in (old, new))  # a checkpoint's tuples are lists
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if not allowed.fullmatch(key) and old.get(key) != new.get(key)
    ]
