"""Load a config file, apply overrides, validate, fingerprint and compare configs; at once, so without jax or numpy."""

import ast
import difflib
import hashlib
import json
import math
import runpy
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlm import logs
from mlm.config_across import across
from mlm.config_rules import BRANCH, GONE, KEYS, NAMES_ELSEWHERE, PRETRAINING, RESUME, Rule
from mlm.config_rules import CLASSIFICATION as CLASSIFICATION
from mlm.errors import DamageError, InputError
from mlm.paths import UPath
from mlm.text import printable

BASE = Path(__file__).parents[1] / "configs" / "base.py"
MINE = "mine"  # the group of a researcher's own keys, which configs/base.py leaves empty
PLAIN: Rule = (
    (lambda v: _is_plain(v)),
    "true or false, a finite number, a text, or a tuple of these",
)
OR_CONFIG = "or give --config if the command takes one"  # `report` reads the saved one alone
Derive = Callable[[dict[str, Any], Collection[str], dict[str, Any]], dict[str, Any]]
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a tuple like (a, b)",
}


def split_overrides(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns (the other arguments, ["group.key=value", ...]); --config.group.key value is accepted too."""
    others = []
    overrides = []
    rest = iter(argv)
    for argument in rest:
        if argument.startswith("--config."):
            key = argument.removeprefix("--config.")
            overrides.append(key if "=" in key else f"{key}={next(rest, '')}")
        else:
            others.append(argument)
    return others, overrides


def load(
    path: str,
    overrides: list[str],
    *,
    task: str = PRETRAINING,
    derive: Derive | None = None,
) -> ConfigDict:
    """Runs `get_config()` of a Python file, applies overrides, validates by the task's rules and locks the config.

    `derive` returns values for keys, given all values, the keys that the overrides set, and the values of the file.
    """
    if not Path(path).is_file():
        raise InputError(f"--config={path}: there is no such file.")
    if path.endswith(".json"):  # a workdir's config.json
        raise InputError(
            f"--config={path}: is not Python; name a file with get_config(), such as configs/quickstart.py."
        )
    config, names = run_file(path, "get_config")
    if not isinstance(config, ConfigDict):
        raise InputError(
            f"--config={path}: the file defines no get_config() that returns a ConfigDict."
        )
    finished = _finish(config, parse(config, overrides), task, names.get("RULES", {}), derive)
    steps = finished.train.steps
    if finished.train.hours > 0 and steps > 0:  # only the config.json of a run has both
        raise InputError(
            f"config.train.steps = {steps}: must be 0 with train.hours, whose steps a run counts itself."
        )
    return finished


def load_rules(path: str) -> dict[str, Rule]:
    """Returns the rules that the file of --config has for its keys of the group `mine`."""
    return run_file(path, "get_config")[1].get("RULES", {})


def run_file(path: str, function: str) -> tuple[Any, dict[str, Any]]:
    """Returns (what a function of a Python file returns, None without it; all names of the file).

    It may import the files beside it. What it raises is its author's to read: a traceback that ends there.
    """
    folder = Path(path).absolute().parent
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        names = runpy.run_path(path)
        return names.get(function, lambda: None)(), names
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:  # another folder's file may have them, too
            top = name.partition(".")[0]
            file = getattr(sys.modules.get(top), "__file__", None)
            if top not in before and file and folder in Path(file).parents[:2]:
                del sys.modules[name]


def read(path: UPath) -> ConfigDict | None:
    """Returns the config.json of a workdir as it is, None if there is none; raises InputError and DamageError."""
    if not path.is_file():
        return None
    try:
        config = from_dict(logs.read_object(path))
        check_version(config, str(path), f"another --workdir, {OR_CONFIG}")
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        raise DamageError(
            f"{path}: is not a config in JSON ({error}); restore it from a copy, {OR_CONFIG}."
        ) from None
    return config


def check_version(config: ConfigDict, where: str, fix: str = "or another --workdir") -> None:
    """Raises InputError for a saved config that has other keys than today's."""
    flat = flatten(config)
    gone = sorted(flat.keys() & GONE.keys())
    unknown = [key for key in flat if key not in KEYS and not is_mine(key)]
    missing = sorted(KEYS.keys() - flat.keys())
    if gone or unknown or missing:
        if gone:
            key = gone[0]
            problem = f"has {key} = {flat[key]!r} (now {GONE[key].instead})"
        else:
            problem = f"has {unknown[0]}" if unknown else f"has no {missing[0]}"
        raise InputError(
            f"{where}: {problem}, as if another version of this code had written it; use that code, {fix}."
        )


def load_saved(path: UPath, overrides: list[str], *, task: str = PRETRAINING) -> ConfigDict:
    """Reads the config.json of a workdir, then does as `load`; raises DamageError if it is not a config."""
    config = read(path)
    if config is None:
        raise InputError(f"{path}: there is no such file; give --config, or train there first.")
    return replace(config, parse(config, overrides), task=task)


def replace(
    config: ConfigDict,
    values: dict[str, Any],
    *,
    task: str = PRETRAINING,
    rules: Mapping[str, Rule] | None = None,
) -> ConfigDict:
    """Returns a copy with the values of some "group.key" replaced, validated (`rules`: of the file) and locked."""
    return _finish(config, values, task, rules or {})


def _finish(
    config: ConfigDict,
    values: dict[str, Any],
    task: str,
    rules: Mapping[str, Rule],
    derive: Derive | None = None,
) -> ConfigDict:
    flat = flatten(config) | values
    _check_keys(flat, rules)
    flat = _expanded(flat)
    if derive:
        flat |= derive(flat, values.keys(), flatten(config))
        _check_keys(flat, rules)
    finished = unflatten(flat).lock()
    for key, allowed in across(finished, task):
        raise InputError(f"config.{key} = {flat[key]!r}: {allowed}.")
    return finished


def _expanded(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with ~ as the home folder in paths and sources."""
    values = dict(flat)
    for key, rule in KEYS.items():
        if rule.expand and key in flat:
            try:
                values[key] = _as_tuples(flat[key], rule.expand)
            except ValueError as error:
                raise InputError(f"config.{key} = {flat[key]!r}: {error}.") from None
    return values


def parse(config: ConfigDict, overrides: list[str]) -> dict[str, Any]:
    """Returns {"group.key": value} of "group.key=value" texts, each value read as the type of the config's."""
    flat = flatten(config)
    values = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if key not in flat:
            raise InputError(f"--config.{key}: {no_such_key(key, flat)}")
        if not equals:
            raise InputError(f"--config.{key}: give the value as --config.{key}=VALUE.")
        values[key] = _parse(key, text, flat[key])
    return values


def no_such_key(key: str, known: Iterable[str]) -> str:
    """Returns the sentence about a key that is not among the known ones."""
    if key in GONE:
        return f"there is no such key any more: {GONE[key].instead}."
    if is_mine(key):
        return "there is no such key" + (
            suggestion(key, known) or f"; the config file has to set config.{key} = 0.5."
        )
    advice = f"; configs/base.py lists every key, and keys of your own stand in config.{MINE} of your config file."
    return "there is no such key" + (suggestion(key, KEYS) or advice)


def suggestion(key: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" with the key that another library's name stands for, or the nearest one, or ""."""
    name = key.rpartition(".")[2].replace("-", "_")
    keys = list(known)
    matches = [NAMES_ELSEWHERE[name]] if NAMES_ELSEWHERE.get(name) in keys else []
    matches = matches or difflib.get_close_matches(key, keys, 1, cutoff=0.8)
    same_name = [other for other in keys if other.rpartition(".")[2] == name]
    matches = matches or difflib.get_close_matches(key, same_name, 1, cutoff=0)
    matches = matches or difflib.get_close_matches(key, keys, 1)
    return f"; did you mean {matches[0]}?" if matches else ""


def is_mine(key: str) -> bool:
    """Returns whether a key is of the group `mine`."""
    return key.startswith(f"{MINE}.")


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _parse(key: str, text: str, default: Any) -> Any:
    kind = type(default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is int:
            return int(text.replace("_", ""))
        if kind is tuple:
            value = ast.literal_eval(text)
            return _as_tuples(value) if isinstance(value, tuple | list) else (value,)
        if kind is float:
            return float(text)
        return text if kind is str else default  # no plain value, which is refused later
    except (ValueError, SyntaxError, KeyError):
        if kind is tuple and (not default or isinstance(default[0], str)):
            return (text,)  # one source or range, unquoted
    why = f", as {default!r} in the config file is" if is_mine(key) else ""
    raise InputError(f"--config.{key}={text}: must be {TYPE_NAMES[kind]}{why}.")


def from_dict(groups: dict[str, dict[str, Any]]) -> ConfigDict:
    """Returns the config of `ConfigDict.to_dict()`, read from JSON, whose lists become tuples again.

    A key of an older version is left out where its value is what the code does today.
    """
    flat = flatten(groups)
    kept = {k: v for k, v in flat.items() if k not in GONE or v != GONE[k].value}
    random_share = kept.get("masking.random_share", math.nan)
    if math.isclose(random_share, (1 - flat.get("masking.mask_share", math.nan)) / 2):
        del kept["masking.random_share"]
    return unflatten(kept).lock()


def flatten(config: ConfigDict | dict) -> dict[str, Any]:
    """Returns {"group.key": value}."""
    flat = {}
    for group, keys in config.items():
        if isinstance(keys, ConfigDict | dict):
            flat.update({f"{group}.{key}": value for key, value in keys.items()})
        else:
            flat[group] = keys  # without a group: refused by `_check_keys`
    return flat


def unflatten(flat: dict[str, Any]) -> ConfigDict:
    """Returns the config of a flattened one; lists become tuples, which JSON does not have."""
    groups: dict[str, dict[str, Any]] = {MINE: {}}
    for key, value in flat.items():
        group, _, name = key.rpartition(".")
        groups.setdefault(group, {})[name] = _as_tuples(value)
    return ConfigDict(groups)


def _as_tuples(value: Any, expansion: Callable[[str], str] = str) -> Any:
    """Returns a value with lists as tuples, and each text in it expanded."""
    if isinstance(value, list | tuple):
        return tuple(_as_tuples(part, expansion) for part in value)
    return expansion(value) if isinstance(value, str) else value


def _check_keys(flat: Mapping[str, Any], own_rules: Mapping[str, Rule]) -> None:
    """Raises InputError for a key that is none, or whose value its rule does not allow."""
    if unruled := sorted(own_rules.keys() - flat.keys()):
        raise InputError(
            f"RULES[{unruled[0]!r}] of the config file: {no_such_key(unruled[0], flat)}"
        )
    for key, value in flat.items():
        if key in KEYS:
            rules = [KEYS[key].rule]
        elif is_mine(key):
            rules = [PLAIN, own_rules.get(key, PLAIN)]
        else:
            raise InputError(f"config.{key}: {no_such_key(key, flat)}")
        for check, allowed in rules:
            if not check(value):
                raise InputError(
                    f"config.{key} = {printable(repr(value)):.200}: must be {allowed}."
                )
    missing = KEYS.keys() - flat.keys()
    if missing:
        raise InputError(f"config.{min(missing)} is missing; start a config from configs/base.py.")


def fingerprint(config: ConfigDict) -> str:
    """Returns the SHA-256 of the config as canonical JSON."""
    return hashlib.sha256(json.dumps(flatten(config), sort_keys=True).encode()).hexdigest()


def resume_may_change(key: str) -> bool:
    """Returns whether a run may be resumed with another value of a key."""
    return key in KEYS and KEYS[key].may_change == RESUME


def branch_may_change(key: str) -> bool:
    """Returns whether a branch (train.branch_from) may have another value of a key."""
    return is_mine(key) or (key in KEYS and KEYS[key].may_change in (RESUME, BRANCH))


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Returns the names of the keys in which two {group: {key: value}} differ, for a sentence."""
    before = flatten(json.loads(json.dumps(old)))
    after = flatten(json.loads(json.dumps(new)))
    changed = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    return ", ".join(f"config.{key}" for key in changed)


def diff(
    old: ConfigDict,
    new: ConfigDict,
    may_change: Callable[[str], bool] = resume_may_change,
) -> list[str]:
    """Returns a line "key: old -> new" for each change of two configs that is not allowed, as on resume."""
    before = flatten(old)
    after = flatten(new)
    return [
        # a key of one's own may be in one of them alone
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if not may_change(key) and before.get(key) != after.get(key)
    ]
