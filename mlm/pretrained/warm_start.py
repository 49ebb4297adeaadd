"""Fits the parameters of another model (`train.init_from`) to our vocabulary and length; the rest stays as it was.

Those of a smaller model are tiled with `train.init_tiled`, as ModernBERT-large was started from base (Warner et al.,
2024, 2.2.2): the small tensor is in the middle of the large one, and wraps around on all sides. As there, nothing is
rescaled. Layers are repeated, spread evenly.

Dimensions: R rows of a table, V entries of the vocabulary, H hidden size, I intermediate size.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict
from tokenizers import Tokenizer
from transformers import PretrainedConfig

from mlm.config_rules import ROTARY_BASES
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.model.families import BERT, SIZES, Family, name_of
from mlm.model.module import Params
from mlm.paths import UPath
from mlm.pretrained import load, locate
from mlm.pretrained.load import Pretrained

POSITIONS, TYPES = "embeddings/position_embeddings/embedding", "embeddings/token_type_embeddings/embedding"
Taken = tuple[np.ndarray, np.ndarray]  # float32 of our shape, and a mask that broadcasts to it: True where it counts


def read_source(train: ConfigDict, config: PretrainedConfig, params: Params) -> tuple[Pretrained, list[str]]:
    """Returns the model of train.init_from, tiled if asked for, and lines for the log; `params` may be abstract.

    Raises InputError if it has another architecture than `config`.
    """
    source = load.load(train.init_from, head=None, flag=load.INIT_FROM)
    refuse_another_model(source, config, tiled=train.init_tiled)
    lines = []
    if train.init_tiled:
        source, lines = tile(source, config, shapes_of(params))
    return source, lines + rotary_changes(source, config)


def shapes_of(params: Params) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters by name."""
    return {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()}


def refuse_another_model(source: Pretrained, config: PretrainedConfig, *, tiled: bool = False) -> None:
    """Raises InputError if the source has another architecture than `config`; `tiled` allows smaller sizes."""
    if type(source.config) is not type(config):
        ours, theirs = name_of(config), name_of(source.config)
        fix = "set it to that, or start from another model."
        raise InputError(f"config.model.family = {ours}: train.init_from = {source.source} is a {theirs}; {fix}")
    for key, name in source.family.architecture.items():
        ours, theirs = getattr(config, name), getattr(source.config, name)
        may_grow = tiled and key in SIZES
        if ours < theirs if may_grow else ours != theirs:
            fix = f"set it to that{' or more' * may_grow}, or start from another model."
            raise InputError(f"config.model.{key} = {ours}: train.init_from = {source.source} has {theirs}; {fix}")
    ours, theirs = (each.hidden_size // each.num_attention_heads for each in (config, source.config))
    if ours != theirs:  # tiled
        what = f"gives heads of size {ours}, but train.init_from = {source.source} has heads of size {theirs}"
        raise InputError(f"config.model.heads = {config.num_attention_heads}: {what}; make them equal.")
    ours, theirs = (getattr(each, "classifier_activation", None) for each in (config, source.config))
    if ours != theirs:
        what = f"its head has the activation {theirs}, its layers have {ours}"
        raise InputError(f"config.train.init_from = {source.source}: {what}; start from another model.")


def refuse_unfit_rows(body: PretrainedConfig, *, length: int, vocab_size: int, pad_id: int) -> None:
    """Raises InputError if a model can't read a classifier's rows, of `length` tokens at most."""
    reads = locate.longest_row(body.to_dict())
    if length > reads:
        raise InputError(f"config.classify.length = {length}: the model reads {reads} tokens; lower it.")
    if body.vocab_size < vocab_size or body.pad_token_id != pad_id:
        model = f"its model has {body.vocab_size} vocabulary entries and pad id {body.pad_token_id}"
        raise InputError(
            f"config.train.init_from: {model}, its tokenizer {vocab_size} and {pad_id}; take those of one model."
        )


def rotary_changes(source: Pretrained, config: PretrainedConfig) -> list[str]:
    """Returns a line for each rotary base that differs from the source's."""
    pairs = ((key, getattr(source.config, key, 0), getattr(config, key, 0)) for key in ROTARY_BASES)
    return [f"  model.{key}: {theirs:g} in the source, {ours:g} here" for key, theirs, ours in pairs if theirs != ours]


def tile(
    source: Pretrained, config: PretrainedConfig, shapes: dict[str, tuple[int, ...]]
) -> tuple[Pretrained, list[str]]:
    """Tiles the source to `config`'s H, I, heads and layers; also returns lines for the log. `shapes` are by name."""
    old, leaves, stack = source.config, source.leaves, "/".join(source.family.stack) + "/"
    outer, inner = ((getattr(old, key), getattr(config, key)) for key in ("hidden_size", "intermediate_size"))
    heads = (config.num_attention_heads - old.num_attention_heads) // 2  # whole heads before the copy in the middle
    starts = {inner: (inner[1] - inner[0]) // 2, outer: heads * (outer[0] // old.num_attention_heads)}
    layers = _spread_layers(old, config)
    found = {name: values for name, values in leaves.items() if not name.startswith(stack)}
    bias = "/".join(source.family.decoder_bias)
    for name, shape in shapes.items():
        index, _, rest = name.removeprefix(stack).partition("/")
        values = leaves.get(f"{stack}{layers[int(index)]}/{rest}" if name.startswith(stack) else name)
        if values is None:
            continue
        first = name == bias or name.endswith("/embedding")  # the rows of tables are matched by `fit`
        for axis in range(first, values.ndim):
            small, large = values.shape[axis], shape[axis]
            if small != large:
                values = np.take(values, (np.arange(large) - starts[small, large]) % small, axis)
        found[name] = values
    sizes = {"hidden size": outer, "intermediate size": inner}
    lines = [f"  tiled from {small:,} to {large:,}: {what}" for what, (small, large) in sizes.items() if small < large]
    if len(layers) > old.num_hidden_layers:
        lines.append(f"  repeated from {old.num_hidden_layers} to {len(layers)}: layers {', '.join(map(str, layers))}")
    return dataclasses.replace(source, params=unflatten_dict(found, sep="/")), lines


def _spread_layers(old: PretrainedConfig, new: PretrainedConfig) -> list[int]:
    """Returns the source's layer for each new one: within a kind, the k-th of n takes the (k m / n)-th of m.

    ModernBERT's kinds are the first layer, which lacks a norm, the other global ones, and the local ones.
    """
    every = getattr(new, "global_attn_every_n_layers", 0)

    def alike(config: PretrainedConfig, layer: int) -> list[int]:
        kinds = [(index == 0, index % every == 0) if every else () for index in range(new.num_hidden_layers)]
        return [index for index in range(config.num_hidden_layers) if kinds[index] == kinds[layer]]

    found = []
    for layer in range(new.num_hidden_layers):
        ours, theirs = alike(new, layer), alike(old, layer) or [0]
        found.append(theirs[min(round(ours.index(layer) * len(theirs) / len(ours)), len(theirs) - 1)])
    return found


def fit(
    source: Pretrained, params: Params, *, pad_id: int, vocab_size: int, tokens: str | None
) -> tuple[dict[str, Taken], list[str]]:
    """Returns {name: what is copied}, and lines that report what happened to every parameter of both models.

    `vocab_size` is V without padding; `tokens` is the folder of our tokenizer, without which rows are matched by id.
    """
    leaves, family, shapes = source.leaves, source.family, shapes_of(params)
    vocabulary = tuple("/".join(path) for path in (family.embedding, family.decoder_bias))
    positions, types = f"{family.body}/{POSITIONS}", f"{family.body}/{TYPES}"
    entries = len(leaves[vocabulary[0]])
    pairs, how = _match_tokens(source, tokens, min(vocab_size, entries))
    pads = (-1, -1) if family is BERT else (source.config.pad_token_id, pad_id)  # the entry before the first position
    rows = {name: pairs for name in vocabulary if len(leaves.get(name, ())) == entries}
    if positions in leaves:
        lengths = (len(leaves[positions]) - pads[0] - 1, shapes[positions][0] - pads[1] - 1)
        steps = np.arange(-min(pads), min(lengths) + 1)  # from the padding id; 0 is the position of padding
        same = np.arange(min(len(leaves[types]), shapes[types][0]))
        rows |= {positions: (steps + pads[0], steps + pads[1]), types: (same, same)}
    taken = {}
    for name, shape in shapes.items():
        values = leaves.get(name)
        if values is not None and name in rows and values.shape[1:] == shape[1:]:
            theirs_R, ours_R = rows[name]
            table, is_taken_R = np.zeros(shape, np.float32), np.zeros(shape[0], bool)
            table[ours_R], is_taken_R[ours_R] = values[theirs_R], True
            taken[name] = table, is_taken_R.reshape(-1, *[1] * (table.ndim - 1))
        elif values is not None and values.shape == shape:
            taken[name] = values, np.True_
    by_token = [name for name in vocabulary if name in taken]
    whole = [name for name in taken if name not in (*vocabulary, positions)]
    fresh, left = [name for name in shapes if name not in taken], [name for name in leaves if name not in shapes]
    lines = [
        f"start from {source.source}",
        f"  copied: {_grouped(whole, family)}",
        f"  {' and '.join(by_token)}: {_counts('rows', len(pairs[0]), vocab_size, entries)}; matched by {how}",
    ]
    if positions in leaves:
        lines.append(f"  {positions}: {_counts('positions', min(lengths), lengths[1], lengths[0])}")
    missing, unused = "newly initialized (missing from the source, or of another shape)", "unused in the source"
    rest = {missing: fresh, unused: left}
    lines += [f"  {what}: {_grouped(names, family)}" for what, names in rest.items() if names]
    return taken, lines


def _match_tokens(source: Pretrained, folder: str | None, same: int) -> tuple[tuple[np.ndarray, np.ndarray], str]:
    """Returns ((rows of the source, our rows), how they were matched); the first `same` rows if it is by id."""
    by_id = (np.arange(same), np.arange(same)), "id"
    if folder is None or not any((UPath(source.tokenizer) / file).is_file() for file in locate.TOKENIZERS):
        return by_id
    theirs, ours = tokenizer.load(source.tokenizer), tokenizer.load(folder)
    if theirs.get_vocab() == ours.get_vocab():
        return by_id
    numbers = dict(_texts(theirs.backend_tokenizer))
    pairs = {number: numbers[text] for text, number in _texts(ours.backend_tokenizer) if text in numbers}
    for role in tokenizer.ROLES:
        number, row = (getattr(tok, f"{role}_token_id") for tok in (ours, theirs))
        if number is not None and row is not None:  # a tokenizer that knows every character has no unk token
            pairs[number] = row
    rows = len(source.leaves["/".join(source.family.embedding)])
    pairs = {number: row for number, row in sorted(pairs.items()) if row < rows}
    return (np.array(list(pairs.values())), np.array(list(pairs))), "the tokens' text"


def _texts(fast: Tokenizer) -> list[tuple[str, int]]:
    """Returns (text, id) of each entry, however its tokenizer marks the space before a word."""
    text_of: Callable[[str], str] = tokenizer.surface(fast) or (lambda piece: piece)
    added = {number: token.content for number, token in fast.get_added_tokens_decoder().items()}
    found = []
    for piece, number in sorted(fast.get_vocab().items(), key=lambda item: -item[1]):
        text = added.get(number) or text_of(piece)
        found.append((piece if "\N{REPLACEMENT CHARACTER}" in text else text, number))  # a part of a character's bytes
    return found


def _counts(what: str, taken: int, ours: int, theirs: int) -> str:
    fresh = f", {ours - taken:,} newly initialized" if ours > taken else ""
    left = f", {theirs - taken:,} unused" if theirs > taken else ""
    return f"{taken:,} of {theirs:,} {what} copied{fresh}{left}"


def _grouped(names: list[str], family: Family) -> str:
    """Returns the names without their last part; layers, which are always whole, are only counted."""
    stack, bias = "/".join(family.stack) + "/", "/".join(family.decoder_bias)
    layers = {name.removeprefix(stack).split("/")[0] for name in names if name.startswith(stack)}
    rest = [name for name in names if not name.startswith(stack)]
    groups = dict.fromkeys(name if name == bias else name.rpartition("/")[0] for name in rest)
    return ", ".join([f"{len(layers)} layers"] * bool(layers) + list(groups))


def start(params: Params, taken: dict[str, Taken]) -> Params:
    """Returns `params`, freshly initialized, with the copied values filled in; every array keeps its sharding."""

    def shard(values: np.ndarray, like: jax.Array) -> jax.Array:
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])

    leaves = flatten_dict(params, sep="/")
    for name, (values, mask) in taken.items():
        leaf = leaves[name]
        # jnp.where allocates, so the result is safe to donate.
        where = jax.jit(jnp.where, out_shardings=leaf.sharding)
        leaves[name] = where(shard(np.broadcast_to(mask, leaf.shape), leaf), shard(values, leaf), leaf)
    return unflatten_dict(leaves, sep="/")
