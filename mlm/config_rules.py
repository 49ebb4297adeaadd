"""Every key of a config: its rule, and whether a run that goes on may have another value of it.

A new key is a line in configs/base.py (default and unit) and a line in KEYS. Rules that tie keys together stand in
mlm/config_across.py; mlm/config.py applies both.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mlm.paths import expand, expand_source

Check = Callable[[Any], bool]
Rule = tuple[Check, str]  # the second says what is allowed
Range = tuple[int, int]  # of batches, both ends included

SHARE_ROUNDING = 1e-6  # of a share of data.mixture: 0.333333 is a third


def parse_ranges(texts: Iterable[str]) -> list[Range]:
    """Returns the ranges "A:B" as numbers, sorted."""
    return sorted(tuple(map(int, text.split(":"))) for text in texts)


def is_range(value: object) -> bool:
    """Returns whether a value is a range "A:B"."""
    if type(value) is not str or not re.fullmatch("[1-9][0-9]*:[1-9][0-9]*", value):
        return False
    ((first, last),) = parse_ranges([value])
    return first <= last


def ranges_overlap(ranges: list[Range]) -> bool:
    """Returns whether any batch is in two of the sorted ranges."""
    return any(last >= first for (_, last), (first, _) in itertools.pairwise(ranges))


def parse_words(text: str) -> range:
    """Returns the numbers of words of "10M", or of "10M..100M": 10M, 20M and so on; raises ValueError for others."""
    match = re.fullmatch(r"([1-9][0-9]*)([kMB]?)(?:\.\.([1-9][0-9]*)([kMB]?))?", text)
    if match is None:
        raise ValueError(text)
    factors = {"": 1, "k": 1_000, "M": 1_000_000, "B": 1_000_000_000}
    first = int(match[1]) * factors[match[2]]
    return range(first, (int(match[3]) * factors[match[4]] if match[3] else first) + 1, first)


def is_milestone(value: object) -> bool:
    """Returns whether a config value is one of checkpoint.milestones: a step, "every:STEPS" or "words:COUNT"."""
    text = str(value) if type(value) in (int, str) else ""
    if not text.startswith("words:"):
        return re.fullmatch(r"0|(every:)?[1-9][0-9]{0,17}", text) is not None
    try:
        return len(parse_words(text.removeprefix("words:"))) in range(1, 1001)
    except ValueError:
        return False


def lanes_of_shares(shares: Sequence[float], lanes: int) -> list[int]:
    """Returns how many of the lanes each folder of a mixture has, at least one: as near to its share as they come."""
    held = [1] * len(shares)
    for _ in range(lanes - len(shares)):
        missing = [share * lanes - count for share, count in zip(shares, held, strict=True)]
        held[missing.index(max(missing))] += 1
    return held


def mixture_error(mixture: tuple[tuple[str, float], ...], lanes: int) -> str:
    """Returns what is wrong with the shares of a mixture, "" if nothing is: whole lanes must hold them."""
    shares = [share for _, share in mixture]
    if not shares:
        return ""
    if abs(math.fsum(shares) - 1) > SHARE_ROUNDING * len(shares):
        return f"its shares must sum to 1, they sum to {math.fsum(shares):g}"
    held = lanes_of_shares(shares, lanes)
    if sum(held) > lanes:
        return f"has more folders than data.lanes = {lanes}; set data.lanes higher"
    if all(
        abs(count / lanes - share) <= SHARE_ROUNDING
        for count, share in zip(held, shares, strict=True)
    ):
        return ""
    nearest = ", ".join(f"{count / lanes:.6g}" for count in held)
    return f"its shares are not whole lanes of data.lanes = {lanes}; the nearest that fit are {nearest}"


def _one_of(*names: str) -> Rule:
    return (lambda v: v in names), "one of " + ", ".join(names)


def _number(check: Check, allowed: str) -> Rule:
    # of whole numbers that are no float, too
    return (lambda v: type(v) in (int, float) and abs(v) < math.inf and check(v)), allowed


def whole(low: int, high: float = math.inf, end: str = "up") -> Rule:
    """Returns the rule of a whole number from `low` up, and below `high`."""
    return (lambda v: type(v) is int and low <= v < high), f"a whole number from {low} {end}"


def matching(pattern: str) -> Check:
    """Returns the check for a text that matches a pattern as a whole."""
    return lambda v: type(v) is str and re.fullmatch(pattern, v) is not None


def _tuple_of(check: Check, *, least: int = 1, limit: float = math.inf) -> Check:
    return lambda v: type(v) is tuple and least <= len(v) <= limit and all(map(check, v))


def _pairs_of(first: Check, second: Check) -> Check:
    return _tuple_of(
        lambda v: type(v) is tuple and len(v) == 2 and first(v[0]) and second(v[1]), least=0
    )


SHARE = _number(lambda v: 0 <= v <= 1, "a number in [0, 1]")
BELOW_ONE = _number(lambda v: 0 <= v < 1, "a number in [0, 1)")
SOME_SHARE = _number(lambda v: 0 < v <= 1, "a number in (0, 1]")
ABOVE_ZERO = _number(lambda v: v > 0, "a finite number above 0")
FROM_ZERO = _number(lambda v: v >= 0, "a finite number from 0 up")
START_TIMEOUT = _number(lambda v: 1 <= v <= 86_400, "a number in [1, 86400]")
HEARTBEAT = _number(lambda v: 2 <= v <= 3_600, "a number in [2, 3600]")
WARMUP = _number(
    lambda v: 0 <= v < 1 or (v >= 1 and v == int(v)),
    "a share of all steps below 1, or a whole number of steps",
)
FLAG = (lambda v: type(v) is bool), "true or false"
TEXT = (lambda v: type(v) is str), "a string"
SOME_TEXT = matching(r"(?s).+")
# of rows to predict; splits are taken
NAME = matching(r"(?a)(?!(train|validation)$)[A-Za-z0-9][\w.-]*")
SET_NAME = matching(r"(?a)(?!(train|validation|test)$)[A-Za-z0-9][\w.-]*")  # of a validation set
PORT = whole(1024, 65_534, "to 65,533")
SOURCES = (
    _tuple_of(matching(r"docstrings|(text|jsonl|hf|tfds):.+")),
    "a tuple of docstrings, text:GLOB, jsonl:GLOB[#FIELD], hf:NAME[:CONFIG][#SPLIT] or tfds:NAME[#SPLIT]",
)
GROUPS = (_tuple_of(SOME_TEXT, least=0), "a tuple of names")
TABLE_SOURCE = matching(r"(csv|jsonl|conll|hf|tfds):.+")
TABLE = (
    lambda v: v == "" or TABLE_SOURCE(v),
    "csv:FILE, jsonl:FILE, conll:FILE, hf:NAME[:CONFIG][#SPLIT], tfds:NAME[#SPLIT] or empty",
)
ROTARY_BASES = ("global_rope_theta", "local_rope_theta")
MODERNBERT = {"local_attention": 128} | dict(zip(ROTARY_BASES, (160_000.0, 10_000.0), strict=True))
SHARD_ROWS = (CONCATENATED, LINES, DOCUMENTS) = ("concatenated", "lines", "documents")
FAMILIES = ("roberta", "xlm_roberta", "camembert", "roberta_prelayernorm", "bert", "modernbert")
METRICS = ("accuracy", "f1", "f1_macro", "f1_positive", "matthews", "pearson", "spearman")
SEED = whole(0, 2**32, "to 2^32 - 1")
COUNT = whole(0)
POSITIVE = whole(1)
WEIGHTS = (_tuple_of(ABOVE_ZERO[0]), "a tuple of numbers above 0")
FIELD = (SOME_TEXT, "the name of a field")
GROUP = (TEXT[0], "document, file, or the name of a field")
NO_OR_SOURCES = (lambda v: v == () or SOURCES[0](v), f"empty, or {SOURCES[1]}")
BATCH_STAGES = (
    _pairs_of(whole(1)[0], whole(1)[0]),
    "a tuple of (ROWS, STEPS), whole numbers from 1 up",
)
MIXTURE = (
    _pairs_of(SOME_TEXT, ABOVE_ZERO[0]),
    'a tuple of ("FOLDER", SHARE), shares above 0',
)
RANGES = (_tuple_of(is_range, least=0), 'a tuple of "A:B", whole numbers from 1 up, A at most B')
FAMILY = _one_of(*FAMILIES)
EVEN = (lambda v: type(v) is int and v > 0 and v % 2 == 0, "an even number from 2 up")
CHECKPOINT = matching(r"|.+@[0-9]{1,18}"), "WORKDIR@STEP or empty"
COLUMNS = (_tuple_of(SOME_TEXT, limit=2), "a tuple of one or two names of columns")
COLUMN = (SOME_TEXT, "the name of a column")
NAMED_TABLES = (
    _pairs_of(NAME, TABLE_SOURCE),
    'a tuple of ("NAME", SOURCE), the sources as of classify.test',
)
METRIC = (_tuple_of(METRICS.__contains__, least=0), f"a tuple of {', '.join(METRICS)}")
NAMED_FOLDERS = (
    _pairs_of(SET_NAME, SOME_TEXT),
    'a tuple of ("NAME", "FOLDER"); NAME: no split, A-Z 0-9 . _ -',
)
MILESTONES = (
    _tuple_of(is_milestone, least=0),
    'a tuple of steps ("0", "1000"), "every:STEPS", "words:10M" (k, M or B) and "words:10M..100M" (1,000 at most)',
)
REPOSITORY = matching(r"(?a)|[\w.-]+/[\w.-]+"), "USER/NAME or empty"
LICENSE = (
    matching(r"(?a)[\w.-]*"),
    "a license as the Hub spells it, such as apache-2.0, or empty",
)
LANGUAGES = (
    _tuple_of(matching(r"[a-z]{2,3}(-[A-Za-z]+)?"), least=0),
    'a tuple of codes of languages ("en")',
)

PRETRAINING = "pretraining"
CLASSIFICATION = "classification"  # tasks
# Whether a run that goes on may have another value of a key:
# yes: it changes no number, or by rounding alone, or is compared by a fingerprint of the data
RESUME = "resume"
# in a new workdir that goes on from a checkpoint (train.branch_from), but not on resume
BRANCH = "branch"
NEVER = "never"  # the state of the run would not fit, or mean something else


class Key(NamedTuple):
    """What there is to say about a key but its default and unit, which stand in configs/base.py."""

    rule: Rule
    may_change: str  # RESUME, BRANCH or NEVER
    expand: Callable[[str], str] | None = None  # of paths and sources: ~ is the home folder


KEYS: dict[str, Key] = {
    "corpus.sources": Key(SOURCES, RESUME, expand_source),
    "corpus.weights": Key(WEIGHTS, RESUME),
    "corpus.field": Key(FIELD, RESUME),
    "corpus.streaming": Key(FLAG, RESUME),
    "corpus.group": Key(GROUP, RESUME),
    "corpus.validation_fraction": Key(BELOW_ONE, RESUME),
    "corpus.validation_groups": Key(GROUPS, RESUME),
    "corpus.test_fraction": Key(BELOW_ONE, RESUME),
    "corpus.test_groups": Key(GROUPS, RESUME),
    "corpus.keep_out": Key(NO_OR_SOURCES, RESUME, expand_source),
    "corpus.max_documents": Key(COUNT, RESUME),
    "tokenizer.path": Key(TEXT, RESUME, expand),
    "tokenizer.kind": Key(_one_of("unigram", "bpe", "wordpiece"), RESUME),
    "tokenizer.vocab_size": Key(whole(16, 2**31), RESUME),
    "tokenizer.sample_megabytes": Key(ABOVE_ZERO, RESUME),
    "tokenizer.lowercase": Key(FLAG, RESUME),
    "shards.dir": Key(TEXT, RESUME, expand),
    "shards.length": Key(whole(8), RESUME),
    "shards.rows": Key(_one_of(*SHARD_ROWS), RESUME),
    "shards.count": Key(POSITIVE, RESUME),
    "shards.validation_count": Key(POSITIVE, RESUME),
    "shards.workers": Key(COUNT, RESUME),
    "data.seed": Key(SEED, BRANCH),
    "data.global_batch": Key(POSITIVE, BRANCH),
    "data.batch_stages": Key(BATCH_STAGES, BRANCH),
    "data.lanes": Key(POSITIVE, BRANCH),
    "data.mixture": Key(MIXTURE, RESUME, expand),
    "data.isolate_documents": Key(FLAG, BRANCH),
    "data.short_length": Key(COUNT, BRANCH),
    "data.skip_batches": Key(RANGES, RESUME),
    "masking.seed": Key(SEED, BRANCH),
    "masking.kind": Key(_one_of("token", "word", "span"), BRANCH),
    "masking.rate": Key(SOME_SHARE, BRANCH),
    "masking.mask_share": Key(SHARE, BRANCH),
    "model.family": Key(FAMILY, NEVER),
    "model.implementation": Key(_one_of("mlm", "transformers"), NEVER),
    "model.hidden_size": Key(POSITIVE, NEVER),
    "model.layers": Key(POSITIVE, NEVER),
    "model.heads": Key(POSITIVE, NEVER),
    "model.intermediate_size": Key(POSITIVE, NEVER),
    "model.positions": Key(POSITIVE, BRANCH),
    "model.local_attention": Key(EVEN, NEVER),
    "model.global_rope_theta": Key(ABOVE_ZERO, BRANCH),
    "model.local_rope_theta": Key(ABOVE_ZERO, BRANCH),
    "model.activation": Key(_one_of("gelu", "gelu_new", "relu", "silu"), NEVER),
    "model.hidden_dropout": Key(BELOW_ONE, BRANCH),
    "model.attention_dropout": Key(BELOW_ONE, BRANCH),
    "model.layer_norm_eps": Key(ABOVE_ZERO, NEVER),
    "model.init": Key(_one_of("stock", "primed", "tiled"), BRANCH),
    "model.init_stddev": Key(ABOVE_ZERO, BRANCH),
    "model.dtype": Key(_one_of("float32", "bfloat16"), BRANCH),
    "model.attention": Key(_one_of("auto", "xla", "fused", "cudnn"), BRANCH),
    "model.remat": Key(FLAG, RESUME),
    "model.remat_feed_forward": Key(COUNT, RESUME),
    "optimizer.name": Key(
        _one_of("adamw", "stable_adamw", "lamb", "lion", "adafactor", "muon"), NEVER
    ),
    "optimizer.learning_rate": Key(ABOVE_ZERO, BRANCH),
    "optimizer.b1": Key(BELOW_ONE, BRANCH),
    "optimizer.b2": Key(BELOW_ONE, BRANCH),
    "optimizer.eps": Key(ABOVE_ZERO, BRANCH),
    "optimizer.weight_decay": Key(FROM_ZERO, BRANCH),
    "optimizer.clip_norm": Key(FROM_ZERO, BRANCH),
    "optimizer.muon_iterations": Key(POSITIVE, BRANCH),
    "optimizer.ema_decay": Key(BELOW_ONE, BRANCH),
    "schedule.name": Key(
        _one_of("linear", "cosine", "inverse_sqrt", "wsd", "wsd_sqrt", "constant"), BRANCH
    ),
    "schedule.warmup": Key(WARMUP, BRANCH),
    "schedule.decay_fraction": Key(SHARE, BRANCH),
    "schedule.final_fraction": Key(SHARE, BRANCH),
    "train.steps": Key(COUNT, BRANCH),
    "train.epochs": Key(FROM_ZERO, BRANCH),
    "train.hours": Key(FROM_ZERO, BRANCH),
    "train.seed": Key(SEED, BRANCH),
    "train.init_from": Key(TEXT, BRANCH, expand),
    "train.branch_from": Key(CHECKPOINT, BRANCH, expand),
    "train.accumulate": Key(POSITIVE, RESUME),
    "classify.train": Key(TABLE, RESUME, expand_source),
    "classify.validation": Key(TABLE, RESUME, expand_source),
    "classify.test": Key(TABLE, RESUME, expand_source),
    "classify.text": Key(COLUMNS, BRANCH),
    "classify.label": Key(COLUMN, BRANCH),
    "classify.predict": Key(NAMED_TABLES, RESUME, expand_source),
    "classify.metric": Key(METRIC, BRANCH),
    "classify.kind": Key(_one_of("classes", "regression", "tokens"), BRANCH),
    "classify.length": Key(whole(8), BRANCH),
    "mesh.fsdp": Key(POSITIVE, RESUME),
    "mesh.tensor": Key(POSITIVE, RESUME),
    "evaluate.every": Key(COUNT, RESUME),
    "evaluate.batch": Key(POSITIVE, RESUME),
    "evaluate.sets": Key(NAMED_FOLDERS, RESUME, expand),
    "evaluate.count": Key(_one_of("fixed", "independent"), BRANCH),
    "checkpoint.every": Key(COUNT, RESUME),
    "checkpoint.keep": Key(POSITIVE, RESUME),
    "checkpoint.milestones": Key(MILESTONES, RESUME),
    "checkpoint.on_damage": Key(_one_of("stop", "fallback"), RESUME),
    "log.every": Key(POSITIVE, RESUME),
    "log.norms_every": Key(COUNT, RESUME),
    "log.tensorboard": Key(FLAG, RESUME),
    "log.wandb": Key(TEXT, RESUME),
    "log.profile_start": Key(COUNT, RESUME),
    "hub.name": Key(REPOSITORY, RESUME),
    "hub.license": Key(LICENSE, RESUME),
    "hub.language": Key(LANGUAGES, RESUME),
    "pod.port": Key(PORT, RESUME),
    "pod.start_timeout": Key(START_TIMEOUT, RESUME),
    "pod.heartbeat": Key(HEARTBEAT, RESUME),
    "pod.hang": Key(FROM_ZERO, RESUME),
}


class Gone(NamedTuple):
    """A key of older versions."""

    value: Any  # what the code does today; ... if no value is that
    instead: str


GONE = {
    "log.profile_steps": Gone(5, "a trace holds five steps from log.profile_start on"),
    "masking.static": Gone(
        False,
        "masks are drawn anew in each epoch; a class with its own make_masking can leave the epoch out",
    ),
    "model.vocab_multiple": Gone(128, "the embedding table is padded to a multiple of 128"),
    "schedule.warmup_fraction": Gone(..., "schedule.warmup, below 1, is a share of all steps"),
    "schedule.warmup_steps": Gone(..., "schedule.warmup, from 1 on, counts steps"),
    "train.init_tiled": Gone(False, "model.init = tiled"),
    "corpus.near_duplicates": Gone(0.0, "datatrove, on the texts before"),
    "hub.every": Gone("evaluation", "pushes follow evaluations, see evaluate.every"),
    "pod.engine_port": Gone(8476, "the engine's port is two above pod.port"),
    "train.replay": Gone(
        "",
        "a run of train.hours is one of train.steps once it has begun, as its config.json says",
    ),
    "data.short_share": Gone(0.9, "the first nine tenths of the steps read short rows"),
    "masking.end_rate": Gone(0.0, "masking.rate holds to the end; train.branch_from changes it"),
    "masking.random_share": Gone(..., "half of what masking.mask_share leaves"),
    "masking.longest": Gone(10, "words and spans have 10 at most; a make_masking can set others"),
    "masking.span_p": Gone(0.2, "spans are SpanBERT's; a make_masking can set another p"),
    "model.global_every": Gone(3, "every third layer sees the whole row, as in ModernBERT"),
    "train.guard_limit": Gone(10, "the run stops after 10 steps in a row that are not finite"),
    "mesh.data": Gone(-1, "all devices that mesh.fsdp and mesh.tensor leave"),
    "evaluate.seed": Gone(0, "the masks of evaluation depend on the record alone"),
    "evaluate.draws": Gone(1, "evaluate --draws=N"),
}
NAMES_ELSEWHERE = {  # of transformers' scripts and others: what the key is called here
    "lr": "optimizer.learning_rate",
    "batch_size": "data.global_batch",
    "train_batch_size": "data.global_batch",
    "per_device_train_batch_size": "data.global_batch",
    "per_device_eval_batch_size": "evaluate.batch",
    "gradient_accumulation_steps": "train.accumulate",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "warmup_ratio": "schedule.warmup",
    "lr_scheduler_type": "schedule.name",
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.clip_norm",
    "mlm_probability": "masking.rate",
    "max_seq_length": "shards.length",
    "model_name_or_path": "train.init_from",
    "num_hidden_layers": "model.layers",
    "num_attention_heads": "model.heads",
    "max_position_embeddings": "model.positions",
    "dropout": "model.hidden_dropout",
    "eval_steps": "evaluate.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "log.every",
}
