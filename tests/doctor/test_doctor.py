"""The command: what it prints of healthy shards and of those that are missing, that it leaves nothing, its flags."""

import json
import pathlib
import shutil

import pytest

from mlm import __main__
from mlm.data import tokenizer
from mlm.data.write_shard import find_documents
from mlm.doctor import first_batch, scan
from tests.support.processes import train_arguments
from tests.support.refusals import refuse, snapshot

ALL = ["data", "mesh", "lanes", "ids", "duplicates", "overlap", "masks"]
SETTINGS = ("tokenizer.vocab_size=600", "data.lanes=2")


def arguments(workdir: pathlib.Path, shards: str, *flags: str) -> list[str]:
    return ["doctor", *train_arguments(workdir, shards, *SETTINGS)[1:], *flags]


def run_doctor(workdir: pathlib.Path, shards: str, capsys, code: int, *flags: str) -> dict:
    """Returns {name of the check: its first finding}, and the batch."""
    assert __main__.main(arguments(workdir, shards, "--json", *flags)) == code
    out, err = capsys.readouterr()
    content = json.loads(out)
    levels = [finding["level"] for finding in content["findings"]]
    assert content["errors"] == levels.count("error")
    assert ("fix them before you train" in err) == (code == 2)
    for finding in content["findings"]:
        assert finding["what"] and finding["where"]
        assert bool(finding["fix"]) == (finding["level"] != "ok")
    found = {finding["check"]: finding for finding in content["findings"]}
    return found | {"batch": content["batch"]}


def test_healthy_shards_and_nothing_left_in_the_workdir(healthy, workdir, capsys):
    assert __main__.main(arguments(workdir, healthy.folder)) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[: len(ALL)]] == [
        ["ok", name] for name in ALL
    ]
    assert out.count("[") > 10 and "\033" not in out, "colors are for terminals"
    before = snapshot(workdir) | snapshot(pathlib.Path(healthy.folder))
    found = run_doctor(workdir, healthy.folder, capsys, code=0)
    batch = found.pop("batch")
    assert {name: finding["level"] for name, finding in found.items()} == dict.fromkeys(ALL, "ok")
    assert snapshot(workdir) | snapshot(pathlib.Path(healthy.folder)) == before
    assert "100% of the training rows" in found["duplicates"]["what"]
    assert "(masking.rate = 0.2)" in found["masks"]["what"]
    assert "special tokens never" in found["masks"]["what"]
    assert len(batch) == first_batch.SHOWN
    kinds = [kind for row in batch for _, kind, _ in row]
    assert {"mask", ""} < set(kinds) <= {"mask", "", "kept", "random"}
    assert all(read == "<mask>" for row in batch for _, kind, read in row if kind == "mask")


def test_what_training_refuses_is_a_finding(healthy, workdir, capsys, tmp_path):
    """In the words of its own start: shards that are not there, of another length, or damaged."""
    shards = pathlib.Path(shutil.copytree(healthy.folder, tmp_path / "shards"))
    path = sorted((shards / "train").iterdir())[0]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    for folder, words, *flags in (
        (workdir / "nothing", "holds no shards"),
        (healthy.folder, "config.shards.length = 16", "--config.shards.length=16"),
        (shards, path.name),
    ):
        found = run_doctor(workdir, str(folder), capsys, 2, *flags)
        assert words in found["data"]["what"]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--against=a.jsonl", ["--against a.jsonl: ", "text:GLOB"]),
        ("--record=x", ["--record=x", "the number"]),
        ("--record=test:1", ["--record=test:1"]),
        ("--record=999999", ["0 to "]),
    ],
)
def test_flags_that_can_not_be(healthy, workdir, capsys, flag, words):
    refuse(arguments(workdir, healthy.folder, flag), 2, *words, capsys=capsys)


@pytest.mark.parametrize("name", ["3", "validation:0"])
def test_a_record_and_its_documents(manifest, workdir, tokenizer_folder, capsys, name):
    printed = arguments(workdir, manifest.folder, f"--record={name}")
    assert __main__.main([*printed, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    split = found["split"]
    record = found["record"]
    ids = scan.row(manifest, split, record)
    assert found["text"] == tokenizer.load_fast(tokenizer_folder).decode(
        ids.tolist(), skip_special_tokens=False
    )
    assert [tuple(each.values()) for each in found["documents"]] == find_documents(
        manifest, split, record
    )
    assert __main__.main(printed) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert found["text"].split()[1] in " ".join(text)
    assert last == "from {source}, {part}, document {place}".format(**found["documents"][-1])
