"""Configs that are refused."""

import pytest

from mlm import config as configs
from mlm.errors import InputError

BASE = "configs/base.py"


def refused(*overrides: str, path: str = BASE) -> str:
    """Returns the sentence that refuses the overrides."""
    with pytest.raises(InputError) as caught:
        configs.load(path, list(overrides))
    sentence = str(caught.value)
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence
    return sentence
