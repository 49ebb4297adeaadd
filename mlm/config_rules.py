"""What each key of a config may be, by itself; mlm/config.py applies these rules."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Check = Callable[[Any], bool]
Rule = tuple[Check, str]  # the second says what is allowed
Range = tuple[int, int]  # of batches, both ends included

SHARE_ROUNDING = 1e-6  # of a share of data.mixture: 0.333333 is a third


def parse_ranges(texts: Iterable[str]) -> list[Range]:
    """Returns the ranges "A:B" as numbers, sorted; raises ValueError for anything else."""
    matches = [re.fullmatch(r"([1-9][0-9]*):([1-9][0-9]*)", text) for text in texts]
    ranges = [(int(match[1]), int(match[2])) for match in matches if match]
    if len(ranges) < len(matches) or any(first > last for first, last in ranges):
        raise ValueError(texts)
    return sorted(ranges)


def is_ranges(value: object) -> bool:
    """Returns whether a config value is a tuple of ranges."""
    try:
        return type(value) is tuple and parse_ranges(value) is not None
    except (ValueError, TypeError):
        return False


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
        return re.fullmatch(r"(every:)?[1-9][0-9]{0,17}", text) is not None
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
    if all(abs(count / lanes - share) <= SHARE_ROUNDING for count, share in zip(held, shares, strict=True)):
        return ""
    nearest = ", ".join(f"{count / lanes:.6g}" for count in held)
    return f"its shares are not whole lanes of data.lanes = {lanes}; the nearest that fit are {nearest}"


def _one_of(*names: str) -> Rule:
    return (lambda v: v in names), "one of " + ", ".join(names)


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf  # of whole numbers that are no float, too


def whole(low: int, high: float = math.inf, end: str = "up") -> Rule:
    """Returns the rule of a whole number from `low` up, and below `high`."""
    return (lambda v: type(v) is int and low <= v < high), f"a whole number from {low} {end}"


def matching(pattern: str) -> Check:
    """Returns the check for a text that matches a pattern as a whole."""
    return lambda v: type(v) is str and re.fullmatch(pattern, v) is not None


def _tuple_of(check: Check, *, least: int = 1, limit: float = math.inf) -> Check:
    return lambda v: type(v) is tuple and least <= len(v) <= limit and all(map(check, v))


def _pairs_of(first: Check, second: Check) -> Check:
    return _tuple_of(lambda v: type(v) is tuple and len(v) == 2 and first(v[0]) and second(v[1]), least=0)


SHARE: Rule = (lambda v: _finite(v) and 0 <= v <= 1), "a number in [0, 1]"
BELOW_ONE: Rule = (lambda v: _finite(v) and 0 <= v < 1), "a number in [0, 1)"
SOME_SHARE: Rule = (lambda v: _finite(v) and 0 < v <= 1), "a number in (0, 1]"
ABOVE_ZERO: Rule = (lambda v: _finite(v) and v > 0), "a finite number above 0"
FROM_ZERO: Rule = (lambda v: _finite(v) and v >= 0), "a finite number from 0 up"
FLAG: Rule = (lambda v: type(v) is bool), "true or false"
TEXT: Rule = (lambda v: type(v) is str), "a string"
SOME_TEXT = matching(r"(?s).+")
NAME = matching(r"(?a)(?!(train|validation)$)[A-Za-z0-9][\w.-]*")  # of rows to predict; splits are taken
SET_NAME = matching(r"(?a)(?!(train|validation|test)$)[A-Za-z0-9][\w.-]*")  # of a validation set
PORT: Rule = (
    lambda v: type(v) is int and 1024 <= v <= 65_535 and v != 8471,
    "a whole number from 1024 to 65,535, but not 8471, which libtpu uses",
)
AXIS: Rule = (lambda v: type(v) is int and (v == -1 or v >= 1)), "a whole number from 1 up, or -1 for all that are left"
SOURCES: Rule = (
    _tuple_of(matching(r"docstrings|(text|jsonl|hf|tfds):.+")),
    "a tuple of docstrings, text:GLOB, jsonl:GLOB[#FIELD], hf:NAME[:CONFIG][#SPLIT] or tfds:NAME[#SPLIT]",
)
GROUPS: Rule = (_tuple_of(SOME_TEXT, least=0), "a tuple of names")
TABLE_SOURCE = matching(r"(csv|jsonl|conll|hf|tfds):.+")
TABLE: Rule = (
    lambda v: v == "" or TABLE_SOURCE(v),
    "csv:FILE, jsonl:FILE, conll:FILE, hf:NAME[:CONFIG][#SPLIT], tfds:NAME[#SPLIT] or empty",
)
ROTARY_BASES = ("global_rope_theta", "local_rope_theta")
MODERNBERT = {"local_attention": 128, "global_every": 3} | dict(zip(ROTARY_BASES, (160_000.0, 10_000.0), strict=True))
SHARD_ROWS = (CONCATENATED, LINES, DOCUMENTS) = ("concatenated", "lines", "documents")
FAMILIES = ("roberta", "xlm_roberta", "camembert", "roberta_prelayernorm", "bert", "modernbert")
METRICS = ("accuracy", "f1", "f1_macro", "f1_positive", "matthews", "pearson", "spearman")

KEYS_OF: dict[Rule, str] = {  # rules that several keys share
    TEXT: "tokenizer.path shards.dir train.init_from train.replay log.wandb",
    FLAG: """corpus.streaming tokenizer.lowercase data.isolate_documents masking.static model.remat train.init_tiled
        log.tensorboard""",
    whole(1): """shards.count shards.validation_count data.global_batch data.lanes model.hidden_size model.layers
        model.heads model.intermediate_size model.positions model.global_every model.vocab_multiple train.accumulate
        train.guard_limit optimizer.muon_iterations evaluate.batch evaluate.draws checkpoint.keep log.every
        log.profile_steps""",
    whole(0): """corpus.max_documents shards.workers data.short_length model.remat_feed_forward schedule.warmup_steps
        train.steps evaluate.every checkpoint.every log.norms_every log.profile_start""",
    whole(0, 2**32, "to 2^32 - 1"): "data.seed masking.seed train.seed evaluate.seed",
    SHARE: """masking.end_rate masking.mask_share masking.random_share schedule.warmup_fraction
        schedule.decay_fraction schedule.final_fraction""",
    BELOW_ONE: """corpus.validation_fraction corpus.test_fraction model.hidden_dropout model.attention_dropout
        optimizer.b1 optimizer.b2 optimizer.ema_decay""",
    GROUPS: "corpus.validation_groups corpus.test_groups",
    ABOVE_ZERO: """tokenizer.sample_megabytes model.layer_norm_eps model.init_stddev model.global_rope_theta
        model.local_rope_theta optimizer.learning_rate optimizer.eps""",
    FROM_ZERO: "optimizer.weight_decay optimizer.clip_norm train.epochs train.hours pod.hang",
    PORT: "pod.port pod.engine_port",
    AXIS: "mesh.data mesh.fsdp mesh.tensor",
    TABLE: "classify.train classify.validation classify.test",
    whole(8): "shards.length classify.length",
    SOME_SHARE: "data.short_share masking.rate masking.span_p",
}
RULES: dict[str, Rule] = {key: rule for rule, keys in KEYS_OF.items() for key in keys.split()} | {
    "corpus.sources": SOURCES,
    "corpus.weights": (_tuple_of(ABOVE_ZERO[0]), "a tuple of numbers above 0"),
    "corpus.keep_out": (lambda v: v == () or SOURCES[0](v), f"empty, or {SOURCES[1]}"),
    "corpus.near_duplicates": (lambda v: _finite(v) and (v == 0 or 0.7 <= v < 1), "0, or a number in [0.7, 1)"),
    "corpus.field": (SOME_TEXT, "the name of a field"),
    "corpus.group": (TEXT[0], "document, file, or the name of a field"),
    "shards.rows": _one_of(*SHARD_ROWS),
    "tokenizer.kind": _one_of("unigram", "bpe", "wordpiece"),
    "tokenizer.vocab_size": whole(16, 2**31),
    "data.batch_stages": (_pairs_of(whole(1)[0], whole(1)[0]), "a tuple of (ROWS, STEPS), whole numbers from 1 up"),
    "data.skip_batches": (is_ranges, 'a tuple of "A:B", whole numbers from 1 up, A at most B'),
    "data.mixture": (_pairs_of(SOME_TEXT, ABOVE_ZERO[0]), 'a tuple of ("FOLDER", SHARE), shares above 0'),
    "evaluate.sets": (_pairs_of(SET_NAME, SOME_TEXT), 'a tuple of ("NAME", "FOLDER"); NAME: no split, A-Z 0-9 . _ -'),
    "evaluate.count": _one_of("fixed", "independent"),
    "masking.kind": _one_of("token", "word", "span"),
    "masking.longest": whole(1, 1025, "to 1,024"),
    "model.family": (matching(r"[a-z0-9_]+"), f"one of {', '.join(FAMILIES)}, or another of transformers' families"),
    "model.implementation": _one_of("mlm", "transformers"),
    "model.local_attention": (lambda v: type(v) is int and v > 0 and v % 2 == 0, "an even number from 2 up"),
    "model.activation": _one_of("gelu", "gelu_new", "relu", "silu"),
    "model.init": _one_of("stock", "primed"),
    "model.dtype": _one_of("float32", "bfloat16"),
    "model.attention": _one_of("auto", "xla", "fused", "cudnn"),
    "optimizer.name": _one_of("adamw", "stable_adamw", "lamb", "lion", "adafactor", "muon"),
    "schedule.name": _one_of("linear", "cosine", "inverse_sqrt", "wsd", "wsd_sqrt", "constant"),
    "classify.text": (_tuple_of(SOME_TEXT, limit=2), "a tuple of one or two names of columns"),
    "classify.label": (SOME_TEXT, "the name of a column"),
    "classify.kind": _one_of("classes", "regression", "tokens"),
    "classify.predict": (_pairs_of(NAME, TABLE_SOURCE), 'a tuple of ("NAME", SOURCE), the sources as of classify.test'),
    "classify.metric": (_tuple_of(METRICS.__contains__, least=0), f"a tuple of {', '.join(METRICS)}"),
    "checkpoint.milestones": (
        _tuple_of(is_milestone, least=0),
        'a tuple of steps ("1000"), "every:STEPS", "words:10M" (k, M or B) and "words:10M..100M" (1,000 at most)',
    ),
    "train.branch_from": (matching(r"|.+@[0-9]{1,18}"), "WORKDIR@STEP or empty"),
    "checkpoint.on_damage": _one_of("stop", "fallback"),
    "hub.name": (matching(r"(?a)|[\w.-]+/[\w.-]+"), "USER/NAME or empty"),
    "hub.every": (matching(r"evaluation|[1-9][0-9]{0,17}"), 'evaluation, or a number of steps as a string ("5000")'),
    "pod.start_timeout": (lambda v: _finite(v) and 1 <= v <= 86_400, "a number in [1, 86400]"),
    "pod.heartbeat": (lambda v: _finite(v) and 2 <= v <= 3_600, "a number in [2, 3600]"),
}
