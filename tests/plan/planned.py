"""`plan` as a function."""

import argparse
import json

import pytest

from mlm import config as configs
from mlm.commands import plan as command
from mlm.entry import Entry
from mlm.plan import tables
from mlm.text import show
from tests.support.tiny import tiny_config

H, FEED, LENGTH, ROWS, VOCABULARY = 128, 256, 32, 16, 512


SIZES = (f"model.hidden_size={H}", f"model.intermediate_size={FEED}", f"tokenizer.vocab_size={VOCABULARY}")


def planned(
    *overrides, name="v3:2x2", records=None, price=None, compare=False, sweep=(), search=False, as_json=True, slices=1
):
    """Prints the plan as the command does, and returns it."""
    flags = {"topology": name, "slices": slices, "compare": compare, "sweep": sweep, "no_search": not search}
    args = argparse.Namespace(**flags, records=records, price=price, config=configs.BASE, entry=Entry())
    found = command.compute(args, tiny_config(*SIZES, *overrides), None)
    draw = tables.sweep if sweep else tables.plan
    show(*([json.dumps(found)] if as_json else draw(found)))
    return found


@pytest.fixture(scope="module")
def found():
    return planned(compare=True, price=2.0)
