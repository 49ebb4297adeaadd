"""The group `mine` of a config: a researcher's own keys, of any plain type, with the rules of their config file."""

import difflib
import math
import traceback
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from mlm.config_rules import RULES, Rule
from mlm.errors import InputError
from mlm.text import printable

MINE = "mine"  # configs/base.py leaves it empty
PLAIN = "true or false, a finite number, a text, or a tuple of these"  # what its keys may be
DEFINE = f"the config file has to define it, as in config.{MINE}"


def is_mine(key: str) -> bool:
    """Returns whether a key is of the group, or is the group itself."""
    return key.partition(".")[0] == MINE


def hint(key: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" with the nearest key, "" if none is near."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def rules_of(names: Mapping[str, Any], keys: Collection[str], flag: str) -> dict[str, Rule]:
    """Returns the RULES among the names of a config file with some keys, {"mine.KEY": (check, what is allowed)}."""
    rules, known = names.get("RULES", {}), list(filter(is_mine, keys))
    for key, rule in rules.items() if isinstance(rules, dict) else [("", None)]:
        if not (isinstance(rule, tuple) and len(rule) == 2 and callable(rule[0]) and isinstance(rule[1], str)):
            form = '{"mine.KEY": (function of the value, "what is allowed")}'
            raise InputError(f"{flag}: RULES{f'[{key!r}]' if key else ''} must have the form {form}.")
        if key not in known:
            raise InputError(f"{flag}: RULES[{key!r}] is for no key of config.{MINE}{hint(str(key), known) or '.'}")
    return rules


def check(key: str, value: Any, rules: Mapping[str, Rule]) -> None:
    """Raises InputError for a key that is not plain, or that its file's rule does not allow."""
    if key == MINE:
        raise InputError(f"config.{key} = {value!r}: must be a group, as in config.{MINE} = ConfigDict().")
    if not key.removeprefix(f"{MINE}.").isidentifier():
        raise InputError(f"config.{key}: the name of a key must be one of letters, digits and _, as in config.mine.x.")
    if hasattr(ConfigDict, name := key.removeprefix(f"{MINE}.")):
        raise InputError(f"config.{key}: is a method of every ConfigDict, so the class would read that; rename {name}.")
    if not _is_plain(value):
        raise InputError(f"config.{key} = {printable(repr(value)):.80}: must be {PLAIN}.")
    is_allowed, allowed = rules.get(key, (_is_plain, PLAIN))
    try:
        good = bool(is_allowed(value))
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}")
        raise InputError(f"config.{key} = {value!r}: its rule in RULES can't check it ({reason}).") from error
    if not good:
        raise InputError(f"config.{key} = {value!r}: must be {allowed}.")


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def of_missing_key(error: BaseException) -> InputError | None:
    """Returns the sentence for code that reads a key which the group lacks, None for any other error."""
    group, name = getattr(error, "obj", None), getattr(error, "name", None)
    if isinstance(error, KeyError) and error.__traceback__ is not None:  # config.mine["x"]
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        group, name = frame.f_locals.get("self"), frame.f_locals.get("key")
    if not isinstance(error, AttributeError | KeyError) or not isinstance(group, ConfigDict):
        return None
    groups: dict[str, set[str]] = {}
    for key in RULES:
        groups.setdefault(key.partition(".")[0], set()).add(key.partition(".")[2])
    if MINE in group or any(keys <= set(group) for keys in groups.values()):
        return None  # the config as a whole, or another group
    return InputError(f"config.{MINE}.{name}: is read, but there is no such key; {DEFINE}.{name} = 0.5.")
