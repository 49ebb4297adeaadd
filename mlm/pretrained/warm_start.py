"""Fits the parameters of another model (`train.init_from`) to our vocabulary and length; the rest stays as it was.

Those of a smaller model are tiled with `model.init=tiled`, as ModernBERT-large was started from
base (Warner et al., 2024, 2.2.2): the small tensor is in the middle of the large one, and wraps
around on all sides. As there, nothing is rescaled. Layers are repeated, spread evenly.

Dimensions: R rows of a table, V entries of the vocabulary, H hidden size, I intermediate size.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict
from tokenizers import Tokenizer
from transformers import PretrainedConfig

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.model.families import SIZES, first_position, name_of
from mlm.model.module import Params
from mlm.paths import UPath
from mlm.pretrained import load, locate
from mlm.pretrained.load import Pretrained, shapes_of
from mlm.pretrained.model_config import longest_row

POSITIONS = "embeddings/position_embeddings/embedding"
TYPES = "embeddings/token_type_embeddings/embedding"
# of a table of the source, and those of ours that they go to
RowPairs = tuple[np.ndarray, np.ndarray]
# float32 of the new shape, and a mask that broadcasts to it: where it counts
Taken = tuple[np.ndarray, np.ndarray]


def read_source(
    settings: ConfigDict, config: PretrainedConfig, params: Params
) -> tuple[Pretrained, list[str]]:
    """Returns the model of train.init_from, tiled if asked for, and lines for the log; `params` may be abstract.

    Raises InputError if it has another architecture than `config`.
    """
    tiled = settings.model.init == "tiled"
    source = load.load(settings.train.init_from, head=None, flag=load.INIT_FROM)
    refuse_another_model(source, config, tiled=tiled)
    return tile(source, config, shapes_of(params)) if tiled else (source, [])


def refuse_another_model(
    source: Pretrained, config: PretrainedConfig, *, tiled: bool = False
) -> None:
    """Raises InputError, with all differences, if the source has another architecture than `config`.

    `tiled` allows smaller sizes.
    """
    old = source.config
    pairs = {}  # key -> (value of the config, value of the source)
    if type(old) is type(config):
        for key, name in source.family.architecture.items():
            value = getattr(config, name)
            old_value = getattr(old, name)
            may_grow = tiled and key in SIZES
            if value != old_value and not (may_grow and value > old_value):
                pairs[f"model.{key}"] = value, old_value
        size, old_size = (model.hidden_size // model.num_attention_heads for model in (config, old))
        if tiled and size != old_size:
            pairs["model.hidden_size / model.heads"] = size, old_size
        for name in ("classifier_activation", "global_attn_every_n_layers"):  # which have no key
            value, old_value = (getattr(model, name, None) for model in (config, old))
            if value != old_value:
                pairs[name] = value, old_value
    else:  # whose other keys mean something else
        pairs["model.family"] = name_of(config), name_of(old)
    if pairs:
        differences = (
            f"{key} = {value} (it has {theirs})" for key, (value, theirs) in pairs.items()
        )
        raise InputError(
            f"{load.INIT_FROM}{source.source}: does not fit {', '.join(differences)}; set what it has, or start from "
            "another model."
        )


def refuse_unfit_rows(body: PretrainedConfig, *, length: int, vocab_size: int, pad_id: int) -> None:
    """Raises InputError if a model can't read a classifier's rows, of `length` tokens at most."""
    if length > longest_row(body):
        raise InputError(
            f"config.classify.length = {length}: the model reads {longest_row(body)} tokens; lower it."
        )
    if body.vocab_size < vocab_size or body.pad_token_id != pad_id:
        raise InputError(
            f"config.train.init_from: its model has {body.vocab_size} vocabulary entries and pad id "
            f"{body.pad_token_id}, its tokenizer {vocab_size} and {pad_id}; take those of one model."
        )


def tile(
    source: Pretrained, config: PretrainedConfig, shapes: dict[str, tuple[int, ...]]
) -> tuple[Pretrained, list[str]]:
    """Tiles the source to `config`'s H, I, heads and layers; also returns lines for the log. `shapes` are by name."""
    old = source.config
    hidden = old.hidden_size, config.hidden_size
    inner = old.intermediate_size, config.intermediate_size
    # the copy in the middle; whole heads
    heads_before = (config.num_attention_heads - old.num_attention_heads) // 2
    starts = {
        inner: (inner[1] - inner[0]) // 2,
        hidden: heads_before * (old.hidden_size // old.num_attention_heads),
    }
    layers = _spread_layers(old, config)
    leaves = source.leaves
    stack = "/".join(source.family.stack) + "/"
    bias = "/".join(source.family.decoder_bias)
    tiled = {name: values for name, values in leaves.items() if not name.startswith(stack)}
    for name, shape in shapes.items():
        old_name = name
        if name.startswith(stack):
            layer, _, rest = name.removeprefix(stack).partition("/")
            old_name = f"{stack}{layers[int(layer)]}/{rest}"
        if old_name not in leaves:
            continue
        values = leaves[old_name]
        is_table = name == bias or name.endswith("/embedding")  # whose rows are matched by `fit`
        for axis in range(int(is_table), values.ndim):
            small = values.shape[axis]
            large = shape[axis]
            if small != large:
                values = np.take(values, (np.arange(large) - starts[small, large]) % small, axis)
        tiled[name] = values
    lines = [
        f"  hidden size {hidden[0]:,} tiled to {hidden[1]:,}, intermediate size {inner[0]:,} to {inner[1]:,}",
        f"  {old.num_hidden_layers} layers repeated to {len(layers)}: {', '.join(map(str, layers))}",
    ]
    return dataclasses.replace(source, params=unflatten_dict(tiled, sep="/")), lines


def _spread_layers(old: PretrainedConfig, new: PretrainedConfig) -> list[int]:
    """Returns the source's layer for each new one: within a kind, the k-th of n takes the (k m / n)-th of m.

    ModernBERT's kinds are the first layer, which lacks a norm, the other global ones, and the local
    ones.
    """
    every = getattr(new, "global_attn_every_n_layers", 0)

    def kind(layer: int) -> tuple[bool, bool]:
        return (layer == 0, layer % every == 0) if every else (False, False)

    chosen = []
    for layer in range(new.num_hidden_layers):
        alike = [other for other in range(new.num_hidden_layers) if kind(other) == kind(layer)]
        old_alike = [other for other in alike if other < old.num_hidden_layers] or [0]
        place = round(alike.index(layer) * len(old_alike) / len(alike))
        chosen.append(old_alike[min(place, len(old_alike) - 1)])
    return chosen


def fit(
    source: Pretrained, params: Params, *, pad_id: int, vocab_size: int, tokens: str | None
) -> tuple[dict[str, Taken], list[str]]:
    """Returns {name: what is copied}, and lines that report what happened to every parameter of both models.

    `vocab_size` is V without padding; `tokens` is the folder of our tokenizer, without which rows
    are matched by id.
    """
    leaves = source.leaves
    family = source.family
    shapes = shapes_of(params)
    vocabulary = ["/".join(path) for path in (family.embedding, family.decoder_bias)]
    entries = len(leaves[vocabulary[0]])
    token_rows, matched_by = _match_tokens(source, tokens, min(vocab_size, entries))
    rows = {name: token_rows for name in vocabulary if len(leaves.get(name, ())) == entries}
    positions = f"{family.body}/{POSITIONS}"
    if positions in leaves:
        # A RoBERTa's rows up to that of its padding id are of no position; another family's all are
        # of one.
        is_roberta = first_position(source.config) > 0
        old_pad, new_pad = (source.config.pad_token_id, pad_id) if is_roberta else (-1, -1)
        old_length = len(leaves[positions]) - old_pad - 1
        new_length = shapes[positions][0] - new_pad - 1
        # 0 is the position of padding
        steps = np.arange(-min(old_pad, new_pad), min(old_length, new_length) + 1)
        rows[positions] = steps + old_pad, steps + new_pad
    types = f"{family.body}/{TYPES}"
    if types in leaves:
        same = np.arange(min(len(leaves[types]), shapes[types][0]))
        rows[types] = same, same
    taken: dict[str, Taken] = {}
    for name, shape in shapes.items():
        values = leaves.get(name)
        if values is not None and name in rows and values.shape[1:] == shape[1:]:
            old_rows, new_rows = rows[name]
            table = np.zeros(shape, np.float32)
            table[new_rows] = values[old_rows]
            is_taken_R = np.isin(np.arange(shape[0]), new_rows)
            taken[name] = table, is_taken_R.reshape(-1, *[1] * (table.ndim - 1))
        elif values is not None and values.shape == shape:
            taken[name] = values, np.True_
    matched = [name for name in vocabulary if name in taken]
    lines = [
        f"start from {source.source}",
        f"  {' and '.join(matched)}: {_counts(len(token_rows[0]), vocab_size, entries)} rows; matched by {matched_by}",
        f"  copied whole: {len(set(taken) - {*vocabulary, positions})} of {len(shapes)} parameters",
    ]
    groups = {
        "newly initialized": [name for name in shapes if name not in taken],
        "unused in the source": [name for name in leaves if name not in shapes],
    }
    for what, names in groups.items():
        if names:
            modules = dict.fromkeys(name.rpartition("/")[0] for name in names)
            lines.append(f"  {what}: {', '.join(modules)}")
    if positions in leaves:
        counts = _counts(min(old_length, new_length), new_length, old_length)
        lines.append(f"  {positions}: {counts} positions")
    return taken, lines


def _match_tokens(source: Pretrained, folder: str | None, count: int) -> tuple[RowPairs, str]:
    """Returns the rows of equal tokens, and how they were matched: by text, or by id the first `count` rows."""
    by_id = (np.arange(count), np.arange(count)), "id"
    if folder is None or not locate.has_tokenizer(UPath(source.tokenizer)):
        return by_id
    old = tokenizer.load(source.tokenizer)
    new = tokenizer.load(folder)
    if old.get_vocab() == new.get_vocab():
        return by_id
    old_ids = dict(_texts(old.backend_tokenizer))
    old_id_of = {
        new_id: old_ids[text] for text, new_id in _texts(new.backend_tokenizer) if text in old_ids
    }
    for role in tokenizer.ROLES:
        new_id, old_id = (getattr(tok, f"{role}_token_id") for tok in (new, old))
        # a tokenizer that knows every character has no unk token
        if new_id is not None and old_id is not None:
            old_id_of[new_id] = old_id
    entries = len(source.leaves["/".join(source.family.embedding)])
    pairs = [(old_id, new_id) for new_id, old_id in sorted(old_id_of.items()) if old_id < entries]
    old_rows, new_rows = np.array(pairs, int).reshape(-1, 2).T
    return (old_rows, new_rows), "the tokens' text"


def _texts(fast: Tokenizer) -> list[tuple[str, int]]:
    """Returns (text, id) of each entry, however its tokenizer marks the space before a word."""
    text_of = tokenizer.surface(fast) or str
    added = {number: token.content for number, token in fast.get_added_tokens_decoder().items()}
    texts = []
    for piece, number in sorted(fast.get_vocab().items(), key=lambda item: -item[1]):
        text = added.get(number) or text_of(piece)
        is_part = "\N{REPLACEMENT CHARACTER}" in text  # of a character's bytes
        texts.append((piece if is_part else text, number))
    return texts


def _counts(taken: int, new: int, old: int) -> str:
    return f"{taken:,} of {old:,} copied to {new:,}"


def start(params: Params, taken: dict[str, Taken]) -> Params:
    """Returns `params`, freshly initialized, with the copied values filled in; every array keeps its sharding."""

    def shard(values: np.ndarray, like: jax.Array) -> jax.Array:
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])

    leaves = flatten_dict(params, sep="/")
    for name, (values, mask) in taken.items():
        leaf = leaves[name]
        # jnp.where allocates, so the result is safe to donate.
        where = jax.jit(jnp.where, out_shardings=leaf.sharding)
        leaves[name] = where(
            shard(np.broadcast_to(mask, leaf.shape), leaf), shard(values, leaf), leaf
        )
    return unflatten_dict(leaves, sep="/")
