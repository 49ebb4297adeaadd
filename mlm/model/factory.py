"""From a config's groups and the data's sizes to the network and its masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlm.data.dataset_info import DatasetInfo
from mlm.errors import InputError
from mlm.model import roberta
from mlm.model.masking import SpanMasking, TokenMasking, WordMasking
from mlm.model.roberta import Network


def make_network(model: Mapping[str, Any], info: DatasetInfo, *, isolated: bool = False) -> Network:
    """Returns the network of the config's group `model`, with the attention that runs on any device.

    Args:
      isolated: documents of a row do not attend to one another.

    Raises:
      InputError: rows longer than the model's positions.
    """
    if info.length > model["positions"]:
        raise InputError(
            f"config.model.positions = {model['positions']}: the shards hold rows of {info.length} tokens; "
            "make it at least that."
        )
    config = roberta.make_config(model, info.vocab_size, info.special_ids)
    cls_id = info.special_ids["cls"] if isolated else None
    return Network(config, model["dtype"], model["remat"], model["remat_feed_forward"], cls_id=cls_id)


def make_masking(masking: Mapping[str, Any], info: DatasetInfo, word_starts_V: np.ndarray | None) -> TokenMasking:
    """Returns what draws the masks of the config's group `masking`.

    Args:
      word_starts_V: bool, for masks of words and spans; None where none are drawn.

    Raises:
      InputError: the word starts are of another vocabulary.
    """
    kind = masking["kind"]
    shared = ("rate", "mask_share", "random_share", "end_rate", "static")
    settings = {key: masking[key] for key in shared} | {
        "mask_id": info.special_ids["mask"],
        "special_ids": info.all_special_ids,
        "vocab_size": info.vocab_size,
    }
    if kind == "token":
        return TokenMasking(**settings)
    if word_starts_V is not None and len(word_starts_V) != info.vocab_size:
        raise InputError(
            f"config.masking.kind = {kind}: the tokenizer has {len(word_starts_V)} entries, the shards were made with "
            f"one of {info.vocab_size}; use a tokenizer and shards that belong together."
        )
    starts = None if word_starts_V is None else word_starts_V.tobytes()
    settings |= {"starts": starts, "longest": masking["longest"]}
    return WordMasking(**settings) if kind == "word" else SpanMasking(**settings, span_p=masking["span_p"])
