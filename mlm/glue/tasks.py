"""The tasks of GLUE, three of SuperGLUE, and the protocols by which papers fine-tune on them."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Settings = dict[str, Any]  # of config keys


class Task(NamedTuple):
    """A task as its data set on the Hub has it: columns and classes."""

    text: tuple[str, ...]
    metrics: tuple[str, ...]  # of config.classify.metric; their mean is the score
    labels: tuple[str, ...]  # by index; none of a regression
    tests: tuple[tuple[str, str], ...]  # (split, file that the server takes)
    validation: tuple[str, ...] = ("validation",)  # the first chooses; the score is the mean of all
    names: bool = False  # the server takes the names of classes, not their indices
    suite: str = "glue"


AX = "ax"  # the diagnostic set, which MNLI's model predicts
SENTENCES, NLI = ("sentence1", "sentence2"), ("entailment", "not_entailment")
BOTH = ("f1_positive", "accuracy")
MNLI = Task(
    ("premise", "hypothesis"),
    ("accuracy",),
    ("entailment", "neutral", "contradiction"),
    (("test_matched", "MNLI-m.tsv"), ("test_mismatched", "MNLI-mm.tsv"), (AX, "AX.tsv")),
    ("validation_matched", "validation_mismatched"),
    names=True,
)
TASKS = {  # in the order of the papers' tables; MNLI first, for others start from its model
    "mnli": MNLI,
    "qnli": Task(("question", "sentence"), ("accuracy",), NLI, (("test", "QNLI.tsv"),), names=True),
    "qqp": Task(("question1", "question2"), BOTH, ("not_duplicate", "duplicate"), (("test", "QQP.tsv"),)),
    "rte": Task(SENTENCES, ("accuracy",), NLI, (("test", "RTE.tsv"),), names=True),
    "sst2": Task(("sentence",), ("accuracy",), ("negative", "positive"), (("test", "SST-2.tsv"),)),
    "mrpc": Task(SENTENCES, BOTH, ("not_equivalent", "equivalent"), (("test", "MRPC.tsv"),)),
    "cola": Task(("sentence",), ("matthews",), ("unacceptable", "acceptable"), (("test", "CoLA.tsv"),)),
    "stsb": Task(SENTENCES, ("pearson", "spearman"), (), (("test", "STS-B.tsv"),)),
    "wnli": Task(SENTENCES, ("accuracy",), ("not_entailment", "entailment"), (("test", "WNLI.tsv"),)),
    "boolq": Task(
        ("question", "passage"), ("accuracy",), ("False", "True"), (("test", "BoolQ.jsonl"),), suite="super_glue"
    ),
    "cb": Task(
        ("premise", "hypothesis"),
        ("accuracy", "f1_macro"),
        ("entailment", "contradiction", "neutral"),
        (("test", "CB.jsonl"),),
        suite="super_glue",
    ),
}
GLUE = tuple(name for name, task in TASKS.items() if task.suite == "glue")
# The training and test rows of WNLI share sentences with opposite labels, so that the majority class is better than a
# model, and it is left out of the average (Devlin et al., 2019, 4.1).
MAJORITY = "wnli"
COMMON = {  # of all protocols
    "optimizer.name": "adamw",
    "schedule.name": "linear",
    "train.steps": 0,
    "evaluate.every": 0,  # after each epoch
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "classify.multiple": 32,
}


class Protocol(NamedTuple):
    """How each task is trained."""

    settings: Settings  # of all tasks
    grid: Mapping[str, tuple[Any, ...]]  # key -> values to choose from on the validation rows
    own: Mapping[str, Settings]  # of single tasks
    seeds: Mapping[str, int]  # how many; "" of the tasks without a number of their own
    from_mnli: tuple[str, ...] = ()  # tasks that start from MNLI's model

    def cells(self, task: str, given: Settings) -> Iterator[Settings]:
        """Yields the settings to choose from, without seeds; those `given` take the place of the protocol's."""
        grid = {key: values for key, values in self.grid.items() if key not in given}
        for values in itertools.product(*grid.values()):
            yield COMMON | self.settings | self.own.get(task, {}) | dict(zip(grid, values, strict=True)) | given


def _mosaic(rate: float, decay: float, epochs: float, rows: int) -> Settings:
    keys = ("optimizer.learning_rate", "optimizer.weight_decay", "train.epochs", "data.global_batch")
    return dict(zip(keys, (rate, decay, epochs, rows), strict=True))


ADAM = {"optimizer.b1": 0.9, "optimizer.b2": 0.98, "optimizer.eps": 1e-6, "schedule.warmup_fraction": 0.06}
PROTOCOLS = {
    # Liu et al., 2019, table 10: single models, the median of five seeds.
    "roberta": Protocol(
        ADAM | {"optimizer.weight_decay": 0.1, "train.epochs": 10.0, "classify.length": 512},
        {"optimizer.learning_rate": (1e-5, 2e-5, 3e-5), "data.global_batch": (16, 32)},
        {},
        {"": 5},
    ),
    # MosaicBERT (Portes et al., 2023), as its published code sets them (mosaicml/examples, finetuning_jobs.py).
    "mosaic": Protocol(
        ADAM | {"classify.length": 256},
        {},
        {
            "mnli": _mosaic(5e-5, 5e-6, 3.0, 48),
            "rte": _mosaic(1e-5, 1e-5, 3.0, 16),
            "qqp": _mosaic(3e-5, 3e-6, 5.0, 16),
            "cola": _mosaic(5e-5, 5e-6, 10.0, 32),
            "mrpc": _mosaic(8e-5, 8e-6, 10.0, 32),
            "qnli": _mosaic(1e-5, 1e-6, 10.0, 16),
            "sst2": _mosaic(3e-5, 3e-6, 3.0, 16),
            "stsb": _mosaic(3e-5, 3e-6, 10.0, 32),
            "boolq": _mosaic(1e-5, 1e-5, 3.0, 16),  # these two are not in it: as RTE
            "cb": _mosaic(1e-5, 1e-5, 3.0, 16),
        },
        {"": 1, "rte": 5, "stsb": 5, "mrpc": 5, "sst2": 3, "cola": 4},
        ("rte", "mrpc", "stsb"),
    ),
    # One rate and one seed, to see whether a model learns at all.
    "quick": Protocol(
        ADAM | _mosaic(5e-5, 0.01, 3.0, 32) | {"classify.length": 128},
        {},
        {},
        {"": 1},
    ),
}
