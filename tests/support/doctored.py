"""The doctor's checks as functions."""

import argparse
import pathlib

from mlm.data.manifest import Manifest
from mlm.doctor.checks import DataCase
from mlm.entry import Entry
from mlm.workdir import Workdir
from tests.support.tiny import tiny_config


def case_of(
    manifest: Manifest,
    workdir: pathlib.Path,
    *overrides: str,
    hosts: int = 1,
    devices: int = 8,
    topology: str = "",
    slices: int = 1,
) -> DataCase:
    """What the checks get, for one check alone."""
    config = tiny_config("tokenizer.vocab_size=600", "data.lanes=2", *overrides)
    flags = argparse.Namespace(
        hosts=hosts, devices=devices, rows=10_000, topology=topology, slices=slices, against=[]
    )
    flags.entry = Entry()
    return DataCase(config, Workdir(str(workdir)), flags, manifest)
