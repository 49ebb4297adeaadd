"""The tasks of GLUE, two of SuperGLUE, and the protocols by which papers fine-tune on them."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlm import config as configs
from mlm.errors import InputError

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
FOLDER = configs.BASE.parent / "glue"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))  # of the protocols
SENTENCES = ("sentence1", "sentence2")
NLI = ("entailment", "not_entailment")
CB = ("entailment", "contradiction", "neutral")
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
    "qqp": Task(
        ("question1", "question2"), BOTH, ("not_duplicate", "duplicate"), (("test", "QQP.tsv"),)
    ),
    "rte": Task(SENTENCES, ("accuracy",), NLI, (("test", "RTE.tsv"),), names=True),
    "sst2": Task(("sentence",), ("accuracy",), ("negative", "positive"), (("test", "SST-2.tsv"),)),
    "mrpc": Task(SENTENCES, BOTH, ("not_equivalent", "equivalent"), (("test", "MRPC.tsv"),)),
    "cola": Task(
        ("sentence",), ("matthews",), ("unacceptable", "acceptable"), (("test", "CoLA.tsv"),)
    ),
    "stsb": Task(SENTENCES, ("pearson", "spearman"), (), (("test", "STS-B.tsv"),)),
    "wnli": Task(
        SENTENCES, ("accuracy",), ("not_entailment", "entailment"), (("test", "WNLI.tsv"),)
    ),
    "boolq": Task(
        ("question", "passage"),
        ("accuracy",),
        ("False", "True"),
        (("test", "BoolQ.jsonl"),),
        suite="super_glue",
    ),
    "cb": Task(
        MNLI.text, ("accuracy", "f1_macro"), CB, (("test", "CB.jsonl"),), suite="super_glue"
    ),
}
GLUE = tuple(name for name, task in TASKS.items() if task.suite == "glue")
# The training and test rows of WNLI share sentences with opposite labels, so that the majority
# class is better than a model, and it is left out of the average (Devlin et al., 2019, 4.1).
MAJORITY = "wnli"
COMMON = {  # of all protocols
    "optimizer.name": "adamw",
    "schedule.name": "linear",
    "train.steps": 0,
    "evaluate.every": 0,  # after each epoch
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
}


class Protocol(NamedTuple):
    """How each task is trained: what `get_protocol` of a file in configs/glue/ returns."""

    settings: Settings  # of all tasks
    seeds: Mapping[str, int]  # how many; "" of the tasks without a number of their own
    grid: Mapping[str, tuple[Any, ...]] = {}  # key -> values to choose from on the validation rows
    own: Mapping[str, Settings] = {}  # of single tasks
    from_mnli: tuple[str, ...] = ()  # tasks that start from MNLI's model

    def cells(self, task: str, overrides: Settings) -> Iterator[Settings]:
        """Yields the settings to choose from, without seeds.

        `overrides` take the place of the protocol's.
        """
        grid = {key: values for key, values in self.grid.items() if key not in overrides}
        for values in itertools.product(*grid.values()):
            yield (
                COMMON
                | self.settings
                | self.own.get(task, {})
                | dict(zip(grid, values, strict=True))
                | overrides
            )


def load_protocol(name: str) -> Protocol:
    """Returns the protocol of configs/glue/NAME.py, or of a file like it; raises InputError."""
    path = FOLDER / f"{name}.py" if name in NAMES else Path(name)
    if not path.is_file():
        raise InputError(
            f"--protocol={name}: is not known; name {', '.join(NAMES)}, or a file like theirs."
        )
    fields, _ = configs.run_file(str(path), "get_protocol")
    try:
        return Protocol(**fields)
    except TypeError as error:
        expected = "get_protocol() must return the fields of Protocol in mlm/glue/tasks.py"
        raise InputError(f"--protocol={name}: {expected} ({error}).") from None
