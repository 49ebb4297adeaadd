"""Load a config file, apply overrides, validate, fingerprint and compare configs; at once, so without jax or numpy."""

import ast
import contextlib
import hashlib
import json
import re
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlm import config_mine, logs
from mlm.config_across import across
from mlm.config_mine import MINE, hint, is_mine
from mlm.config_rules import RULES, Rule
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, expand, expand_source

BASE = Path(__file__).parents[1] / "configs" / "base.py"
OR_CONFIG = "or give --config if the command takes one"  # `report` reads the saved one alone
# Keys that may change on resume: they change no number, or by rounding alone (mesh, remat, train.accumulate).
# Tokenizer, shards and labelled rows are compared by fingerprint, skipped batches by `stages.check_skipped`.
MAY_CHANGE = re.compile(
    r"corpus\..*|tokenizer\..*|shards\..*|mesh\..*|evaluate\.(every|batch|sets)|checkpoint\..*|log\..*|"
    r"model\.remat\w*|hub\..*|train\.(guard_limit|accumulate)|pod\..*|data\.(mixture|skip_batches)|classify\.(train|validation|test|predict)"
)
# Keys that a branch (train.branch_from) may change: all but those that decide what the parts of its state mean.
BRANCH_MAY_CHANGE = re.compile(
    rf"{MAY_CHANGE.pattern}|mine\..*|data\..*|masking\..*|schedule\..*|evaluate\..*|classify\..*|train\..*|"
    r"optimizer\.(?!name).*|model\.(positions|\w+_rope_theta|\w+_dropout|dtype|attention|init|init_stddev)"
)
PRETRAINING, CLASSIFICATION = "pretraining", "classification"
Derive = Callable[[dict[str, Any], Collection[str]], dict[str, Any]]
NOT_READ = {  # keys that a task doesn't read, so rules that tie them to others don't apply
    PRETRAINING: re.compile(r"classify\..*"),
    CLASSIFICATION: re.compile(
        r"(corpus|shards|masking)\..*|data\.(mixture|short_length|skip_batches|batch_stages)|evaluate\.(sets|count)"
    ),
}
ONLY_PRETRAINING = {  # keys that classify needs to have these values
    "train.branch_from": "",
    "train.hours": 0.0,
    "train.init_tiled": False,
    "model.implementation": "mlm",
    "model.init": "stock",
}
# Keys that hold paths, then those that hold sources, alone or in tuples: ~ is the home folder.
PATHS = "tokenizer.path shards.dir data.mixture evaluate.sets train.init_from train.branch_from train.replay"
SOURCES = "corpus.sources corpus.keep_out classify.train classify.validation classify.test classify.predict"
EXPANSIONS = dict.fromkeys(PATHS.split(), expand) | dict.fromkeys(SOURCES.split(), expand_source)
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


def load(
    path: str, overrides: list[str], *, task: str = PRETRAINING, flag: str = "--config", derive: Derive | None = None
) -> ConfigDict:
    """Runs `get_config()` of a Python file, applies overrides, validates by the task's rules and locks the config.

    `derive` returns values for keys, given all values and the keys that the overrides set.
    """
    if not Path(path).is_file():
        raise InputError(f"{flag}={path}: there is no such file.")
    if path.endswith(".json"):  # a workdir's config.json
        raise InputError(f"{flag}={path}: is not Python; name a file with get_config(), such as configs/quickstart.py.")
    config, rules = _run_config(path, flag)
    return _finish(config, parse(config, overrides), task, rules, derive)


def load_rules(path: str) -> dict[str, Rule]:
    """Returns the rules that the file of --config has for its keys of the group `mine`."""
    return _run_config(path, "--config")[1]


def _run_config(path: str, flag: str) -> tuple[ConfigDict, dict[str, Rule]]:
    config, names = run_file(path, "get_config", f"{flag}={path}")
    if not isinstance(config, ConfigDict):
        raise InputError(f"{flag}={path}: the file defines no get_config() that returns a ConfigDict.")
    return config, config_mine.rules_of(names, flatten(config).keys(), f"{flag}={path}")


def run_file(path: str, function: str, flag: str) -> tuple[Any, dict[str, Any]]:
    """Returns (what a function of a Python file returns, None without it; all names of the file); raises InputError."""
    try:
        with _imports_beside(path):
            names = runpy.run_path(path)
            return names.get(function, lambda: None)(), names
    except (Exception, SystemExit) as error:  # its exit code would be taken for ours
        message = " ".join(str(error).split())  # on one line
        raise InputError(f"{flag}: {type(error).__name__} while reading it: {message}") from error


@contextlib.contextmanager
def _imports_beside(path: str) -> Iterator[None]:
    """Lets a file import the files beside it, which another folder's file may have under the same names."""
    folder, before = Path(path).absolute().parent, set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
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
        if missing := RULES.keys() - flatten(config).keys():
            what = f"has no {min(missing)}, as if another version of this code had written it"
            raise InputError(f"{path}: {what}; use that code, another --workdir, {OR_CONFIG}.")
        return config
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        raise DamageError(f"{path}: is not a config in JSON ({error}); restore it from a copy, {OR_CONFIG}.") from None


def load_saved(path: UPath, overrides: list[str], *, task: str = PRETRAINING) -> ConfigDict:
    """Reads the config.json of a workdir, then does as `load`; raises DamageError if it is not a config."""
    if (config := read(path)) is None:
        raise InputError(f"{path}: there is no such file; give --config, or train there first.")
    if unknown := [key for key in flatten(config) if key not in RULES and not is_mine(key)]:
        what = f"has {unknown[0]}, as if another version of this code had written it"
        raise InputError(f"{path}: {what}; use that code, another --workdir, {OR_CONFIG}.")
    return replace(config, parse(config, overrides), task=task)


def replace(
    config: ConfigDict, values: dict[str, Any], *, task: str = PRETRAINING, rules: Mapping[str, Rule] | None = None
) -> ConfigDict:
    """Returns a copy with the values of some "group.key" replaced, validated (`rules`: of the file) and locked."""
    return _finish(config, values, task, rules or {})


def _finish(
    config: ConfigDict, values: dict[str, Any], task: str, rules: Mapping[str, Rule], derive: Derive | None = None
) -> ConfigDict:
    flat = flatten(config) | values
    _check_keys(flat, rules)
    flat |= _expanded(flat)
    if derive:
        flat |= derive(flat, values.keys())
        _check_keys(flat, rules)
    for key, value in ONLY_PRETRAINING.items():
        if task == CLASSIFICATION and flat[key] != value:
            raise InputError(f"config.{key} = {flat[key]!r}: is for pretraining alone; set it to {value!r}.")
    finished = unflatten(flat).lock()
    for key, allowed in across(finished):
        if not NOT_READ[task].fullmatch(key):
            raise InputError(f"config.{key} = {flat[key]!r}: {allowed}.")
    return finished


def _expanded(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of the EXPANSIONS with ~ as the home folder."""
    values = {}
    for key in flat.keys() & EXPANSIONS.keys():
        try:
            values[key] = _as_tuples(flat[key], EXPANSIONS[key])
        except ValueError as error:
            raise InputError(f"config.{key} = {flat[key]!r}: {error}.") from None
    return values


def parse(config: ConfigDict, overrides: list[str]) -> dict[str, Any]:
    """Returns {"group.key": value} of "group.key=value" texts, each value read as the type of the config's."""
    flat, values = flatten(config), {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if key not in flat:
            raise InputError(f"--config.{key}: there is no such key{_advice(key, flat)}")
        if not equals:
            raise InputError(f"--config.{key}: give the value as --config.{key}=VALUE.")
        if is_mine(key):
            config_mine.check(key, flat[key], {})
        values[key] = _parse(key, text, flat[key])
    return values


def _advice(key: str, flat: Mapping[str, Any]) -> str:
    """Returns the end of a sentence about a key that is not among those of a config."""
    if is_mine(key):
        return hint(key, filter(is_mine, flat)) or f"; {config_mine.DEFINE}{key.removeprefix(MINE)} = 0.5."
    others = f"configs/base.py lists every key, and keys of your own stand in config.{MINE} of your config file"
    return hint(key, flat) or f"; {others}."


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
    why = f", as {default!r} in the config file is" if is_mine(key) else ""
    raise InputError(f"--config.{key}={text}: must be {TYPE_NAMES[kind]}{why}.")


def from_dict(groups: dict[str, dict[str, Any]]) -> ConfigDict:
    """Returns the config of `ConfigDict.to_dict()`, read from JSON, whose lists become tuples again."""
    return unflatten(flatten(groups)).lock()


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


def _check_keys(flat: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    for key, value in flat.items():
        if is_mine(key):
            config_mine.check(key, value, rules)
            continue
        if key not in RULES:
            raise InputError(f"config.{key} is not a key of configs/base.py{_advice(key, RULES)}")
        check, allowed = RULES[key]
        if not check(value):
            raise InputError(f"config.{key} = {value!r}: must be {allowed}.")
    missing = RULES.keys() - flat.keys()
    if missing:
        raise InputError(f"config.{min(missing)} is missing; start a config from configs/base.py.")


def fingerprint(config: ConfigDict) -> str:
    """Returns the SHA-256 of the config as canonical JSON."""
    return hashlib.sha256(json.dumps(flatten(config), sort_keys=True).encode()).hexdigest()


def diff(old: ConfigDict, new: ConfigDict, allowed: re.Pattern[str] = MAY_CHANGE) -> list[str]:
    """Returns a line "key: old -> new" for each change of two configs that is not allowed, as on resume."""
    before, after = ({**flat, **_expanded(flat)} for flat in map(flatten, (old, new)))
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"  # a key of one's own may be in one of them alone
        for key in sorted(before.keys() | after.keys())
        if not allowed.fullmatch(key) and before.get(key) != after.get(key)
    ]
