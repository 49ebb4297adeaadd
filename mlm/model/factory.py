"""From the config's groups and what is known of the data to the network, its attention and its masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh
from transformers import RobertaConfig

from mlm.data.dataset_info import DatasetInfo
from mlm.errors import InputError
from mlm.model import attention, roberta
from mlm.model.masking import SpanMasking, TokenMasking, WordMasking
from mlm.model.roberta import Network


def make_network(
    model: Mapping[str, Any], info: DatasetInfo, *, mesh: Mesh | None = None, isolated: bool = False
) -> Network:
    """Returns the network for the data.

    Args:
      model: the config's group of that name.
      mesh: without one, its attention is the one that runs on any device.
      isolated: documents of a row do not attend to one another.

    Raises:
      InputError: rows longer than the model's positions, or an attention kernel that can't do them on this mesh.
    """
    if info.length > model["positions"]:
        raise InputError(
            f"config.model.positions = {model['positions']}: the shards hold rows of {info.length} tokens; "
            "make it at least that."
        )
    config = roberta_config(model, info.vocab_size, info.special_ids)
    kernel = None
    if mesh is not None:
        name, dtype = model["attention"], model["dtype"]
        kernel = make_attention(name, config, length=info.length, mesh=mesh, dtype=dtype, isolated=isolated)
    cls_id = info.special_ids["cls"] if isolated else None
    return Network(config, model["dtype"], model["remat"], model["remat_feed_forward"], kernel, cls_id)


def roberta_config(model: Mapping[str, Any], vocab_size: int, special_ids: Mapping[str, int]) -> RobertaConfig:
    """Returns transformers' config for the config's group `model`, the vocabulary padded."""
    others = ("init", "attention", "dtype", "remat", "remat_feed_forward")  # of training, not of the architecture
    sizes = {key: value for key, value in model.items() if key not in others}
    return roberta.make_config(vocab_size=vocab_size, special_ids=special_ids, **sizes)


def make_attention(
    name: str, config: RobertaConfig, *, length: int, mesh: Mesh, dtype: str, isolated: bool = False
) -> attention.Attention:
    """Returns the attention for rows of `length` tokens: the kernel of that name, or the fastest for "auto".

    Raises:
      InputError: the kernel can't do them on this mesh.
    """
    kernel = attention.choose(
        name,
        platform=mesh.devices.flat[0].platform,
        kind=mesh.devices.flat[0].device_kind,
        length=length,
        heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        tensor=mesh.shape["tensor"],
        dropout=config.attention_probs_dropout_prob,
        dtype=dtype,
    )
    return attention.make(kernel, heads=config.num_attention_heads, mesh=mesh, isolated=isolated)


def make_masking(masking: Mapping[str, Any], info: DatasetInfo, word_starts_V: np.ndarray | None) -> TokenMasking:
    """Returns what draws the masks of the training.

    Args:
      masking: the config's group of that name.
      word_starts_V: which tokens start a word, bool; for masks of words and spans, None where none are drawn.

    Raises:
      InputError: the word starts are of another vocabulary.
    """
    settings = {key: value for key, value in masking.items() if key not in ("kind", "seed", "longest", "span_p")}
    settings |= {"mask_id": info.special_ids["mask"], "special_ids": info.all_special_ids}
    settings["vocab_size"], kind = info.vocab_size, masking["kind"]
    if kind == "token":
        return TokenMasking(**settings)
    if word_starts_V is not None and len(word_starts_V) != info.vocab_size:
        raise InputError(
            f"config.masking.kind = {kind}: the tokenizer has {len(word_starts_V)} entries, the shards were made with "
            f"one of {info.vocab_size}; use those that belong together."
        )
    starts = None if word_starts_V is None else word_starts_V.tobytes()
    settings |= {"starts": starts, "longest": masking["longest"]}
    return WordMasking(**settings) if kind == "word" else SpanMasking(**settings, span_p=masking["span_p"])
