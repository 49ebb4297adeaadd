"""`bench --parts quality`: trains two recipes for the same time, interleaved, and compares their loss curves.

Both train on the same rows and are scored on the same masks of the validation split, so their losses compare. Only
training time counts, not compilation, evaluation or the other's turns. Schedules span that time (train.hours).
"""

import contextlib
import itertools
import math
import re
import tempfile
import time
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import RenderableType

from mlm import config as configs
from mlm import logs
from mlm.bench import interleaved, steps
from mlm.data import batches
from mlm.data.manifest import Manifest
from mlm.data.stages import total_steps
from mlm.errors import InputError
from mlm.model.masking import make_eval_masking, make_masking
from mlm.model.module import Params
from mlm.pretrained import load
from mlm.tasks.pretraining import Pretraining
from mlm.tasks.pretraining_data import score_split
from mlm.text import number, say, table
from mlm.training import schedules, sharding
from mlm.training.budget import Budget
from mlm.training.evaluation import make_eval_step
from mlm.workdir import Workdir

EVALUATIONS = 20  # of each, after that of its initial parameters
TURN = 10.0  # seconds, at most
# Of the evaluation, and of run_mlm.py's recipe.
MASKS = "masking.kind=token masking.rate=0.15 masking.end_rate=0 masking.mask_share=0.8 masking.random_share=0.1"
BASELINE = """optimizer.name=adamw optimizer.learning_rate=1e-3 optimizer.b1=0.9 optimizer.b2=0.999 optimizer.eps=1e-8
    optimizer.weight_decay=0 optimizer.clip_norm=1 optimizer.ema_decay=0 schedule.name=linear schedule.warmup_steps=0
    schedule.warmup_fraction=0 schedule.final_fraction=0 model.init=stock model.init_stddev=0.02
    model.hidden_dropout=0.1 model.attention_dropout=0.1 model.attention=auto data.short_length=0
    data.batch_stages=() data.isolate_documents=false train.init_from=
    train.init_tiled=false"""  # TrainingArguments' defaults, but another learning rate; other keys as in run_mlm.py
DATA = re.compile(r"(corpus|tokenizer|shards|evaluate)\..*|data\.(seed|lanes|mixture)")  # keys that both have alike


class Trainer:
    """One of the two recipes; `curve` lists {"seconds" of training, "steps", "loss" (None: not finite)}."""

    steps, seconds, learning_rate, compile_seconds, versions = 0, 0.0, 0.0, None, {}

    def __init__(self, task: Pretraining, config: ConfigDict):
        """`config` sets the evaluation, except for its masks, which are `MASKS`."""
        self.task, self.curve = task, []
        evaluated = self._evaluated = configs.replace(config, configs.parse(config, MASKS.split()))
        masking = make_masking(evaluated.masking, task.info, None)
        masking, seed = make_eval_masking(masking, evaluated.evaluate.count), evaluated.evaluate.seed
        self._shardings = sharding.shardings_of(task.abstract_state).params
        self._eval_step = make_eval_step(task.module, masking, seed, task.mesh, self._shardings)

    def evaluate(self) -> None:
        """Adds a point to the curve."""
        task = self.task
        scores = score_split(self._evaluated, task.manifest, task.mesh, self._eval_step, self.params(), "validation")
        self.curve.append(logs.finite({"seconds": self.seconds, "steps": self.steps, "loss": scores["loss"]}))


class Ours(Trainer):
    """Trains with our step."""

    def __init__(self, task: Pretraining, config: ConfigDict):
        super().__init__(task, config)
        self.paused_seconds = 0.0  # of the clock of `Budget`
        self._budget = Budget(task.config.train.hours, None, share=0.0, log=self)
        self._state, self._metrics, stream = task.initial_state(), None, task.batches(0)
        self._batches = itertools.chain([first := next(stream)], stream)
        begin = time.monotonic()
        self._programs = {}
        for rows, length in task.stages.sizes:
            columns = {name: np.resize(column, (rows, *column.shape[1:])) for name, column in first.items()}
            lowered = task.train_step.lower(self._state, self._put(columns, 0.0), length)
            self._programs[rows, length] = lowered.compile()
        self._stopped = time.monotonic()
        self.compile_seconds = self._stopped - begin

    def _put(self, columns: dict[str, np.ndarray], share: float) -> dict[str, jax.Array]:
        rows = len(columns["record_id"])
        return sharding.put_batch(columns | {"share": np.full(rows, share, np.float32)}, self.task.mesh, rows)

    def train(self, share: float) -> None:
        """Trains until this share of the time is used."""
        begin = time.monotonic()
        self.paused_seconds += begin - self._stopped
        while self._budget.share < share:
            used = self._budget.start_step(self.steps + 1, self._metrics)
            stage = self.task.stages.stage_at(self.steps + 1, used)
            program = self._programs[stage.rows, stage.length]
            self._state, self._metrics = program(self._state, self._put(next(self._batches), used))
            self.steps += 1
        jax.block_until_ready(self._metrics)
        self._stopped = time.monotonic()
        self.seconds += self._stopped - begin
        self.learning_rate = float(self._metrics["learning_rate"])

    def params(self) -> Params:
        """Returns the parameters to evaluate."""
        return self._state.best_params


class Torch(Trainer):
    """PyTorch's Trainer, in a process of its own; its parameters come back as files."""

    def __init__(self, task: Pretraining, config: ConfigDict, python: str, stack: contextlib.ExitStack):
        """`stack` ends the process and removes its files."""
        super().__init__(task, config)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlm-bench-"))
        self._seconds, self._folder = task.config.train.hours * 3600, folder
        sizes = (task.manifest.splits["train"].records, task.info.length)
        rows_NxL = np.lib.format.open_memmap(f"{folder}/rows.npy", "w+", np.int32, sizes)
        for batch in batches.eval_batches(task.manifest, split="train", batch=1000, rows=(0, 1000)):
            rows_NxL[batch["record_id"]] = batch["input_ids"]
        rows_NxL.flush()
        model = task.module.config.to_dict() | {"vocab_size": task.info.vocab_size}  # without padding
        self.worker = steps.start_torch(python, task, model=model, rows=f"{folder}/rows.npy", seconds=self._seconds)
        self.versions = self.worker.ready
        stack.callback(self.worker.close)

    def train(self, share: float) -> None:
        """Trains until this share of the time is used."""
        if self.seconds < share * self._seconds:  # the last step may have taken longer than its turn
            answer = self.worker.ask({"until": share * self._seconds})
            self.steps, self.seconds = answer["steps"], answer["seconds"]
            self.learning_rate = answer["learning_rate"]

    def params(self) -> Params:
        """Returns the parameters to evaluate."""
        self.worker.ask({"save": self._folder})
        model = load.load(self._folder, head=load.LM_HEAD).padded(self.task.config.model.vocab_multiple)
        return sharding.put_tree(model.params, self._shardings)


def compare(
    recipes: dict[str, tuple[str, ConfigDict]],
    workdir: str,
    manifest: Manifest,
    *,
    seconds: float,
    torch: str,
    pretraining: type[Pretraining] = Pretraining,
) -> dict[str, Any]:
    """Trains two recipes, {key: (name, config)}: "torch" is PyTorch's Trainer, in that Python, others are our step.

    A subclass is of configs: the recipes of the standard scripts, "torch" and "stock", are mlm's own.

    Returns {"seconds" of each, "turn_seconds", "recipes": {key: row}}. A row's "reached_seconds" is when the recipe
    first reached the other's last loss (None: never); "ratio" is all seconds divided by that.
    """
    (first, (_, config)), (second, _) = recipes.items()
    classes = {key: pretraining if key in ("mlm", "against") else Pretraining for key in recipes}
    tasks = {
        key: open_task(recipe_config, Workdir(workdir), manifest, seconds, classes[key])
        for key, (_, recipe_config) in recipes.items()
    }
    with contextlib.ExitStack() as stack:
        trainers: dict[str, Trainer] = {}
        for key, task in tasks.items():
            say(f"bench: quality: preparing {key}")
            trainers[key] = Torch(task, config, torch, stack) if key == "torch" else Ours(task, config)
        turn = take_turns(trainers, seconds)
    rows = {}
    for key, other in ((first, second), (second, first)):
        trainer, other_loss = trainers[key], trainers[other].curve[-1]["loss"]
        reached = seconds_to_reach(trainer.curve, other_loss)
        rows[key] = trainer.versions | {
            "name": recipes[key][0],
            "loss": trainer.curve[-1]["loss"],
            "best_loss": min((point["loss"] for point in trainer.curve if point["loss"] is not None), default=None),
            "steps": trainer.steps,
            "tokens": trainer.task.tokens_read(trainer.steps),
            "compile_seconds": trainer.compile_seconds,
            "learning_rate": trainer.learning_rate,
            "reached_seconds": reached,
            "ratio": seconds / reached if reached else None,
            "curve": trainer.curve,
        }
    return {"seconds": seconds, "turn_seconds": turn, "recipes": rows}


def baseline(config: ConfigDict) -> ConfigDict:
    """Returns the config with run_mlm.py's recipe: sizes, data and batch stay."""
    return configs.replace(config, configs.parse(config, f"{MASKS} {BASELINE}".split()))


def on_same_data(config: ConfigDict, other: ConfigDict, name: str) -> ConfigDict:
    """Returns `other` with the data of `config`; raises InputError if row length or vocabulary size differ."""
    values, others = configs.flatten(config), configs.flatten(other)
    for key in ("shards.length", "tokenizer.vocab_size"):
        if values[key] != others[key]:
            difference = f"has {key} = {others[key]}, --config has {values[key]}"
            fix = "both recipes read the same rows, so the two must be equal"
            raise InputError(f"--against={name}: {difference}; {fix}.")
    return configs.replace(other, {key: value for key, value in values.items() if DATA.fullmatch(key)})


def open_task(
    config: ConfigDict,
    workdir: Workdir,
    manifest: Manifest,
    seconds: float,
    pretraining: type[Pretraining] = Pretraining,
) -> Pretraining:
    """Opens the task with a time budget in place of its steps; the warmup keeps its fraction."""
    if config.train.branch_from:
        raise InputError(f"config.train.branch_from = {config.train.branch_from}: must be empty with --parts quality.")
    total = total_steps(config, manifest.splits["train"].records)
    budget = {"train.hours": seconds / 3600, "train.steps": 0, "train.epochs": 0.0, "train.replay": ""}
    warmup = {"schedule.warmup_fraction": schedules.warmup_steps(config, total) / total, "schedule.warmup_steps": 0}
    return pretraining.open(configs.replace(config, budget | warmup), workdir, manifest)


def take_turns(trainers: dict[str, Trainer], seconds: float) -> float:
    """Trains and evaluates all; returns the seconds of a turn."""
    between = math.ceil(seconds / EVALUATIONS / TURN)  # turns from one evaluation to the next
    turns = EVALUATIONS * between
    for turn in range(turns + 1):
        for trainer in trainers.values():
            if turn:
                trainer.train(turn / turns)
            if turn % between == 0:
                trainer.evaluate()
        if turn % between == 0:
            losses = ", ".join(f"{key} {number(trainer.curve[-1]['loss'], '.4f')}" for key, trainer in trainers.items())
            say(f"bench: quality: {turn / turns * seconds:.3g} of {seconds:g} s: {losses}")
    return seconds / turns


def seconds_to_reach(curve: list[dict[str, Any]], loss: float | None) -> float | None:
    """Returns the first time at which a curve, interpolated linearly, is at or below a loss; None if never."""
    points = [(point["seconds"], point["loss"]) for point in curve if point["loss"] is not None]
    below = next((n for n, (_, value) in enumerate(points) if loss is not None and value <= loss), None)
    if not below:
        return None if below is None else points[0][0]
    (before, high), (after, low) = points[below - 1 : below + 1]
    return before + (after - before) * (high - loss) / (high - low)


def render(results: dict[str, Any]) -> list[RenderableType]:
    """Returns the table, and what its figures are."""
    cells, lines = [], []
    for row in results["recipes"].values():
        reached, compiling = row["reached_seconds"], row["compile_seconds"]
        when = "never" if reached is None else f"after {reached:,.1f} s"
        if row["ratio"]:
            when += f", {row['ratio']:.3g} times as fast"
        counts = (f"{row['steps']:,}", f"{row['tokens']:,}", "-" if compiling is None else f"{compiling:,.1f} s")
        cells.append((row["name"], number(row["loss"], ".4f"), number(row["best_loss"], ".4f"), *counts, when))
        if "torch" in row:
            lines.append(interleaved.versions(row))
    heads = ("quality", ">last loss", ">best", ">steps", ">tokens", ">compiling", "at the other's last loss")
    times = f"{results['seconds']:g} s of training each, in turns of {results['turn_seconds']:.3g} s"
    masks = "in nats on the validation split, 15% of its tokens predicted, masked alike for both"
    return [table(*heads, rows=cells), f"{times}; compiling and evaluating not counted. Losses {masks}.", *lines]
