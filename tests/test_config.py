"""Config files: loaded, overridden, saved and compared; what can't be read is refused in one sentence."""

import copy
import json
import math
import random
import sys

import pytest

from mlm import config as configs
from mlm.errors import InputError, StopError
from mlm.paths import UPath
from tests.support.configs import BASE, refused


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.steps=1_000", 1000),
        ("optimizer.learning_rate=1e-3", 0.001),
        ("optimizer.learning_rate=1", 1.0),
        ("model.remat=true", True),
        ("model.remat=False", False),
        ("tokenizer.kind=bpe", "bpe"),
        ("shards.dir=gs://bucket/a=b", "gs://bucket/a=b"),
        ("log.wandb=", ""),
        ("corpus.sources=text:*.txt", ("text:*.txt",)),
        ("corpus.weights=2", (2,)),
    ],
)
def test_overrides_of_each_type(override, value):
    group, name = override.partition("=")[0].split(".")
    found = configs.load(BASE, [override])[group][name]
    assert found == value and type(found) is type(value)
    assert configs.load(BASE, ["train.steps=1", "train.steps=2"]).train.steps == 2, "the last one holds"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stps=5", "--config.train.stps: train.steps"),
        ("zzz=5", "--config.zzz: configs/base.py"),
        ("train=5", "--config.train:"),
        ("train.steps", "--config.train.steps: --config.train.steps=VALUE"),
        ("train.steps=1.5", "--config.train.steps=1.5: whole"),
        ("train.steps=many", "--config.train.steps=many: whole"),
        ("model.remat=maybe", "--config.model.remat=maybe: true false"),
        ("corpus.weights=(1", "--config.corpus.weights=(1: tuple"),
    ],
)
def test_overrides_that_cannot_be_read(override, words):
    sentence = refused(override)
    assert all(word in sentence for word in words.split()), sentence


BODY = "from configs.base import get_config as base\ndef get_config():\n    c = base()\n    {}\n    return c\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BODY.format("c.optimizer.lr = 1e-3"), "config.optimizer.lr is not a key of configs/base.py"),
        (BODY.format("del c.train.seed"), "config.train.seed is missing"),
        (BODY.format("c.train.steps = 1.5"), "TypeError while reading it: "),
        (BODY.format("c.train.steps = True"), "config.train.steps = True: must be a whole number from 0 up."),
        (BODY.format("c.optimiser.b1 = 0.8"), "AttributeError while reading it: "),
        ("x = 1\n", "the file defines no get_config() that returns a ConfigDict."),
        ("raise ValueError('two\\nlines')\n", "ValueError while reading it: two lines"),
        ("raise SystemExit(3)\n", "SystemExit while reading it: 3"),
        ("def get_config(:\n", "SyntaxError while reading it: "),
    ],
)
def test_files_that_are_wrong(tmp_path, text, words):
    path = tmp_path / "x.py"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        configs.load(str(path), [])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_saved_config_comes_back(tmp_path):
    path = UPath(tmp_path) / "config.json"
    config = configs.load("configs/quickstart.py", ["corpus.sources=('docstrings', 'text:a')", "corpus.weights=(1, 2)"])
    path.write_text(config.to_json())
    again = configs.load_saved(path, [])
    assert configs.flatten(again) == configs.flatten(config)
    assert configs.fingerprint(again) == configs.fingerprint(config)
    assert again.corpus.sources == ("docstrings", "text:a")
    assert configs.load_saved(path, ["train.steps=9"]).train.steps == 9
    with pytest.raises(InputError, match="steps = -9"):
        configs.load_saved(path, ["train.steps=-9"])
    with pytest.raises(InputError, match=r"config\.json: is not Python"):
        configs.load(str(path), [])


@pytest.mark.parametrize("data", [None, b"", b"{", b"[1]", b"3", b"\xff", b"[" * 90_000, b"{}", b'{"a": {"b": 1}}'])
def test_saved_config_that_is_damaged_is_named(tmp_path, data):
    path = UPath(tmp_path) / "config.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(StopError, match=r"config\.json: "):
        configs.load_saved(path, [])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.steps", "many", r"config\.train\.steps = 'many': must be"),
        ("train.epochs", None, r"config\.train\.epochs = None: must be"),
        (
            "train.stepz",
            3,
            r"config\.json: has train\.stepz, as if another version .*; use that code, another --workdir, or",
        ),
        (
            "pod.port",
            ...,
            r"config\.json: has no pod\.port, as if another version .*; use that code, another --workdir, or",
        ),
    ],
)
def test_saved_configs_of_another_type_or_version(tmp_path, key, value, words):
    path, flat = UPath(tmp_path) / "config.json", configs.flatten(configs.load(BASE, [])) | {key: value}
    path.write_text(configs.unflatten({name: each for name, each in flat.items() if each is not ...}).to_json())
    with pytest.raises(InputError, match=words):
        configs.load_saved(path, [])


MAY_CHANGE_GROUPS = {"checkpoint", "corpus", "hub", "log", "mesh", "pod", "shards", "tokenizer"}
MAY_CHANGE = {
    "model.remat", "model.remat_feed_forward", "train.guard_limit", "train.accumulate", "evaluate.every",
    "evaluate.batch", "evaluate.sets", "data.skip_batches", "data.mixture",
    "classify.train", "classify.validation", "classify.test", "classify.predict",
}  # fmt: skip


def test_diff_names_each_key_that_must_not_change():
    old = configs.load(BASE, [])
    for key, value in configs.flatten(old).items():
        other = "another" if isinstance(value, str) else 77
        new = configs.unflatten(configs.flatten(old) | {key: other})
        may_change = key in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE_GROUPS
        expected = [] if may_change else [f"{key}: {value!r} -> {other!r}"]
        assert configs.diff(old, new) == expected, key


def test_diff_of_a_config_with_itself_out_of_json_is_empty():
    keys = ["corpus.sources=('docstrings', 'text:a')", "corpus.weights=(1, 2)", "data.batch_stages=((8, 2),)"]
    config = configs.load(BASE, [*keys, "mesh.data=-1"])
    content = json.loads(config.to_json())
    assert configs.diff(configs.from_dict(content), config) == [], "JSON knows no tuples"
    del content["train"]["seed"]
    content["mine"]["pairs"] = [[1, 2]]
    changes = ["mine.pairs: ((1, 2),) -> None", "train.seed: None -> 0"]
    assert configs.diff(configs.from_dict(content), config) == changes


def test_values_are_replaced_as_they_are_in_a_copy():
    config = configs.load(BASE, [])
    values = {"model.remat": True, "optimizer.learning_rate": 1e-17, "data.skip_batches": ("9:9", "41:50")}
    found = configs.replace(config, values)
    assert configs.flatten(found) == configs.flatten(config) | values
    assert configs.flatten(config) == configs.flatten(configs.load(BASE, []))
    with pytest.raises(InputError, match=r"config\.data\.lanes = 0: must be a whole number"):
        configs.replace(config, {"data.lanes": 0})
    with pytest.raises(AttributeError):
        found.train.stepz = 3


def test_overrides_are_told_from_other_arguments():
    argv = ["train", "--config=a.py", "--config.train.steps=3", "--config.a.b", "c=d", "--workdir=x"]
    assert configs.split_overrides(argv) == (["train", "--config=a.py", "--workdir=x"], ["train.steps=3", "a.b=c=d"])


def test_a_saved_config_changed_at_random_is_read_or_refused(tmp_path):
    path = UPath(tmp_path / "config.json")
    content = configs.load("configs/base.py", []).to_dict() | {"mine": {"x": 1}}
    values = ["x", None, -1, 0, 10**400, 1.5, math.nan, math.inf, True, [], {}, [1], {"a": 1}, [[]], "\ud800", [None]]
    refused = 0
    for seed in range(200):
        rng = random.Random(seed)
        changed = copy.deepcopy(content)
        group = rng.choice(list(changed))
        target, key = (changed, group) if seed % 10 == 0 else (changed[group], rng.choice(list(changed[group])))
        target[key] = rng.choice(values)
        path.write_text(json.dumps(changed))
        try:
            configs.load_saved(path, [])
        except StopError as error:
            refused += 1
            assert error.code in (2, 4), error
    assert refused > 100


OWN = BODY.format("c.mine.alpha, c.mine.n, c.mine.deep, c.mine.name, c.mine.pairs = 1.0, 2, False, 'x', ((1, 0.5),)")
RULE = "\nRULES = {'mine.alpha': (lambda v: v > 0, 'a number above 0')}\n"


def write(folder, text: str = OWN, name: str = "own.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_keys_of_ones_own(tmp_path):
    path, types = write(tmp_path, OWN + RULE), {"alpha": float, "n": int, "deep": bool, "name": str, "pairs": tuple}
    config = configs.load(path, ["mine.alpha=2", "mine.deep=true", "mine.name=a b", "mine.pairs=((3, 1.0),)"])
    assert config.mine.to_dict() == {"alpha": 2.0, "n": 2, "deep": True, "name": "a b", "pairs": ((3, 1.0),)}
    assert {key: type(value) for key, value in config.mine.items()} == types
    file = UPath(tmp_path) / "config.json"
    file.write_text(config.to_json(indent=1))
    again = configs.load_saved(file, [])
    assert again.mine.to_dict() == config.mine.to_dict() and type(again.mine.pairs[0][1]) is float
    assert configs.fingerprint(again) == configs.fingerprint(config) != configs.fingerprint(configs.load(path, []))
    changed = [configs.load(path, [f"mine.n={n}"]) for n in (2, 3)]
    assert configs.diff(*changed) == ["mine.n: 2 -> 3"] and not configs.diff(*changed, configs.BRANCH_MAY_CHANGE)
    assert configs.replace(config, {"mine.n": 5}).mine.n == 5 and configs.load(BASE, []).mine.to_dict() == {}
    with pytest.raises(InputError, match=r"mine\.alpha = -1.*above 0"):
        configs.replace(config, {"mine.alpha": -1.0}, rules=configs.load_rules(path))


@pytest.mark.parametrize(
    ("text", "override", "words"),
    [
        (OWN, "mine.alhpa=1", "--config.mine.alhpa mine.alpha"),
        (OWN, "mine.seed=1", "--config.mine.seed config.mine.seed"),
        (OWN, "mine.n=0.5", "--config.mine.n=0.5 whole 2"),
        (OWN, "mine.alpha=nan", "config.mine.alpha nan finite"),
        (OWN + RULE, "mine.alpha=-1", "config.mine.alpha -1.0 above 0"),
        (OWN + RULE.replace("alpha", "alhpa"), "", "RULES mine.alhpa mine.alpha"),
        (OWN + RULE.replace("mine.alpha", "train.steps"), "", "RULES train.steps"),
        (OWN + "\nRULES = {'mine.alpha': lambda v: v > 0}\n", "", "RULES mine.alpha"),
        (OWN + RULE.replace("v > 0", "v.x"), "", "config.mine.alpha AttributeError"),
        (BODY.format("c.mine.x = None"), "mine.x=1", "config.mine.x None"),
        (BODY.format("c.mine.x = [1]"), "", "config.mine.x [1] tuple"),
        (BODY.format("c.mine.keys = 4"), "", "config.mine.keys method"),
        (BODY.format("del c.mine\n    c.mine = 3"), "", "config.mine 3 ConfigDict"),
        (BODY.format("c.mine['a b'] = 3"), "", "mine.a letters"),
        (BODY.format("c.research = type(c)({'x': 1})"), "", "config.research.x config.mine"),
    ],
)
def test_keys_of_ones_own_that_are_refused(tmp_path, text, override, words):
    sentence = refused(*[override] * bool(override), path=write(tmp_path, text))
    assert all(word in sentence for word in words.split()), sentence


def test_a_config_imports_the_file_beside_it(tmp_path):
    """Two folders may have a file of one name; each config gets its own."""
    found = []
    for size in (3, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        write(folder, f"SIZE = {size}\n", "sizes_of_mine.py")
        path = write(folder, "from sizes_of_mine import SIZE\n" + BODY.format("c.mine.size = SIZE"))
        found.append(configs.load(path, []).mine.size)
    assert found == [3, 4] and "sizes_of_mine" not in sys.modules
    assert not {str(tmp_path / "3"), str(tmp_path / "4")} & set(sys.path)
