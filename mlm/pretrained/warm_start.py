"""Fits the parameters of another model (`train.init_from`) to our vocabulary and length; the rest stays as it was.

Those of a smaller model are tiled with `model.init=tiled`, as ModernBERT-large was started from base (Warner et al.,
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
from mlm.model.families import SIZES, Family, first_position, name_of
from mlm.model.module import Params
from mlm.paths import UPath
from mlm.pretrained import load, locate
from mlm.pretrained.load import Pretrained, shapes_of
from mlm.pretrained.model_config import longest_row

POSITIONS, TYPES = "embeddings/position_embeddings/embedding", "embeddings/token_type_embeddings/embedding"
Taken = tuple[np.ndarray, np.ndarray]  # float32 of the new shape, and a mask that broadcasts to it: where it counts


def read_source(settings: ConfigDict, config: PretrainedConfig, params: Params) -> tuple[Pretrained, list[str]]:
    """Returns the model of train.init_from, tiled if asked for, and lines for the log; `params` may be abstract.

    Raises InputError if it has another architecture than `config`.
    """
    tiled = settings.model.init == "tiled"
    source = load.load(settings.train.init_from, head=None, flag=load.INIT_FROM)
    refuse_another_model(source, config, tiled=tiled)
    lines = []
    if tiled:
        source, lines = tile(source, config, shapes_of(params))
    return source, lines + rotary_changes(source, config)


def refuse_another_model(source: Pretrained, config: PretrainedConfig, *, tiled: bool = False) -> None:
    """Raises InputError if the source has another architecture than `config`; `tiled` allows smaller sizes."""
    old, source_name = source.config, f"train.init_from = {source.source}"
    if type(old) is not type(config):
        kind = f"a {name_of(old)}; set it to that, or start from another model"
        raise InputError(f"config.model.family = {name_of(config)}: {source_name} is {kind}.")
    for key, name in source.family.architecture.items():
        value, old_value, may_grow = getattr(config, name), getattr(old, name), tiled and key in SIZES
        if value != old_value and not (may_grow and value > old_value):
            fix = f"set it to that{' or more' if may_grow else ''}, or start from another model"
            raise InputError(f"config.model.{key} = {value}: {source_name} has {old_value}; {fix}.")
    size, old_size = (model.hidden_size // model.num_attention_heads for model in (config, old))
    if size != old_size:  # tiled
        heads = f"gives heads of size {size}, but {source_name} has heads of size {old_size}; make them equal"
        raise InputError(f"config.model.heads = {config.num_attention_heads}: {heads}.")
    for name in ("classifier_activation", "embedding_size", "num_hidden_groups", "inner_group_num", "rotary_value"):
        value, old_value = (getattr(model, name, None) for model in (config, old))
        if value != old_value:
            difference = f"its {name} is {old_value}, and {value} here"
            raise InputError(f"config.{source_name}: {difference}; start from another model.")


def refuse_unfit_rows(body: PretrainedConfig, *, length: int, vocab_size: int, pad_id: int) -> None:
    """Raises InputError if a model can't read a classifier's rows, of `length` tokens at most."""
    if length > longest_row(body):
        raise InputError(f"config.classify.length = {length}: the model reads {longest_row(body)} tokens; lower it.")
    if body.vocab_size < vocab_size or body.pad_token_id != pad_id:
        raise InputError(
            f"config.train.init_from: its model has {body.vocab_size} vocabulary entries and pad id "
            f"{body.pad_token_id}, its tokenizer {vocab_size} and {pad_id}; take those of one model."
        )


def rotary_changes(source: Pretrained, config: PretrainedConfig) -> list[str]:
    """Returns a line for each rotary base that differs from the source's."""
    bases = ((key, getattr(source.config, key, 0), getattr(config, key, 0)) for key in ROTARY_BASES)
    return [f"  model.{key}: {old:g} in the source, {new:g} here" for key, old, new in bases if old != new]


def tile(
    source: Pretrained, config: PretrainedConfig, shapes: dict[str, tuple[int, ...]]
) -> tuple[Pretrained, list[str]]:
    """Tiles the source to `config`'s H, I, heads and layers; also returns lines for the log. `shapes` are by name."""
    old, leaves, stack = source.config, source.leaves, "/".join(source.family.stack) + "/"
    hidden, inner = ((getattr(old, key), getattr(config, key)) for key in ("hidden_size", "intermediate_size"))
    heads = (config.num_attention_heads - old.num_attention_heads) // 2  # whole heads before the copy in the middle
    starts = {inner: (inner[1] - inner[0]) // 2, hidden: heads * (hidden[0] // old.num_attention_heads)}
    layers = _spread_layers(old, config)
    tiled = {name: values for name, values in leaves.items() if not name.startswith(stack)}
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
        tiled[name] = values
    sizes = {"hidden size": hidden, "intermediate size": inner}
    lines = [f"  tiled from {small:,} to {large:,}: {size}" for size, (small, large) in sizes.items() if small < large]
    if len(layers) > old.num_hidden_layers:
        lines.append(f"  repeated from {old.num_hidden_layers} to {len(layers)}: layers {', '.join(map(str, layers))}")
    return dataclasses.replace(source, params=unflatten_dict(tiled, sep="/")), lines


def _spread_layers(old: PretrainedConfig, new: PretrainedConfig) -> list[int]:
    """Returns the source's layer for each new one: within a kind, the k-th of n takes the (k m / n)-th of m.

    ModernBERT's kinds are the first layer, which lacks a norm, the other global ones, and the local ones.
    """
    every = getattr(new, "global_attn_every_n_layers", 0)

    def alike(config: PretrainedConfig, layer: int) -> list[int]:
        kinds = [(index == 0, index % every == 0) if every else () for index in range(new.num_hidden_layers)]
        return [index for index in range(config.num_hidden_layers) if kinds[index] == kinds[layer]]

    old_layers = []
    for layer in range(new.num_hidden_layers):
        of_new, of_old = alike(new, layer), alike(old, layer) or [0]
        old_layers.append(of_old[min(round(of_new.index(layer) * len(of_old) / len(of_new)), len(of_old) - 1)])
    return old_layers


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
    pairs, matched_by = _match_tokens(source, tokens, min(vocab_size, entries))
    pads = (source.config.pad_token_id, pad_id) if first_position(source.config) else (-1, -1)  # before the first one
    rows = {name: pairs for name in vocabulary if len(leaves.get(name, ())) == entries}
    if positions in leaves:
        lengths = (len(leaves[positions]) - pads[0] - 1, shapes[positions][0] - pads[1] - 1)
        steps = np.arange(-min(pads), min(lengths) + 1)  # from the padding id; 0 is the position of padding
        rows[positions] = steps + pads[0], steps + pads[1]
    if types in leaves:
        same = np.arange(min(len(leaves[types]), shapes[types][0]))
        rows[types] = same, same
    taken = {}
    for name, shape in shapes.items():
        values = leaves.get(name)
        if values is not None and name in rows and values.shape[1:] == shape[1:]:
            old_rows, new_rows = rows[name]
            table, is_taken_R = np.zeros(shape, np.float32), np.zeros(shape[0], bool)
            table[new_rows], is_taken_R[new_rows] = values[old_rows], True
            taken[name] = table, is_taken_R.reshape(-1, *[1] * (table.ndim - 1))
        elif values is not None and values.shape == shape:
            taken[name] = values, np.True_
    by_token = [name for name in vocabulary if name in taken]
    whole = [name for name in taken if name not in (*vocabulary, positions)]
    lines = [
        f"start from {source.source}",
        f"  copied: {_grouped(whole, family)}",
        f"  {' and '.join(by_token)}: {_counts('rows', len(pairs[0]), vocab_size, entries)}; matched by {matched_by}",
    ]
    if positions in leaves:
        lines.append(f"  {positions}: {_counts('positions', min(lengths), lengths[1], lengths[0])}")
    if fresh := [name for name in shapes if name not in taken]:
        lines.append(f"  newly initialized (missing from the source, or of another shape): {_grouped(fresh, family)}")
    if unused := [name for name in leaves if name not in shapes]:
        lines.append(f"  unused in the source: {_grouped(unused, family)}")
    return taken, lines


def _match_tokens(source: Pretrained, folder: str | None, count: int) -> tuple[tuple[np.ndarray, np.ndarray], str]:
    """Returns ((rows of the source, our rows), how they were matched): by text, or by id the first `count` rows."""
    by_id = (np.arange(count), np.arange(count)), "id"
    if folder is None or not locate.has_tokenizer(UPath(source.tokenizer)):
        return by_id
    old, new = tokenizer.load(source.tokenizer), tokenizer.load(folder)
    if old.get_vocab() == new.get_vocab():
        return by_id
    old_ids = dict(_texts(old.backend_tokenizer))
    old_id_of = {new_id: old_ids[text] for text, new_id in _texts(new.backend_tokenizer) if text in old_ids}
    for role in tokenizer.ROLES:
        new_id, old_id = (getattr(tok, f"{role}_token_id") for tok in (new, old))
        if new_id is not None and old_id is not None:  # a tokenizer that knows every character has no unk token
            old_id_of[new_id] = old_id
    rows = len(source.leaves["/".join(source.family.embedding)])
    pairs = [(old_id, new_id) for new_id, old_id in sorted(old_id_of.items()) if old_id < rows]
    old_rows, new_rows = np.array(pairs, int).reshape(-1, 2).T
    return (old_rows, new_rows), "the tokens' text"


def _texts(fast: Tokenizer) -> list[tuple[str, int]]:
    """Returns (text, id) of each entry, however its tokenizer marks the space before a word."""
    text_of: Callable[[str], str] = tokenizer.surface(fast) or (lambda piece: piece)
    added = {number: token.content for number, token in fast.get_added_tokens_decoder().items()}
    texts = []
    for piece, number in sorted(fast.get_vocab().items(), key=lambda item: -item[1]):
        text = added.get(number) or text_of(piece)
        texts.append((piece if "\N{REPLACEMENT CHARACTER}" in text else text, number))  # a part of a character's bytes
    return texts


def _counts(noun: str, taken: int, new: int, old: int) -> str:
    fresh = f", {new - taken:,} newly initialized" if new > taken else ""
    unused = f", {old - taken:,} unused" if old > taken else ""
    return f"{taken:,} of {old:,} {noun} copied{fresh}{unused}"


def _grouped(names: list[str], family: Family) -> str:
    """Returns the names without their last part; layers, which are always whole, are only counted."""
    stack, bias = "/".join(family.stack) + "/", "/".join(family.decoder_bias)
    layers = {name.removeprefix(stack).split("/")[0] for name in names if name.startswith(stack)}
    rest = [name for name in names if not name.startswith(stack)]
    groups = dict.fromkeys(name if name == bias else name.rpartition("/")[0] for name in rest)
    return ", ".join([f"{len(layers)} layers", *groups] if layers else groups)


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
