"""Rules that tie keys of a config together. Each yields the key to name and what is allowed, where it is broken."""

import math
from collections.abc import Iterator

from ml_collections import ConfigDict

from mlm.config_rules import (
    CLASSIFICATION,
    CONCATENATED,
    METRICS,
    MODERNBERT,
    mixture_error,
    parse_ranges,
    ranges_overlap,
)
from mlm.paths import canonical

Broken = Iterator[tuple[str, str]]  # (key, what is allowed)
ROUNDING = 1e-9  # of sums of shares
CORRELATIONS = {"pearson", "spearman"}
ONLY_PRETRAINING = {  # keys that classify needs to have these values
    "train.branch_from": "",
    "train.hours": 0.0,
    "model.implementation": "mlm",
    "model.init": "stock",
}


def across(config: ConfigDict, task: str) -> Broken:
    """Yields the rules that a config breaks, of the keys that the task reads; the first is the one to report."""
    if task == CLASSIFICATION:
        for key, value in ONLY_PRETRAINING.items():
            group, name = key.split(".")
            if config[group][name] != value:
                yield key, f"is for pretraining alone; set it to {value!r}"
        yield from _classify(config)
    else:
        yield from _corpus(config)
        yield from _rows(config)
    for rules in (_model, _batches, _length, _start, _schedule):
        yield from rules(config)


def _corpus(config: ConfigDict) -> Broken:
    corpus = config.corpus
    if len(corpus.weights) != len(corpus.sources):
        yield "corpus.weights", "must have one number for each of corpus.sources"
    if len(set(corpus.sources)) < len(corpus.sources):
        yield (
            "corpus.sources",
            "must name each source once; corpus.weights says how often it is written",
        )
    for key in ("validation_groups", "test_groups"):
        if corpus.group == "document" and corpus[key]:
            yield f"corpus.{key}", "must be () where corpus.group is document"
    if set(corpus.validation_groups) & set(corpus.test_groups):
        yield "corpus.test_groups", "must be other groups than those of corpus.validation_groups"
    if corpus.validation_fraction + corpus.test_fraction >= 1:
        yield "corpus.test_fraction", "with corpus.validation_fraction it must be below 1"


def _model(config: ConfigDict) -> Broken:
    model = config.model
    is_modernbert = config.model.family == "modernbert"
    for key, default in MODERNBERT.items():
        if not is_modernbert and model[key] != default:
            yield f"model.{key}", f"is for family modernbert; leave it at {default:g}"
    if model.hidden_size % model.heads > 0:
        yield "model.heads", "must divide model.hidden_size"
    if is_modernbert and model.hidden_size // model.heads % 2 > 0:
        yield "model.heads", "must leave heads of an even size, as rotary positions need"
    if model.attention == "cudnn" and model.attention_dropout > 0:
        yield (
            "model.attention",
            "has no dropout: set model.attention_dropout to 0, or choose another kernel",
        )
    if model.implementation == "transformers":
        what = "needs model.implementation = mlm"
        if model.family in ("modernbert", "camembert"):
            yield "model.family", what
        if model.attention not in ("auto", "xla"):
            yield "model.attention", what
        if model.remat_feed_forward > 0:
            yield "model.remat_feed_forward", what
        if config.data.isolate_documents:
            yield "data.isolate_documents", what


def _rows(config: ConfigDict) -> Broken:
    data = config.data
    length = config.shards.length
    steps = config.train.steps
    if length > config.model.positions:
        yield "shards.length", f"must be at most model.positions = {config.model.positions}"
    if not data.mixture and config.shards.count < data.lanes:
        yield "shards.count", f"must be at least data.lanes = {data.lanes}"
    unit = math.lcm(data.lanes, config.train.accumulate)
    if any(rows % unit > 0 for rows, _ in data.batch_stages):
        yield (
            "data.batch_stages",
            f"ROWS must be multiples of {unit} (data.lanes, train.accumulate)",
        )
    if any(rows > data.global_batch for rows, _ in data.batch_stages):
        yield "data.batch_stages", f"ROWS must be at most data.global_batch = {data.global_batch}"
    if 0 < steps < sum(count for _, count in data.batch_stages):
        yield "data.batch_stages", f"its STEPS must sum to at most train.steps = {steps}"
    if data.mixture and config.shards.dir:
        yield "data.mixture", "can't be set together with shards.dir; empty one of them"
    if len({canonical(folder) for folder, _ in data.mixture}) < len(data.mixture):
        yield "data.mixture", "names a folder twice; give it one share"
    if error := mixture_error(data.mixture, data.lanes):
        yield "data.mixture", error
    short = data.short_length
    if short > 0 and (short % 8 > 0 or length % short > 0 or short == length):
        yield (
            "data.short_length",
            f"must be a multiple of 8, below shards.length = {length}, and divide it",
        )
    if config.shards.rows != CONCATENATED and (short > 0 or data.mixture):
        yield (
            "shards.rows",
            f"must be {CONCATENATED} with data.short_length and data.mixture (each folder has its own)",
        )
    if ranges_overlap(parse_ranges(data.skip_batches)):
        yield "data.skip_batches", "its ranges must not overlap"
    names = [name for name, _ in config.evaluate.sets]
    if len(set(names)) < len(names):
        yield "evaluate.sets", "each name may be used only once"
    if config.evaluate.count != "fixed" and config.masking.kind != "token":
        yield "evaluate.count", f"must be fixed with masks of masking.kind = {config.masking.kind}"


def _batches(config: ConfigDict) -> Broken:
    data = config.data
    steps = config.train.steps
    if data.global_batch % data.lanes > 0:
        yield "data.global_batch", f"must be a multiple of data.lanes = {data.lanes}"
    if data.global_batch % config.train.accumulate > 0:
        yield "train.accumulate", f"must divide data.global_batch = {data.global_batch}"
    milestones = [
        str(milestone).removeprefix("every:") for milestone in config.checkpoint.milestones
    ]
    if any(int(step) > steps > 0 for step in milestones if step.isdecimal()):
        yield "checkpoint.milestones", f"its steps must be at most train.steps = {steps}"


def _length(config: ConfigDict) -> Broken:
    train = config.train
    counts_hours = train.hours > 0  # a run that has begun has the steps that its hours are, too
    if (train.steps > 0 or counts_hours) + (train.epochs > 0) != 1:
        yield "train.steps", "set exactly one of train.steps, train.epochs and train.hours above 0"
    if counts_hours and config.schedule.warmup >= 1:
        yield "schedule.warmup", "must be a share, below 1, with train.hours"


def _start(config: ConfigDict) -> Broken:
    train = config.train
    init = config.model.init
    if init == "tiled" and not train.init_from:
        yield "model.init", "needs train.init_from, the model to tile"
    if train.branch_from and train.init_from:
        yield "train.branch_from", "can't be set together with train.init_from"
    if init == "primed" and train.init_from:
        yield "model.init", "must be stock or tiled with train.init_from"
    if init != "stock" and train.branch_from:
        yield "model.init", "must be stock with train.branch_from"


def _schedule(config: ConfigDict) -> Broken:
    schedule = config.schedule
    steps = config.train.steps
    if 0 < steps < schedule.warmup:
        yield "schedule.warmup", f"must be at most train.steps = {steps}"
    warmup = schedule.warmup if schedule.warmup < 1 else schedule.warmup / (steps or math.inf)
    if schedule.name in ("wsd", "wsd_sqrt") and schedule.decay_fraction + warmup > 1 + ROUNDING:
        yield "schedule.decay_fraction", "warmup and decay together must not be longer than the run"


def _classify(config: ConfigDict) -> Broken:
    classify = config.classify
    names = [name for name, _ in classify.predict]
    if len(set(names)) < len(names) or (classify.test and "test" in names):
        yield (
            "classify.predict",
            "each name may be used only once, and test only without classify.test",
        )
    metrics = {"regression": CORRELATIONS, "tokens": {"accuracy", "f1"}}
    allowed = metrics.get(classify.kind, set(METRICS) - CORRELATIONS)
    if not allowed.issuperset(classify.metric):
        yield "classify.metric", f"must be of {', '.join(sorted(allowed))} for {classify.kind}"
    if classify.kind == "tokens" and len(classify.text) > 1:
        yield "classify.text", "must name one column, a list of words, for tokens"
    if classify.label in classify.text:
        yield "classify.label", "must be another column than classify.text"
