"""`doctor --record`: the text of a record, and the documents that it is from."""

import json
import pathlib
import shutil

import pytest

from mlm import __main__
from mlm.data import tokenizer
from mlm.data.write_shard import find_documents
from mlm.doctor import scan
from tests.support.processes import train_arguments


@pytest.fixture
def workdir(tokenizer_folder, tmp_path) -> pathlib.Path:
    shutil.copytree(tokenizer_folder, tmp_path / "run" / "tokenizer")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["3", "validation:0"])
def test_a_record_and_its_documents(manifest, workdir, tokenizer_folder, capsys, name):
    arguments = ["doctor", *train_arguments(workdir, manifest.folder, "tokenizer.vocab_size=600", "data.lanes=2")[1:]]
    assert __main__.main([*arguments, f"--record={name}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    split, record = found["split"], found["record"]
    ids = scan.row(manifest, split, record)
    assert found["text"] == tokenizer.load_fast(tokenizer_folder).decode(ids.tolist(), skip_special_tokens=False)
    assert [tuple(each.values()) for each in found["documents"]] == find_documents(manifest, split, record)
    assert __main__.main([*arguments, f"--record={name}"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert found["text"].split()[1] in " ".join(text)
    assert last == "from {source}, {part}, document {place}".format(**found["documents"][-1])


@pytest.mark.parametrize(("name", "words"), [("x", "must be the number"), ("test:1", "must be"), ("999999", "0 to ")])
def test_a_record_that_is_not_there(manifest, workdir, capsys, name, words):
    arguments = train_arguments(workdir, manifest.folder, "tokenizer.vocab_size=600", "data.lanes=2")[1:]
    assert __main__.main(["doctor", *arguments, f"--record={name}"]) == 2
    assert words in capsys.readouterr().err
