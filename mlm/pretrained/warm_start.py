"""Parameters to start from (`train.init_from`): a run of ours, an export, or any RoBERTa of transformers.

Only where training starts is changed: parameters that the source has are taken, those that it lacks stay as they were
initialised, and a person is told which is which.

Dimensions: R rows of a table, V entries of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import flax.serialization
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax
from flax.traverse_util import flatten_dict
from tokenizers import Tokenizer
from transformers import RobertaConfig

from mlm import logs
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.model import weights
from mlm.model.roberta import Params
from mlm.paths import UPath, inside, local_folder
from mlm.pretrained import load
from mlm.text import printable
from mlm.training.sharding import named_leaves
from mlm.workdir import Workdir

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
OF_A_TOKENIZER = ("tokenizer.json", "vocab.json", "vocab.txt", "sentencepiece.bpe.model")
INDEX, TORCH, FLAX = "model.safetensors.index.json", "model.safetensors", "flax_model.msgpack"
FETCHED = ["config.json", "*token*.json", "vocab.*", "merges.txt", "*.bpe.model"]  # of a repository, beside the weights


@dataclasses.dataclass(frozen=True)
class Source:
    """A model to start from, on the host.

    Attributes:
      name: as `train.init_from` has it.
      config: transformers' config.
      leaves: {"roberta/embeddings/...": float32}, all of the model's parameters, by Flax's names.
      tokenizer: folder of its tokenizer; None if it has none.
    """

    name: str
    config: RobertaConfig
    leaves: dict[str, np.ndarray]
    tokenizer: str | None


def read(name: str) -> Source:
    """Returns the model that `train.init_from` names.

    Args:
      name: a workdir (its newest checkpoint), a folder with config.json and weights (safetensors in one file or
        several, or flax_model.msgpack), or a name on the hub, from its cache where it is there.

    Raises:
      InputError: there is no such thing, it can't be read, or it is no RoBERTa.
      DamageError: the checkpoint is not what was written.
    """
    root = UPath(name)
    if (root / "checkpoints").is_dir():
        found = load.from_checkpoint(Workdir(name, create=False))
        return Source(name, found.config, dict(named_leaves(found.params)), found.tokenizer)
    folder = UPath(local_folder(name) if root.is_dir() else _fetch(name))
    if not (folder / "config.json").is_file():
        raise InputError(f"{_key(name)} has no config.json and no checkpoints; name a workdir or a RoBERTa folder.")
    config = load.read_config(folder, _key(name).removesuffix(":"))
    if not config.tie_word_embeddings:
        raise InputError(f"{_key(name)} its embeddings are not tied; a RoBERTa with tied ones is needed.")
    leaves = _read_weights(folder, name)
    has_tokenizer = any((folder / file).is_file() for file in OF_A_TOKENIZER)
    return Source(name, config, leaves, str(folder) if has_tokenizer else None)


def _key(name: str) -> str:
    return f"config.train.init_from = {name}:"


def _fetch(name: str) -> str:
    """Returns the folder of a repository of the hub, in transformers' cache."""
    try:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            raise FileNotFoundError("no such folder")
        for files in ([TORCH, INDEX, "model-*.safetensors"], [FLAX]):
            folder = huggingface_hub.snapshot_download(name, allow_patterns=FETCHED + files)
            if any((UPath(folder) / file).is_file() for file in files):
                break
        return folder
    except Exception as error:  # of the hub, of its cache, of the network
        words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(
            f"{_key(name)} is no folder here, and can't be had from the hub ({words}); name a folder, or a model that "
            "is in the hub's cache."
        ) from error


def _read_weights(folder: UPath, name: str) -> dict[str, np.ndarray]:
    """Returns the parameters of a folder by Flax's names; of a model without a head too, whose names are shorter."""
    try:
        if (folder / INDEX).is_file():
            names = sorted(set(logs.read_object(folder / INDEX)["weight_map"].values()))
            files = [inside(folder, file, links=True) for file in names]
        else:
            files = [folder / TORCH] if (folder / TORCH).is_file() else []
        if files:
            parts = [safetensors.flax.load_file(str(file)) for file in files]
            tensors = {key: value for part in parts for key, value in part.items()}
            if "lm_head.decoder.bias" in tensors:  # tied to the other
                tensors.setdefault("lm_head.bias", tensors["lm_head.decoder.bias"])
            tree: Params = weights.from_torch(tensors)
        elif (folder / FLAX).is_file():
            tree = flax.serialization.msgpack_restore((folder / FLAX).read_bytes())
        else:
            raise InputError(
                f"{_key(name)} has neither {TORCH} nor {FLAX}; load it in PyTorch and save it with save_pretrained."
            )
        flat = {"/".join(path): np.asarray(value, np.float32) for path, value in flatten_dict(tree).items()}
    except load.UNREADABLE as error:
        raise InputError(f"{_key(name)} its weights can't be read ({printable(str(error))[:300]}).") from None
    bare = not any(key.startswith("roberta/") for key in flat)
    return {f"roberta/{key}" if bare else key: value for key, value in flat.items()}


def refuse_another_model(source: Source, config: RobertaConfig) -> None:
    """Raises InputError if the source has another architecture than `config`, or lacks a part of it."""
    for key, name in SAME.items():
        ours, theirs = getattr(config, name), getattr(source.config, name)
        if ours != theirs:
            raise InputError(
                f"config.{key} = {ours}: train.init_from = {source.name} has {theirs}; set it to that, or start from "
                "another model."
            )
    layers = sorted({key.split("/")[3] for key in source.leaves if key.startswith("roberta/encoder/layer/")}, key=int)
    if len(layers) != config.num_hidden_layers or WORDS[0] not in source.leaves or POSITIONS not in source.leaves:
        raise InputError(f"{_key(source.name)} its weights are not those of its config.json; take a good copy.")


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
    source: Source, shapes: dict[str, tuple[int, ...]], *, pad_id: int, vocab_size: int, tokenizer_folder: str | None
) -> tuple[dict[str, Taken], list[str]]:
    """Returns what is taken, by name, and lines that say what happened to every parameter of both models.

    Args:
      source: of `read`, of the same architecture.
      shapes: of our parameters, by name.
      pad_id: ours: positions are counted from the next id, in the source from its own.
      vocab_size: V, ours, without the padding of the table.
      tokenizer_folder: of ours; None if it isn't there: rows are then matched by id.
    """
    pairs, how = _match(source, tokenizer_folder, min(vocab_size, len(source.leaves[WORDS[0]])))
    pads, rows = (source.config.pad_token_id, pad_id), (len(source.leaves[POSITIONS]), shapes[POSITIONS][0])
    positions = min(count - pad - 1 for count, pad in zip(rows, pads, strict=True))
    steps = np.arange(-min(pads), positions + 1)  # 0 is the position of padding, and none is before it
    taken, other = {}, []
    for name, shape in shapes.items():
        values = source.leaves.get(name)
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
    counts = len(pairs[0]), vocab_size, len(source.leaves[WORDS[0]])
    longest = [count - pad - 1 for count, pad in zip(rows, pads, strict=True)]
    left = [name for name in source.leaves if name not in shapes]
    lines = [
        f"start from {source.name}",
        f"  taken: {_grouped(whole, shapes)}",
        f"  {' and '.join(words)}: {_change(*counts)} rows, matched by {how}",
        f"  {POSITIONS}: {_change(positions, longest[1], longest[0])} positions",
    ]
    if other:
        lines.append(f"  fresh, for the source lacks them or has them in another shape: {_grouped(other, shapes)}")
    if left:
        lines.append(f"  left over in the source: {_grouped(left, source.leaves)}")
    return taken, lines


def _rows(values: np.ndarray, shape: tuple[int, ...], from_: np.ndarray, to: np.ndarray) -> Taken:
    table, rows_R = np.zeros(shape, np.float32), np.zeros(shape[0], bool)
    table[to], rows_R[to] = values[from_], True
    return Taken(table, rows_R)


def _match(source: Source, folder: str | None, same: int) -> tuple[tuple[np.ndarray, np.ndarray], str]:
    """Returns ((rows of the source, our rows), how they were matched); `same` rows if it is by id."""
    by_id = (np.arange(same), np.arange(same)), "id"
    if source.tokenizer is None or folder is None:
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
    leaves, tree = jax.tree.flatten(params)
    names = [name for name, _ in named_leaves(params)]

    def placed(values: Any, like: jax.Array) -> jax.Array:
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])

    new = []
    for name, leaf in zip(names, leaves, strict=True):
        if name not in taken:
            new.append(leaf)
            continue
        rows_R = taken[name].rows_R
        keep = np.True_ if rows_R is None else rows_R.reshape(-1, *[1] * (leaf.ndim - 1))
        keep = placed(np.broadcast_to(keep, leaf.shape), leaf)
        # What jnp.where returns is no numpy memory, which the step, that the state is given away to, would write into.
        new.append(jax.jit(jnp.where, out_shardings=leaf.sharding)(keep, placed(taken[name].values, leaf), leaf))
    return jax.tree.unflatten(tree, new)
