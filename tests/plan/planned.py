"""`plan` as a function."""

import argparse
import io
import json

from mlm import config as configs
from mlm.commands import plan as command
from mlm.entry import Entry
from mlm.text import show
from tests.support.tiny import tiny_config

H = 128
FEED = 256
LENGTH = 32
ROWS = 16
VOCABULARY = 512
SIZES = (
    f"model.hidden_size={H}",
    f"model.intermediate_size={FEED}",
    f"tokenizer.vocab_size={VOCABULARY}",
    "model.dtype=bfloat16",
    "model.positions=126",  # 128 with the two that RoBERTa never uses
)
LAYER = 4 * (H * H + H) + 2 * H + (H * FEED + FEED) + (FEED * H + H) + 2 * H
PARAMETERS = (VOCABULARY + 128 + 1) * H + 2 * H + LAYER + (H * H + H) + 2 * H + VOCABULARY


def planned(*overrides, name="v3:2x2", price=None, compare=False, slices=1):
    """What the command prints with --json."""
    args = argparse.Namespace(
        topology=name, slices=slices, compare=compare, sweep=(), records=None, price=price
    )
    args.config = configs.BASE
    args.entry = Entry()
    found = command.compute(args, tiny_config(*SIZES, *overrides), None)
    assert json.loads(json.dumps(found))
    return found


def shown_by(table, found) -> str:
    out = io.StringIO()
    show(*table(found), out=out)
    return out.getvalue()
