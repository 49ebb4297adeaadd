"""Model folders from elsewhere: nothing in them is executed, followed out of the folder, or ends in a traceback."""

import json
import pathlib
import pickle
import random
import shutil

import pytest

from mlm import __main__
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.export import export
from mlm.paths import UPath
from mlm.pretrained import classifiers, load


@pytest.fixture
def folder(model, tmp_path) -> pathlib.Path:
    """A transformers folder that may be changed."""
    path = pathlib.Path(shutil.copytree(model.tokenizer, tmp_path / "model"))
    export.write_model(model, path)
    return path


def change(file: pathlib.Path, **keys) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | keys))


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, file: pathlib.Path):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


def test_code_in_a_folder_is_not_run(folder, tmp_path, monkeypatch):
    """Neither with a question at the terminal nor without: no one is asked."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    change(folder / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForMaskedLM": "own.Own"})
    own = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    change(folder / "tokenizer_config.json", **own)
    load.from_folder(str(folder))
    with pytest.raises(InputError, match="no tokenizer can be loaded from there"):
        tokenizer.load(str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_pickle_is_not_opened(folder, tmp_path, capsys):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    assert __main__.main(["predict", f"--model={folder}", "a <mask>"]) == 2
    assert "there is no model.safetensors" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    assert __main__.main(["predict", f"--model={folder}", "a <mask>"]) == 2
    assert "model.safetensors: can't be read" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


VALUES = [
    "x",
    "",
    None,
    -1,
    0,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    True,
    [],
    {},
    [1],
    {"a": 1},
    "\x1b[2J",
    "\ud800",
]


def test_a_config_changed_at_random_is_read_or_refused(folder):
    file = folder / "config.json"
    content, refused = json.loads(file.read_text()), 0
    for seed in range(300):
        rng = random.Random(seed)
        key, value = rng.choice(list(content)), rng.choice(VALUES)
        file.write_text(json.dumps(content | {key: value}))
        try:
            load.read_config(UPath(folder), "a folder")
            if seed % 15 == 0:
                load.from_folder(str(folder))
        except InputError as error:
            refused += 1
            assert str(error).isprintable(), (key, value, error)
    assert refused > 100


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 90_000, b"null", b'{"model_type": "\\u001b[2J"}'])
def test_a_config_that_is_no_config_is_refused(folder, data):
    (folder / "config.json").write_bytes(data)
    for read in (load.from_folder, classifiers.from_folder):
        with pytest.raises(InputError, match=r"config\.json") as error:
            read(str(folder))
        assert str(error.value).isprintable()


@pytest.mark.parametrize("data", [b"[]", b"\xff", b'{"mask_token": 3}', b'{"mask_token": {"text": 1}}'])
def test_special_tokens_of_another_type_are_refused(folder, data):
    (folder / "tokenizer_config.json").write_bytes(data)
    for file in ("special_tokens_map.json", "added_tokens.json"):
        (folder / file).unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"no \w+ token|is not a JSON object"):
        tokenizer.special_ids(str(folder))
