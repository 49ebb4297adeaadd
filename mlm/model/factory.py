"""Builds the network and the masking from the config groups and the DatasetInfo."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlm.data.manifest import DatasetInfo
from mlm.errors import InputError
from mlm.model import families
from mlm.model.masking import IndependentMasking, SpanMasking, TokenMasking, WordMasking
from mlm.model.network import Network

MASKING = {"token": TokenMasking, "word": WordMasking, "span": SpanMasking}


def make_network(model: Mapping[str, Any], info: DatasetInfo, *, isolated: bool = False) -> Network:
    """Returns the network of the config's group `model`, with the attention that runs on any device."""
    if info.length > model["positions"]:
        given = f"config.model.positions = {model['positions']}"
        raise InputError(f"{given}: the shards have rows of {info.length} tokens; raise it to at least that.")
    family = families.named(model["family"])
    config = family.make_config(model, info.vocab_size, info.special_ids)
    cls_id = info.special_ids["cls"] if isolated else None
    return family(config, model["dtype"], model["remat"], model["remat_feed_forward"], cls_id=cls_id)


def make_masking(masking: Mapping[str, Any], info: DatasetInfo, word_starts_V: np.ndarray | None) -> TokenMasking:
    """Returns the masking of the config's group `masking`; words and spans need the word starts to draw masks."""
    if word_starts_V is not None and len(word_starts_V) != info.vocab_size:
        raise InputError(
            f"config.masking.kind = {masking['kind']}: the tokenizer has {len(word_starts_V)} entries, the shards were "
            f"made with one of {info.vocab_size}; use a tokenizer and shards that belong together."
        )
    settings = {
        **masking,
        "mask_id": info.special_ids["mask"],
        "special_ids": info.all_special_ids,
        "vocab_size": info.vocab_size,
        "starts": None if word_starts_V is None else word_starts_V.tobytes(),
    }
    kind = MASKING[masking["kind"]]
    return kind(**{field.name: settings[field.name] for field in dataclasses.fields(kind)})


def make_eval_masking(masking: TokenMasking, count: str) -> TokenMasking:
    """Returns the masking of evaluation, given that of training and evaluate.count."""
    masking = dataclasses.replace(masking, end_rate=0.0, static=False)
    return masking if count == "fixed" else IndependentMasking(**vars(masking))
