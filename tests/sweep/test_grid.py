"""The grid of --vary: how its values are split, what is refused, and the names of its runs."""

import re

import pytest

from mlm.errors import InputError
from mlm.sweep import grid


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (",runs/a", ["", "runs/a"]),
        ("('a',0.5),('b',0.5)", ["('a',0.5)", "('b',0.5)"]),
        ("(('a,b',1),),()", ["(('a,b',1),)", "()"]),
        ("'a,b',c", ["a,b", "c"]),
        ('"a,b","c"', ["a,b", "c"]),
    ],
)
def test_commas_outside_brackets_and_quotes_split(text, values):
    assert grid.split(text) == values


@pytest.mark.parametrize("entry", ["train.seed", "=1", "a=(1,2", "a='1"])
def test_what_is_no_grid_is_refused(entry):
    with pytest.raises(InputError, match=re.escape(entry.removeprefix("a="))):
        grid.read([entry])


def test_names_are_short_safe_and_stable():
    assert grid.name({"model.layers": 4, "train.seed": 0}) == "layers=4,seed=0"
    assert grid.name({"train.seed": 0, "data.seed": 1}) == "train.seed=0,data.seed=1"
    values = ["runs/a", "runs-a", "", "-", "../x", "long" * 100, ("a", 1.0), "é", "$(rm x)"]
    names = [grid.name({"train.init_from": value}) for value in values]
    assert len(set(names)) == len(values)
    assert all(re.fullmatch(r"init_from=[A-Za-z0-9.@_,=-]{0,97}", name) for name in names), names
    assert names[1] == "init_from=runs-a" and names[0].startswith("init_from=runs-a-")
