"""Rules of the config: each key has one, and each refuses in a sentence that names key, value and what is allowed."""

import pytest
from ml_collections import ConfigDict

from mlm import config as configs
from mlm import config_rules as rules
from mlm.config_rules import GONE, KEYS, MODERNBERT
from mlm.errors import InputError
from mlm.model import families
from tests.support.configs import BASE, refused


def test_every_key_has_a_rule_and_there_are_not_too_many():
    keys = configs.flatten(configs.load(BASE, []))
    assert keys.keys() == KEYS.keys() and not KEYS.keys() & GONE.keys()
    assert len(keys) <= 105, "another key needs a reason in the commit that adds it"


REFUSED = {  # by each rule; those that are missing here take any value of the key's type
    rules.SHARE: ("-0.1", "1.1", "nan"),
    rules.BELOW_ONE: ("-0.1", "1.0", "nan"),
    rules.SOME_SHARE: ("0", "1.1", "nan"),
    rules.ABOVE_ZERO: ("0", "inf", "nan"),
    rules.FROM_ZERO: ("-1", "inf", "nan"),
    rules.COUNT: ("-1",),
    rules.POSITIVE: ("0",),
    rules.SEED: ("-1", str(2**32)),
    rules.PORT: ("80", "65534"),
    rules.WARMUP: ("-0.1", "1.5", "inf", "nan"),
    rules.EVEN: ("0", "127", "-2"),
    rules.START_TIMEOUT: ("0.5", "inf"),
    rules.HEARTBEAT: ("1", "nan"),
    rules.SOURCES: ("()", "web:x", "hf:", "('docstrings', 'text:')", "(3,)"),
    rules.NO_OR_SOURCES: ("web:x", "(3,)"),
    rules.WEIGHTS: ("()", "(0.0,)", "('a',)"),
    rules.GROUPS: ("(3,)", "('',)"),
    rules.FIELD: ("",),
    rules.COLUMN: ("",),
    rules.COLUMNS: ("()", "('',)", "('a', 'b', 'c')", "(1,)"),
    rules.FAMILY: ("", "GPT2", "roberta-prelayernorm"),
    rules.BATCH_STAGES: ("(8,)", "((8,),)", "((0, 1),)", "((8.0, 1),)", "((8, 1, 2),)"),
    rules.MIXTURE: ("('a', 1)", "(('a', 0),)", "(('', 1),)", "a:1"),
    rules.RANGES: ("('5:4',)", "('0:3',)", "('a:b',)", "(3,)"),
    rules.CHECKPOINT: ("runs/a", "@5", "runs/a@x"),
    rules.TABLE: ("csv:", "text:a.txt", "hf:", "another"),
    rules.NAMED_TABLES: ("(('train', 'csv:a.csv'),)", "(('a', 'a.csv'),)", "('a',)"),
    rules.NAMED_FOLDERS: ("('a', 'b')", "(('a', ''),)", "(('train', 'b'),)", "(('a/b', 'c'),)"),
    rules.METRIC: ("('recall',)", "('loss',)"),
    rules.MILESTONES: (
        *("1.5", "('every:0',)", "('1000,2000',)", "('1k',)", "('tokens:1M',)", "('',)"),
        *(f"('words:{words}',)" for words in ("1m", "0", "10M..1M", "1..1M", "")),
    ),
    rules.REPOSITORY: ("another", "me/a/b", "me/a b"),
    rules.LICENSE: ("apache 2", "a/b"),
    rules.LANGUAGES: ("('English',)", "('',)"),
}
OF_KEYS = {
    "tokenizer.vocab_size": ("15", str(2**31)),
    "shards.length": ("7",),
    "classify.length": ("7",),
}


@pytest.mark.parametrize("key", KEYS)
def test_each_rule_names_key_value_and_what_is_allowed(key):
    rule = KEYS[key].rule
    default = configs.flatten(configs.load(BASE, []))[key]
    assert rule[0](default) and not rule[0](None)
    values = OF_KEYS.get(key, REFUSED.get(rule, ()))
    if not values and rule[1].startswith("one of"):
        values = ("another", "")
    for value in values:
        sentence = refused(f"{key}={value}")
        assert sentence.startswith(f"config.{key} = ")
        assert sentence.endswith(f": must be {rule[1]}.")
    assert values or rule in (rules.FLAG, rules.TEXT, rules.GROUP)


# Overrides, separated by spaces; the key that is named with its value; and the keys and numbers that the rule names.
TIED = [
    ("corpus.weights=(1,1)", "corpus.weights", "corpus.sources"),
    ("corpus.sources=('text:a','text:a') corpus.weights=(1,2)", "corpus.sources", "corpus.weights"),
    (
        "corpus.group=source corpus.validation_groups=('a',) corpus.test_groups=('a',)",
        "corpus.test_groups",
        "validation",
    ),
    (
        "corpus.validation_fraction=0.5 corpus.test_fraction=0.5",
        "corpus.test_fraction",
        "corpus.validation_fraction",
    ),
    (
        "corpus.group=document corpus.validation_groups=('a',)",
        "corpus.validation_groups",
        "corpus.group",
    ),
    ("model.heads=7", "model.heads", "model.hidden_size"),
    ("model.local_attention=64", "model.local_attention", "modernbert 128"),
    ("model.global_rope_theta=1e4", "model.global_rope_theta", "modernbert 160000"),
    ("model.local_rope_theta=2e4", "model.local_rope_theta", "modernbert 10000"),
    ("model.family=modernbert model.heads=256", "model.heads", "even"),
    ("shards.length=513", "shards.length", "model.positions = 512"),
    ("data.lanes=128", "shards.count", "data.lanes = 128"),
    ("data.global_batch=252", "data.global_batch", "data.lanes = 8"),
    *(
        (f"data.short_length={short}", "data.short_length", "8 shards.length = 512")
        for short in (96, 4, 512)
    ),
    (
        "train.steps=1000 checkpoint.milestones=('words:1M','every:1001')",
        "checkpoint.milestones",
        "train.steps = 1000",
    ),
    *(
        (
            f"data.batch_stages=({stages},) train.accumulate=16 train.steps=10",
            "data.batch_stages",
            words,
        )
        for stages, words in (
            ("(24,5)", "16 data.lanes train.accumulate"),
            ("(16,6),(272,2)", "data.global_batch = 256"),
            ("(16,6),(32,5)", "train.steps = 10"),
        )
    ),
    ("train.accumulate=3", "train.accumulate", "data.global_batch = 256"),
    ("evaluate.count=independent masking.kind=span", "evaluate.count", "fixed masking.kind = span"),
    ("train.steps=0", "train.steps", "train.epochs train.hours"),
    ("train.steps=0 train.hours=2 schedule.warmup=9", "schedule.warmup", "share train.hours"),
    ("train.hours=2", "train.steps", "train.hours"),
    ("train.branch_from=runs/a@5 train.init_from=runs/b", "train.branch_from", "train.init_from"),
    ("train.branch_from=runs/a@5 model.init=primed", "model.init", "stock train.branch_from"),
    ("model.init=tiled", "model.init", "train.init_from"),
    ("model.init=primed train.init_from=runs/b", "model.init", "stock tiled train.init_from"),
    ("train.steps=50 schedule.warmup=51", "schedule.warmup", "train.steps = 50"),
    (
        "schedule.name=wsd schedule.warmup=0.6 schedule.decay_fraction=0.5",
        "schedule.decay_fraction",
        "warmup",
    ),
    (
        "schedule.name=wsd_sqrt train.steps=100 schedule.warmup=95",
        "schedule.decay_fraction",
        "warmup",
    ),
    ("data.skip_batches=('7:9','1:3','3:5')", "data.skip_batches", "overlap"),
]


@pytest.mark.parametrize(("overrides", "key", "words"), TIED)
def test_rules_that_tie_keys_together(overrides, key, words):
    sentence = refused(*overrides.split())
    assert sentence.startswith(f"config.{key} = ")
    rule = sentence.partition(": ")[2]
    for word in words.replace(" = ", "=").split():
        assert word.replace("=", " = ") in rule


@pytest.mark.parametrize(
    ("task", "override"),
    [
        (configs.PRETRAINING, "shards.length=513"),
        (configs.PRETRAINING, "data.short_length=96"),
        (configs.CLASSIFICATION, "classify.metric=pearson"),
        (configs.CLASSIFICATION, "classify.label=text"),
    ],
)
def test_rules_hold_for_the_task_that_reads_the_key(task, override):
    (other,) = {configs.PRETRAINING, configs.CLASSIFICATION} - {task}
    config = configs.load(BASE, [override], task=other)
    words = f"config.{override.partition('=')[0]} = .*must be"
    with pytest.raises(InputError, match=words):
        configs.load(BASE, [override], task=task)
    with pytest.raises(InputError, match=words):
        configs.replace(config, {}, task=task)


def test_what_just_fits_is_taken():
    configs.load(BASE, ["schedule.name=wsd", "train.steps=100", "schedule.warmup=90"])
    configs.load(BASE, ["train.steps=50", "schedule.warmup=50"])
    configs.load(BASE, ["train.steps=0", "train.epochs=0.5", "schedule.warmup=1000"])
    configs.load(BASE, ["data.lanes=64", "shards.count=64"])


def read_by(family: str) -> set[str]:
    """Returns the numbers of the config's group `model` that change transformers' config of a family if doubled."""
    model = configs.load(BASE, []).model.to_dict()
    special_ids = {"cls": 0, "pad": 1, "sep": 2}

    def made(**changes: float) -> dict:
        settings = ConfigDict(model | changes)
        return families.find(family).make_config(settings, 1100, special_ids).to_dict()

    numbers = {key: value for key, value in model.items() if type(value) in (int, float)}
    return {key for key, value in numbers.items() if made(**{key: 2 * value}) != made()}


def test_a_key_that_only_some_families_read_has_a_rule():
    roberta = read_by("roberta")
    assert roberta >= {"hidden_size", "positions", "layer_norm_eps", "hidden_dropout"}
    assert read_by("modernbert") == roberta | MODERNBERT.keys()
