"""The doctor as a function."""

import argparse
import json
import pathlib

from mlm import __main__
from mlm.data.manifest import Manifest
from mlm.doctor.checks import Case
from mlm.entry import Entry
from mlm.workdir import Workdir
from tests.support.processes import train_arguments
from tests.support.tiny import tiny_config


def run_doctor(workdir, shards: str, capsys, *overrides: str, flags: tuple[str, ...] = (), code: int = 0) -> dict:
    """Returns {name of the check: its first finding}, and the batch."""
    settings = ("tokenizer.vocab_size=600", "data.lanes=2", *overrides)
    arguments = ["doctor", *train_arguments(workdir, shards, *settings)[1:], "--json", *flags]
    capsys.readouterr()
    assert __main__.main(arguments) == code
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert ("fix them before you train" in err) == (code == 2), err
    levels = [finding["level"] for finding in content["findings"]]
    assert content["errors"] == levels.count("error") and (code == 2) == ("error" in levels)
    for finding in content["findings"]:
        assert finding["level"] in ("error", "warning", "ok") and finding["what"] and finding["where"]
        assert bool(finding["fix"]) == (finding["level"] != "ok"), "what is not ok can be fixed"
    found = {finding["check"]: finding for finding in reversed(content["findings"])}
    return found | {"batch": content["batch"]}


def case_of(
    manifest: Manifest,
    workdir: pathlib.Path,
    *overrides: str,
    hosts: int = 1,
    devices: int = 8,
    topology: str = "",
    slices: int = 1,
) -> Case:
    """What the checks get, for one check alone."""
    config = tiny_config("tokenizer.vocab_size=600", "data.lanes=2", *overrides)
    flags = argparse.Namespace(hosts=hosts, devices=devices, rows=10_000, topology=topology, slices=slices, against=[])
    flags.entry = Entry()
    return Case(config, Workdir(str(workdir)), manifest, flags)
