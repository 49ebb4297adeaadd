"""What each key of a config may be: the rules that mlm/config.py holds a config to. Standard library only."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

# What each key may be: a predicate and the words that name it to a person. A key of the base config that is missing
# here is refused by `validate`, so that no key goes unchecked.
Rule = tuple[Callable[[Any], bool], str]
Range = tuple[int, int]  # of batches, both ends included


def parse_ranges(texts: Iterable[str]) -> list[Range]:
    """Returns the ranges "A:B" as numbers, in order; raises ValueError if one is none."""
    found = []
    for text in texts:
        match = re.fullmatch(r"([1-9][0-9]*):([1-9][0-9]*)", text) if isinstance(text, str) else None
        if match is None or int(match[1]) > int(match[2]):
            raise ValueError(text)
        found.append((int(match[1]), int(match[2])))
    return sorted(found)


def is_ranges(value: object) -> bool:
    """Returns whether a value of the config is a tuple of ranges."""
    try:
        return type(value) is tuple and parse_ranges(value) is not None
    except ValueError:
        return False


def ranges_overlap(ranges: list[Range]) -> bool:
    """Returns whether a batch is in two of the ranges."""
    return any(last >= first for (_, last), (first, _) in itertools.pairwise(ranges))


def _one_of(*names: str) -> Rule:
    return (lambda v: v in names), "one of " + ", ".join(names)


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _number(low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> Rule:
    def check(value: Any) -> bool:
        above = _finite(value) and (value > low if open_low else value >= low)
        return above and (value < high if open_high else value <= high)

    return check, f"a number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"


def _whole(low: int, high: float = math.inf, words: str = "") -> Rule:
    return (lambda v: type(v) is int and low <= v < high), f"a whole number from {low} {words or 'up'}"


POSITIVE, COUNT, SEED = _whole(1), _whole(0), _whole(0, 2**32, "to 2^32 - 1")
PORT = _whole(1024, 65_536, "to 65,535")
SHARE, RATE = _number(0, 1), _number(0, 1, open_high=True)
ABOVE_ZERO: Rule = (lambda v: _finite(v) and v > 0), "a finite number above 0"
FROM_ZERO: Rule = (lambda v: _finite(v) and v >= 0), "a finite number from 0 up"
FLAG: Rule = (lambda v: type(v) is bool), "true or false"
TEXT: Rule = (lambda v: type(v) is str), "a string"
AXIS: Rule = (lambda v: type(v) is int and (v == -1 or v >= 1)), "a whole number from 1 up, or -1 for all that are left"
SOURCES: Rule = (
    (
        lambda v: (
            type(v) is tuple
            and len(v) > 0
            and all(re.fullmatch(r"docstrings|(text|jsonl|hf|tfds):.+", str(s)) for s in v)
        )
    ),
    "a tuple of docstrings, text:GLOB, jsonl:GLOB[#FIELD], hf:NAME[:CONFIG] or tfds:NAME",
)
TABLE: Rule = (
    (lambda v: type(v) is str and bool(re.fullmatch(r"|(csv|jsonl|hf|tfds):.+", v))),
    "csv:FILE, jsonl:FILE, hf:NAME[:CONFIG][#SPLIT], tfds:NAME[#SPLIT] or empty",
)
WEIGHTS: Rule = (
    (lambda v: type(v) is tuple and len(v) > 0 and all(_finite(w) and w > 0 for w in v)),
    "a tuple of numbers above 0",
)

RULES: dict[str, Rule] = {
    "corpus.sources": SOURCES,
    "corpus.weights": WEIGHTS,
    "corpus.field": ((lambda v: type(v) is str and v != ""), "the name of a field"),
    "corpus.streaming": FLAG,
    "corpus.validation_fraction": RATE,
    "corpus.max_documents": COUNT,
    "tokenizer.path": TEXT,
    "tokenizer.kind": _one_of("unigram", "bpe", "wordpiece"),
    "tokenizer.vocab_size": _whole(16, 2**31),
    "tokenizer.sample_megabytes": ABOVE_ZERO,
    "tokenizer.lowercase": FLAG,
    "shards.dir": TEXT,
    "shards.length": _whole(8),
    "shards.count": POSITIVE,
    "shards.validation_count": POSITIVE,
    "shards.workers": COUNT,
    "shards.patience": ABOVE_ZERO,
    "data.seed": SEED,
    "data.global_batch": POSITIVE,
    "data.lanes": POSITIVE,
    "data.isolate_documents": FLAG,
    "data.short_length": COUNT,
    "data.short_share": _number(0, 1, open_low=True),
    "data.skip_batches": (is_ranges, 'a tuple of "A:B", whole numbers from 1 up, A at most B'),
    "masking.seed": SEED,
    "masking.kind": _one_of("token", "word", "span"),
    "masking.rate": _number(0, 1, open_low=True),
    "masking.end_rate": SHARE,
    "masking.mask_share": SHARE,
    "masking.random_share": SHARE,
    "masking.longest": _whole(1, 1025, "to 1,024"),
    "masking.span_p": _number(0, 1, open_low=True),
    "masking.static": FLAG,
    "model.hidden_size": POSITIVE,
    "model.layers": POSITIVE,
    "model.heads": POSITIVE,
    "model.intermediate_size": POSITIVE,
    "model.positions": POSITIVE,
    "model.activation": _one_of("gelu", "gelu_new", "relu", "silu"),
    "model.hidden_dropout": RATE,
    "model.attention_dropout": RATE,
    "model.layer_norm_eps": ABOVE_ZERO,
    "model.init": _one_of("stock", "primed"),
    "model.init_stddev": ABOVE_ZERO,
    "model.vocab_multiple": POSITIVE,
    "model.dtype": _one_of("float32", "bfloat16"),
    "model.attention": _one_of("auto", "xla", "fused", "splash", "cudnn"),
    "model.remat": FLAG,
    "model.remat_feed_forward": COUNT,
    "optimizer.name": _one_of("adamw", "lamb", "lion", "adafactor", "muon"),
    "optimizer.learning_rate": ABOVE_ZERO,
    "optimizer.b1": RATE,
    "optimizer.b2": RATE,
    "optimizer.eps": ABOVE_ZERO,
    "optimizer.weight_decay": FROM_ZERO,
    "optimizer.clip_norm": FROM_ZERO,
    "optimizer.ema_decay": RATE,
    "schedule.name": _one_of("linear", "cosine", "inverse_sqrt", "wsd", "constant"),
    "schedule.warmup_steps": COUNT,
    "schedule.warmup_fraction": SHARE,
    "schedule.decay_fraction": SHARE,
    "schedule.final_fraction": SHARE,
    "train.steps": COUNT,
    "train.epochs": FROM_ZERO,
    "train.seed": SEED,
    "train.init_from": TEXT,
    "train.accumulate": POSITIVE,
    "train.guard_limit": POSITIVE,
    "classify.train": TABLE,
    "classify.validation": TABLE,
    "classify.test": TABLE,
    "classify.text": (
        (lambda v: type(v) is tuple and len(v) in (1, 2) and all(type(c) is str and c != "" for c in v)),
        "a tuple of one or two names of columns",
    ),
    "classify.label": ((lambda v: type(v) is str and v != ""), "the name of a column"),
    "classify.kind": _one_of("classes", "regression"),
    "classify.length": _whole(8),
    "classify.multiple": POSITIVE,
    "mesh.data": AXIS,
    "mesh.fsdp": AXIS,
    "mesh.tensor": AXIS,
    "evaluate.every": COUNT,
    "evaluate.batch": POSITIVE,
    "evaluate.seed": SEED,
    "checkpoint.every": COUNT,
    "checkpoint.keep": POSITIVE,
    "checkpoint.on_damage": _one_of("stop", "fallback"),
    "log.every": POSITIVE,
    "log.tensorboard": FLAG,
    "log.wandb": TEXT,
    "log.profile_start": COUNT,
    "log.profile_steps": POSITIVE,
    "pod.port": PORT,
    "pod.jax_port": PORT,
    "pod.start_timeout": _number(1, 86_400),
    "pod.heartbeat": _number(2, 3_600),
    "pod.hang": FROM_ZERO,
}


def across(c: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """Returns the rules that tie one key to another: (key to name, is it broken, what is allowed)."""
    lanes, batch, accumulate = c["data.lanes"], c["data.global_batch"], c["train.accumulate"]
    warmup = c["schedule.warmup_fraction"] or c["schedule.warmup_steps"] / (c["train.steps"] or math.inf)
    short, length = c["data.short_length"], c["shards.length"]
    shares = c["masking.mask_share"] + c["masking.random_share"]
    return [
        ("corpus.weights", len(c["corpus.weights"]) != len(c["corpus.sources"]), "one number for each source"),
        ("model.heads", c["model.hidden_size"] % c["model.heads"] != 0, "must divide model.hidden_size"),
        (
            "model.attention",
            c["model.attention"] in ("splash", "cudnn") and c["model.attention_dropout"] > 0,
            "has no dropout: set model.attention_dropout to 0, or take another kernel",
        ),
        (
            "shards.length",
            c["shards.length"] > c["model.positions"],
            f"must be at most model.positions = {c['model.positions']}",
        ),
        ("shards.count", c["shards.count"] < lanes, f"must be at least data.lanes = {lanes}"),
        ("data.global_batch", batch % lanes != 0, f"must be a multiple of data.lanes = {lanes}"),
        (
            "data.short_length",
            short > 0 and (short % 8 > 0 or length % short > 0 or short == length),
            f"must be a multiple of 8, below shards.length = {length}, and divide it",
        ),
        (
            "data.skip_batches",
            ranges_overlap(parse_ranges(c["data.skip_batches"])),
            "its ranges must not overlap",
        ),
        ("train.accumulate", batch % accumulate != 0, f"must divide data.global_batch = {batch}"),
        ("masking.random_share", shares > 1 + 1e-9, "mask_share and random_share must not exceed 1 together"),
        (
            "train.steps",
            (c["train.steps"] > 0) == (c["train.epochs"] > 0),
            "set exactly one of train.steps and train.epochs above 0",
        ),
        (
            "model.init",
            c["model.init"] != "stock" and c["train.init_from"] != "",
            "must be stock with train.init_from",
        ),
        (
            "schedule.warmup_steps",
            c["schedule.warmup_steps"] > 0 and c["schedule.warmup_fraction"] > 0,
            "set at most one of warmup_steps and warmup_fraction",
        ),
        (
            "schedule.warmup_steps",
            0 < c["train.steps"] < c["schedule.warmup_steps"],
            f"must be at most train.steps = {c['train.steps']}",
        ),
        (
            "schedule.decay_fraction",
            c["schedule.name"] == "wsd" and c["schedule.decay_fraction"] + warmup > 1 + 1e-9,
            "warmup and decay must fit into the run",
        ),
        (
            "classify.label",
            c["classify.label"] in c["classify.text"],
            "must be another column than classify.text",
        ),
        ("pod.jax_port", c["pod.jax_port"] == c["pod.port"], f"must be another port than pod.port = {c['pod.port']}"),
        (
            "mesh.data",
            [c[f"mesh.{axis}"] for axis in ("data", "fsdp", "tensor")].count(-1) > 1,
            "at most one axis of the mesh can be -1",
        ),
    ]
