"""Config files: loaded, overridden, saved and compared; what can't be read is refused in one sentence."""

import json
import re
import sys
import traceback

import pytest

from mlm import config as configs
from mlm.config_rules import GONE, KEYS, NEVER, RESUME
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
    assert configs.load(BASE, ["train.steps=1", "train.steps=2"]).train.steps == 2, (
        "the last one holds"
    )


BODY = "from configs.base import get_config as base\ndef get_config():\n    c = base()\n    {}\n    return c\n"
OWN = BODY.format(
    "c.mine.alpha, c.mine.n, c.mine.deep, c.mine.name, c.mine.pairs = 1.0, 2, False, 'x', ((1, 0.5),)"
)
RULE = "\nRULES = {'mine.alpha': (lambda v: v > 0, 'a number above 0')}\n"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("zzz=5", "--config.zzz: configs/base.py"),
        ("train=5", "--config.train:"),
        ("train.steps", "--config.train.steps: --config.train.steps=VALUE"),
        ("train.steps=1.5", "--config.train.steps=1.5: whole"),
        ("train.steps=many", "--config.train.steps=many: whole"),
        ("model.remat=maybe", "--config.model.remat=maybe: true false"),
        ("corpus.weights=(1", "--config.corpus.weights=(1: tuple"),
        ("optimizer.lr=1", "did you mean optimizer.learning_rate?"),
        ("train.batch_size=1", "did you mean data.global_batch?"),
        ("learning_rate=1", "did you mean optimizer.learning_rate?"),
        ("train.max_steps=1", "did you mean train.steps?"),
        ("eval.every=1", "did you mean evaluate.every?"),
        ("model.num-layers=1", "did you mean model.layers?"),
        ("train.stps=1", "did you mean train.steps?"),
    ],
)
def test_overrides_that_are_refused(override, words):
    sentence = refused(override)
    assert all(word in sentence for word in words.split()), sentence


@pytest.mark.parametrize(
    ("text", "override", "words"),
    [
        (BODY.format("c.optimizer.lr = 1e-3"), "", "config.optimizer.lr: optimizer.learning_rate?"),
        (BODY.format("del c.train.seed"), "", "config.train.seed missing"),
        (BODY.format("c.train.steps = True"), "", "config.train.steps = True: whole number 0 up."),
        ("x = 1\n", "", "get_config() ConfigDict"),
        (OWN, "mine.alhpa=1", "--config.mine.alhpa mine.alpha"),
        (OWN, "mine.seed=1", "--config.mine.seed config.mine.seed"),
        (OWN, "mine.n=0.5", "--config.mine.n=0.5 whole 2"),
        (OWN, "mine.alpha=nan", "config.mine.alpha nan finite"),
        (OWN + RULE, "mine.alpha=-1", "config.mine.alpha -1.0 above 0"),
        (OWN + RULE.replace("alpha", "alhpa"), "", "RULES mine.alhpa mine.alpha"),
        (BODY.format("c.mine.x = None"), "mine.x=1", "config.mine.x None"),
        (BODY.format("c.mine.x = [1]"), "", "config.mine.x [1] tuple"),
        (BODY.format("c.research = type(c)({'x': 1})"), "", "config.research.x config.mine"),
    ],
)
def test_configs_that_are_refused(tmp_path, text, override, words):
    sentence = refused(*filter(None, [override]), path=write(tmp_path, text))
    assert all(word in sentence for word in words.split()), sentence


@pytest.mark.parametrize(
    ("text", "error", "line"),
    [
        (BODY.format("c.train.steps = 1.5"), TypeError, 4),
        (BODY.format("c.optimiser.b1 = 0.8"), AttributeError, 4),
        ("import math\nraise ValueError('two\\nlines')\n", ValueError, 2),
        ("def get_config(:\n", SyntaxError, 1),
        (OWN + "RULES = {'mine.n': (lambda v: v.y, 'a number')}\n", AttributeError, 6),
    ],
)
def test_an_error_in_a_config_file_is_its_own_traceback(tmp_path, text, error, line):
    path = write(tmp_path, text)
    with pytest.raises(error) as caught:
        configs.load(path, [])
    shown = "".join(traceback.format_exception(caught.value))
    assert f'File "{path}", line {line}' in shown


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_is_refused_by_name(tmp_path, key):
    """But in a saved config where its value is what the code does today: that run goes on."""
    value, instead = GONE[key]
    group, name = key.split(".")
    sentence = f"config.{key}: there is no such key any more: {instead}."
    assert refused(f"{key}=1") == f"--{sentence}"
    assert refused(path=write(tmp_path, BODY.format(f"c.{group}.{name} = 77"))) == sentence
    config = configs.load(BASE, [])
    saved = UPath(tmp_path / "config.json")
    content = config.to_dict()
    saved.write_text(json.dumps(content | {group: content[group] | {name: 77}}))
    with pytest.raises(InputError, match=rf"has {key} = 77 \(now {re.escape(instead)}\)"):
        configs.load_saved(saved, [])
    if value is not ...:
        saved.write_text(json.dumps(content | {group: content[group] | {name: value}}))
        assert configs.diff(configs.load_saved(saved, []), config) == []


def test_saved_config_comes_back(tmp_path):
    path = UPath(tmp_path) / "config.json"
    overrides = ["corpus.sources=('docstrings', 'text:a')", "corpus.weights=(1, 2)"]
    config = configs.load("configs/quickstart.py", overrides)
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


@pytest.mark.parametrize(
    "data", [None, b"", b"{", b"[1]", b"\xff", b"{}", b'{"a": {"b": 1}}', b'{"a": 1}']
)
def test_saved_config_that_is_damaged_is_named(tmp_path, data):
    path = UPath(tmp_path) / "config.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(StopError, match=r"config\.json: "):
        configs.load_saved(path, [])


@pytest.mark.parametrize(
    ("group", "change", "words"),
    [
        ("train", {"steps": "many"}, r"config\.train\.steps = 'many': must be"),
        ("train", {"epochs": None}, r"config\.train\.epochs = None: must be"),
        (
            "train",
            {"stepz": 3},
            r"config\.json: has train\.stepz, as if another version .* --workdir",
        ),
        ("pod", None, r"config\.json: has no pod\..*, as if another version .* --workdir"),
    ],
)
def test_saved_configs_of_another_type_or_version(tmp_path, group, change, words):
    path = UPath(tmp_path) / "config.json"
    content = configs.load(BASE, []).to_dict()
    content[group] = change and content[group] | change
    path.write_text(json.dumps({name: keys for name, keys in content.items() if keys}))
    with pytest.raises(InputError, match=words):
        configs.load_saved(path, [])


def test_diff_names_each_key_that_must_not_change():
    old = configs.load(BASE, [])
    for key, value in configs.flatten(old).items():
        other = "another" if isinstance(value, str) else 77
        new = configs.unflatten(configs.flatten(old) | {key: other})
        change = f"{key}: {value!r} -> {other!r}"
        assert configs.diff(old, new) == ([] if KEYS[key].may_change == RESUME else [change])
        assert configs.diff(old, new, configs.branch_may_change) == (
            [change] if KEYS[key].may_change == NEVER else []
        )


def test_diff_of_a_config_with_itself_out_of_json_is_empty():
    config = configs.load(BASE, ["data.batch_stages=((8, 2),)"])
    content = json.loads(config.to_json())
    assert configs.diff(configs.from_dict(content), config) == [], "JSON knows no tuples"
    del content["train"]["seed"]
    content["mine"]["pairs"] = [[1, 2]]
    changes = ["mine.pairs: ((1, 2),) -> None", "train.seed: None -> 0"]
    assert configs.diff(configs.from_dict(content), config) == changes


@pytest.mark.parametrize(
    ("mask_share", "random_share", "is_known"),
    [(0.8, 0.1, True), (1.0, 0.0, True), (0.6, 0.1, False), (0.8, 0.0, False)],
)
def test_an_older_config_goes_on_only_with_the_same_masks(
    tmp_path, mask_share, random_share, is_known
):
    content = configs.load(BASE, [f"masking.mask_share={mask_share}"]).to_dict()
    content["masking"]["random_share"] = random_share
    saved = UPath(tmp_path / "config.json")
    saved.write_text(json.dumps(content))
    if is_known:
        assert configs.read(saved).masking.mask_share == mask_share
    else:
        with pytest.raises(InputError, match=r"masking\.random_share = 0\.\d \(now half of what"):
            configs.read(saved)


def test_overrides_are_told_from_other_arguments():
    line = "train --config=a.py --config.train.steps=3 --config.a.b c=d --workdir=x"
    arguments, overrides = configs.split_overrides(line.split())
    assert arguments == ["train", "--config=a.py", "--workdir=x"]
    assert overrides == ["train.steps=3", "a.b=c=d"]


def write(folder, text: str = OWN, name: str = "own.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_keys_of_ones_own(tmp_path):
    path = write(tmp_path, OWN + RULE)
    overrides = ["mine.alpha=2", "mine.deep=true", "mine.name=a b", "mine.pairs=((3, 1.0),)"]
    config = configs.load(path, overrides)
    file = UPath(tmp_path) / "config.json"
    file.write_text(config.to_json(indent=1))
    again = configs.load_saved(file, [])
    values = {"alpha": 2.0, "n": 2, "deep": True, "name": "a b", "pairs": ((3, 1.0),)}
    for found in (config, again):
        assert repr(sorted(found.mine.items())) == repr(sorted(values.items())), "types, too"
    assert configs.fingerprint(again) == configs.fingerprint(config)
    changed = [configs.load(path, [f"mine.n={n}"]) for n in (2, 3)]
    assert configs.diff(*changed) == ["mine.n: 2 -> 3"]
    assert configs.diff(*changed, configs.branch_may_change) == []
    with pytest.raises(InputError, match=r"mine\.alpha = -1.*above 0"):
        configs.replace(config, {"mine.alpha": -1.0}, rules=configs.load_rules(path))


def test_a_config_may_change_the_path_and_has_no_other_folder_s_files(tmp_path):
    body = "import sys\nsys.path.insert(0, '/nowhere')\nfrom sizes_of_mine import SIZE\n"
    path = list(sys.path)
    for size in (3, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        write(folder, f"SIZE = {size}\n", "sizes_of_mine.py")
        file = write(folder, body + BODY.format("c.mine.size = SIZE"))
        assert configs.load(file, []).mine.size == size and str(folder) not in sys.path
    sys.path[:] = path
