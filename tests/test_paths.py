"""What a path may be: its home folder, its letters, its links; names that a file gives lead inside their folder."""

import getpass
from pathlib import Path

import pytest

from mlm import config as configs
from mlm.__main__ import COMMANDS, main, parser
from mlm.errors import InputError
from mlm.paths import UPath, expand, expand_source, inside, replacing, sizes

HOME_KEYS = {  # a value of each key that holds paths, with HOME for the home folder
    "tokenizer.path": "HOME/tok",
    "shards.dir": "HOME/my ~shards",
    "train.init_from": "HOME/run@100",
    "train.branch_from": "HOME/run@100",
    "data.mixture": (("HOME/a", 0.5), ("/b/~/c", 0.5)),
    "evaluate.sets": (("web", "HOME/web"),),
    "corpus.sources": (
        "docstrings",
        "text:HOME/*.txt",
        "jsonl:/~/x#~",
        "hf:HOME/set",
        "tfds:HOME/set",
    ),
    "corpus.keep_out": ("jsonl:HOME/x.jsonl#text",),
    "classify.train": "csv:HOME/x.csv",
    "classify.validation": "conll:HOME/x",
    "classify.test": "hf:HOME/set#train[:5]",
    "classify.predict": (("new", "jsonl:HOME/x.jsonl"),),
}


@pytest.mark.parametrize("home", ["~", f"~{getpass.getuser()}"])
def test_the_home_folder_in_every_key_that_holds_paths(home):
    needs = {"data.mixture": "corpus.weights=1.0", "corpus.sources": f"corpus.weights={(1.0,) * 5}"}
    for key, value in HOME_KEYS.items():
        written, real = (
            repr(value).replace("HOME", text) for text in (home, str(Path(home).expanduser()))
        )
        overrides = [needs.get(key, "train.seed=0"), f"{key}={written.strip(chr(39))}"]
        config = configs.load("configs/base.py", overrides)
        assert repr(configs.flatten(config)[key]) == real, key


def test_the_home_folder_in_every_flag_that_takes_a_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of mine")
    kinds = {"DIR", "FILE", "FOLDER", "MODEL", "PYTHON", "WORKDIR[@STEPS]"}
    for command in COMMANDS:
        actions = parser(command)._subparsers._group_actions[0].choices[command]._actions
        for action in actions:
            flag = (action.option_strings or [action.dest])[0]
            if action.metavar == "SOURCE" or flag == "--data":
                assert action.type("jsonl:~/x") == "jsonl:/home/of mine/x", f"{command} {flag}"
            elif action.metavar in kinds or flag == "--protocol":
                assert action.type("~/x@5") == "/home/of mine/x@5", f"{command} {flag}"


def test_a_home_that_is_not_there_is_refused_and_nothing_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["average", "a", "b", "--workdir=~no_such_user/x"])
    assert ended.value.code == 2 and "~no_such_user" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"evaluate\.sets.*~no_such_user"):
        configs.load(str(configs.BASE), ["evaluate.sets=(('a', '~no_such_user'),)"])
    assert not list(tmp_path.iterdir())


EXPANDED = {
    **{name: name for name in ("", "a~", "a/~/b", "./~", "gs://b/~/c", "gs://b/x:y", "docstrings")},
    # as a shell completes it: a resumed run with tokenizer.path=tk/ is the one with tk
    **{"tk/": "tk", "/a/b//": "/a/b", "gs://b/": "gs://b", "./": ".", "/": "/"},
    **{"file:///a/b": "/a/b", "~": "/h", "~/a": "/h/a"},
}


@pytest.mark.parametrize("name", EXPANDED)
def test_a_folder_is_the_same_however_it_is_written(monkeypatch, name):
    monkeypatch.setenv("HOME", "/h/")
    assert expand(name) == EXPANDED[name]


def test_a_source_is_the_same_however_it_is_written(monkeypatch):
    monkeypatch.setenv("HOME", "/h/")
    for name in ("", "a~", "gs://b/~/c", "docstrings", "#~", "hf:wiki:~x"):
        assert expand_source(name) == name
    assert expand_source("text:file:///a/*") == "text:/a/*"


BAD = ("", "a/../../x", "a//x", "/etc/passwd", "C:\\x", "gs://b/x", "a\0", None, 3)


@pytest.mark.parametrize("folder", ["/a", "gs://bucket/folder"])
def test_a_name_leads_inside_its_folder_or_is_refused(folder):
    for name in BAD:
        with pytest.raises(
            ValueError, match="is not the name of a file inside its folder"
        ) as error:
            inside(UPath(folder), name)
        assert str(error.value).isprintable()
    for name in ("train/dataset-0-1.tfrecord", "a b", "...", "..x"):
        assert str(inside(UPath(folder), name)) == f"{folder}/{name}"


def test_a_colon_begins_no_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x:/y", "file:y", "a::b"):
        folder = UPath(expand(name))
        folder.mkdir(parents=True)
        assert (tmp_path / name).is_dir() and folder.absolute() == UPath(tmp_path / name)


def test_a_folder_survives_a_replacement_that_fails_or_is_killed_between_its_renames(
    tmp_path, monkeypatch
):
    target = tmp_path / "export"
    target.mkdir()
    (target / "a").write_text("old")
    rename = Path.rename

    def fail(path: Path, to: Path) -> Path:
        if path.name == "new":
            raise OSError("full")
        return rename(path, to)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(Path, "rename", fail)
        with replacing(UPath(target), last="a") as new:
            new.mkdir()
    assert (target / "a").read_text() == "old"
    (tmp_path / ".export.tmp").mkdir()
    target.rename(tmp_path / ".export.tmp" / "old")
    with pytest.raises(ZeroDivisionError), replacing(UPath(target), last="a"):
        _ = 1 / 0
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_sizes_are_those_of_files_and_of_what_links_lead_to(tmp_path):
    (tmp_path / "file").write_text("text")
    for link, target in (("link", "file"), ("broken", "nowhere")):
        (tmp_path / link).symlink_to(target)
    assert sizes(UPath(tmp_path)) == {"file": 4, "link": 4}
