"""The grid of --vary: how its values are split, what is refused, and the names of its runs."""

import pytest

from mlm.errors import InputError
from mlm.sweep import grid


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0,1,2", ["0", "1", "2"]),
        ("1e-5", ["1e-5"]),
        ("", [""]),
        (",runs/a", ["", "runs/a"]),
        ("('a',0.5),('b',0.5)", ["('a',0.5)", "('b',0.5)"]),
        ("(('a,(',1),),()", ["(('a,(',1),)", "()"]),
        ("'a,b',c", ["a,b", "c"]),
        ('"it\'s,",x', ["it's,", "x"]),
        ("'a','b'", ["a", "b"]),
    ],
)
def test_commas_outside_brackets_and_quotes_split(text, values):
    assert grid.split(text) == values


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["train.seed"], r"--vary train\.seed: give a key and its values, as in train\.seed=0,1,2\."),
        (["=1"], r"--vary =1: give a key"),
        (["train.seed=0,1,0"], r"--vary train\.seed: the value '0' is given twice; name each value once\."),
        (["a=1", "a=2"], r"--vary a=2: a is varied twice"),
        (["a=(1,2"], r"\(1,2 has a quote or a bracket without its other half"),
        (["a='1"], "without its other half"),
    ],
)
def test_what_is_no_grid_is_refused(entries, words):
    with pytest.raises(InputError, match=words):
        grid.read(entries)


def test_names_are_short_safe_and_stable():
    cases = [{"optimizer.learning_rate": rate, "train.seed": 0} for rate in (1e-05, 3e-05)]
    assert grid.names(cases) == ["learning_rate=1e-05,seed=0", "learning_rate=3e-05,seed=0"]
    assert grid.names(cases[1:]) == grid.names(cases)[1:]
    assert grid.names([{"train.seed": 0, "data.seed": 1}]) == ["train.seed=0,data.seed=1"]
    paths = ["runs/a", "runs-a", "", "-", "../x", "long/" * 100, ("a", 1.0), "é", "$(rm x)", "A@1000"]
    (found,) = zip(*([name] for name in grid.names([{"train.init_from": path} for path in paths])), strict=True)
    assert len(set(found)) == len(paths) and found[-1] == "init_from=A@1000"
    for name in found:
        assert len(name) < 60 and set(name) <= set("abcdefghijklmnopqrstuvwxyzA0123456789=.@_-"), name
    assert found[0].startswith("init_from=runs-a-") and found[1] == "init_from=runs-a"
    long = [{f"key{n}": "a" * 40 for n in range(9)} | {"last": last} for last in (1, 2)]
    assert len(set(grid.names(long))) == 2 and max(map(len, grid.names(long))) == 200


def test_labels():
    assert grid.label({"optimizer.learning_rate": 1e-05, "train.steps": 3}) == "learning_rate=1e-05, steps=3"
    assert grid.is_seed("train.seed") and not grid.is_seed("train.steps")
