"""Fits the parameters of another model (`train.init_from`) to our vocabulary and length, to start from them.

Parameters that the source has are taken, those that it lacks stay as they were initialised, and the lines of `fit` say
which is which.

Dimensions: R rows of a table, V entries of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from tokenizers import Tokenizer
from transformers import RobertaConfig

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.model.roberta import Params
from mlm.pretrained.load import Pretrained, named
from mlm.pretrained.locate import has_tokenizer

WORDS = ("roberta/embeddings/word_embeddings/embedding", "lm_head/bias")
POSITIONS = "roberta/embeddings/position_embeddings/embedding"
TYPES = "roberta/embeddings/token_type_embeddings/embedding"
SAME = {  # keys of our config, and what transformers calls them: the parameters mean nothing in another model
    "model.hidden_size": "hidden_size",
    "model.layers": "num_hidden_layers",
    "model.heads": "num_attention_heads",
    "model.intermediate_size": "intermediate_size",
    "model.activation": "hidden_act",
    "model.layer_norm_eps": "layer_norm_eps",
}


def refuse_another_model(source: Pretrained, config: RobertaConfig) -> None:
    """Raises InputError if the source has another architecture than `config`."""
    for key, name in SAME.items():
        ours, theirs = getattr(config, name), getattr(source.config, name)
        if ours != theirs:
            raise InputError(
                f"config.{key} = {ours}: train.init_from = {source.source} has {theirs}; set it to that, or start from "
                "another model."
            )


@dataclasses.dataclass(frozen=True)
class Taken:
    """What of an array comes from the source.

    Attributes:
      values: of the array's shape, float32.
      rows_R: which rows of `values` count; None for all.
    """

    values: np.ndarray
    rows_R: np.ndarray | None = None


def fit(
    source: Pretrained,
    shapes: dict[str, tuple[int, ...]],
    *,
    pad_id: int,
    vocab_size: int,
    tokenizer_folder: str | None,
) -> tuple[dict[str, Taken], list[str]]:
    """Returns what is taken, by name, and lines that say what happened to every parameter of both models.

    Args:
      source: of the same architecture, its body whole.
      shapes: of our parameters, by name.
      pad_id: ours: positions are counted from the next id, in the source from its own.
      vocab_size: V, ours, without the padding of the table.
      tokenizer_folder: of ours; None if it isn't there: rows are then matched by id.
    """
    leaves = source.leaves
    pairs, how = _match(source, tokenizer_folder, min(vocab_size, len(leaves[WORDS[0]])))
    pads, rows = (source.config.pad_token_id, pad_id), (len(leaves[POSITIONS]), shapes[POSITIONS][0])
    positions = min(count - pad - 1 for count, pad in zip(rows, pads, strict=True))
    steps = np.arange(-min(pads), positions + 1)  # 0 is the position of padding, and none is before it
    taken, other = {}, []
    for name, shape in shapes.items():
        values = leaves.get(name)
        if values is None or values.shape[1:] != shape[1:]:
            other.append(name)
        elif name in WORDS:
            taken[name] = _rows(values, shape, *pairs)
        elif name == POSITIONS:
            taken[name] = _rows(values, shape, steps + pads[0], steps + pads[1])
        elif name == TYPES:
            taken[name] = _rows(values, shape, *[np.arange(min(shape[0], len(values)))] * 2)
        elif values.shape == shape:
            taken[name] = Taken(values)
        else:
            other.append(name)
    whole = [name for name in taken if name not in (*WORDS, POSITIONS)]
    words = [name for name in WORDS if name in taken]
    counts = len(pairs[0]), vocab_size, len(leaves[WORDS[0]])
    longest = [count - pad - 1 for count, pad in zip(rows, pads, strict=True)]
    left = [name for name in leaves if name not in shapes]
    lines = [
        f"start from {source.source}",
        f"  taken: {_grouped(whole, shapes)}",
        f"  {' and '.join(words)}: {_change(*counts)} rows, matched by {how}",
        f"  {POSITIONS}: {_change(positions, longest[1], longest[0])} positions",
    ]
    if other:
        lines.append(f"  fresh, for the source lacks them or has them in another shape: {_grouped(other, shapes)}")
    if left:
        lines.append(f"  left over in the source: {_grouped(left, leaves)}")
    return taken, lines


def _rows(values: np.ndarray, shape: tuple[int, ...], from_: np.ndarray, to: np.ndarray) -> Taken:
    table, rows_R = np.zeros(shape, np.float32), np.zeros(shape[0], bool)
    table[to], rows_R[to] = values[from_], True
    return Taken(table, rows_R)


def _match(source: Pretrained, folder: str | None, same: int) -> tuple[tuple[np.ndarray, np.ndarray], str]:
    """Returns ((rows of the source, our rows), how they were matched); `same` rows if it is by id."""
    by_id = (np.arange(same), np.arange(same)), "id"
    if folder is None or not has_tokenizer(source.tokenizer):
        return by_id
    theirs, ours = tokenizer.load(source.tokenizer), tokenizer.load(folder)
    if theirs.get_vocab() == ours.get_vocab():
        return by_id
    numbers = dict(_texts(theirs.backend_tokenizer))
    pairs = {number: numbers[text] for text, number in _texts(ours.backend_tokenizer) if text in numbers}
    for role in tokenizer.ROLES:
        pairs[getattr(ours, f"{role}_token_id")] = getattr(theirs, f"{role}_token_id")
    rows = len(source.leaves[WORDS[0]])
    pairs = {number: row for number, row in sorted(pairs.items()) if row < rows}
    return (np.array(list(pairs.values())), np.array(list(pairs))), "the tokens' text"


def _texts(fast: Tokenizer) -> list[tuple[str, int]]:
    """Returns the text of each entry, whatever sign its tokenizer has for the space before a word."""
    text_of: Callable[[str], str] = tokenizer.surface(fast) or (lambda piece: piece)
    added = {number: token.content for number, token in fast.get_added_tokens_decoder().items()}
    found = []
    for piece, number in sorted(fast.get_vocab().items(), key=lambda item: -item[1]):
        text = added.get(number) or text_of(piece)
        found.append((piece if "\N{REPLACEMENT CHARACTER}" in text else text, number))  # a part of a character's bytes
    return found


def _change(taken: int, ours: int, theirs: int) -> str:
    words = f"{taken:,} taken of {theirs:,}"
    if ours > taken:
        words += f", {ours - taken:,} fresh"
    if theirs > taken:
        words += f", {theirs - taken:,} left over"
    return words


def _grouped(names: Iterable[str], among: Iterable[str]) -> str:
    """Returns the names without their last part; a layer all of whose names are there is only counted."""
    names, layers = list(names), {}
    for name in among:
        if name.startswith("roberta/encoder/layer/"):
            layers.setdefault(name.split("/")[3], set()).add(name)
    whole = [layer for layer in layers.values() if layer <= set(names)]
    rest = [name for name in names if not any(name in layer for layer in whole)]
    words = [f"{len(whole)} layers"] if whole else []
    return ", ".join(words + list(dict.fromkeys(name if name in WORDS else name.rpartition("/")[0] for name in rest)))


def start(params: Params, taken: dict[str, Taken]) -> Params:
    """Returns `params`, freshly initialised, with what was taken in its place; every array lives where it did."""

    def placed(values: Any, like: jax.Array) -> jax.Array:
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])

    leaves = named(params)
    for name, own in taken.items():
        leaf = leaves[name]
        keep = np.True_ if own.rows_R is None else own.rows_R.reshape(-1, *[1] * (leaf.ndim - 1))
        keep = placed(np.broadcast_to(keep, leaf.shape), leaf)
        # jnp.where allocates, so the result is safe to donate.
        leaves[name] = jax.jit(jnp.where, out_shardings=leaf.sharding)(keep, placed(own.values, leaf), leaf)
    return unflatten_dict(leaves, sep="/")
