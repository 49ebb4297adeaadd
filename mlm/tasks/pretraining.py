"""Masked-language-model pretraining (Devlin et al., 2019; Liu et al., 2019), as a task of the loop.

To change one part, subclass `Pretraining` and override `loss`, `make_optimizer` or `make_attention`, and start commands
by `mlm.__main__.main(pretraining=...)`. Keys of a config's group `mine` are yours: `self.config.mine`.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import cluster, entry
from mlm import config as configs
from mlm.config_rules import parse_ranges
from mlm.data import batches, mixture, skip_batches, tokenizer
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.data.order import between
from mlm.errors import InputError
from mlm.model import families, priming
from mlm.model.attention import Attention, make_attention
from mlm.model.loss import RowSums, masked_cross_entropy
from mlm.model.masking import Masked, make_eval_masking, make_masking, rate_schedule
from mlm.model.module import Model, Params
from mlm.monitor.metrics_hooks import MetricsHook, Monitor
from mlm.pretrained import load, warm_start
from mlm.training import evaluation, optimizer, recipe, sharding, state, step
from mlm.training.loop import Task
from mlm.workdir import Workdir


class Pretraining(Task):
    """The task of a config; with a manifest and a workdir, `loop.run_task` trains it."""

    def __init__(
        self,
        config: ConfigDict,
        info: DatasetInfo,
        *,
        mesh: Mesh | None = None,
        word_starts_V: np.ndarray | None = None,
        workdir: Workdir | None = None,
        manifest: Manifest | None = None,
    ):
        """Builds everything from top to bottom; whole-word and span masking need `word_starts_V`."""
        self.config, self.info, self.workdir, self.manifest = config, info, workdir, manifest
        self.mesh = sharding.make_mesh(**config.mesh.to_dict()) if mesh is None else mesh
        module = families.make_module(config.model.to_dict(), info, isolated=config.data.isolate_documents)
        self.module = self._with_attention(module, info.length)
        self.masking = make_masking(config.masking.to_dict(), info, word_starts_V)
        self.run = configs.flatten(config)
        sharding.check_batches(self.mesh, self.run)

        self.steps = recipe.total_steps(self.run, info.records)
        self.short_steps = recipe.short_steps(self.run, self.steps)
        self.stages = recipe.stages(self.run)
        self.schedule = optimizer.make_schedule(self.run, self.steps)
        self.tx = self.make_optimizer()
        self.init, self.shapes = state.jit_init(self._init, self.mesh)  # init takes () or token counts [V]
        sizes = {(length, stage.rows) for length in (info.length, config.data.short_length) for stage in self.stages}
        self.train_steps = {size: self._make_step(size[0]) for size in sizes if size[0]}
        self.train_step = self.train_steps[info.length, config.data.global_batch]
        self.eval_masking = make_eval_masking(self.masking, config.evaluate.count)
        shardings = state.shardings_of(self.shapes).params
        self.eval_step = step.make_eval_step(self.module, self.eval_masking, config.evaluate.seed, self.mesh, shardings)
        self.metadata = dataclasses.asdict(info) | {"model": self.module.config.to_dict()}
        self.data_fingerprint = manifest.fingerprint if manifest else ""

    @classmethod
    def open(cls, config: ConfigDict, workdir: Workdir, manifest: Manifest) -> Self:
        """Returns the task of a run."""
        info, starts_V = dataset_info(manifest), word_starts(config, workdir)
        task = cls(config, info, word_starts_V=starts_V, workdir=workdir, manifest=manifest)
        sharding.check_batch(task.mesh, rows=config.evaluate.batch, key="evaluate.batch")
        recipe.check_schedule(task.run, task.steps)
        return task

    @classmethod
    def without_data(
        cls,
        config: ConfigDict,
        mesh: Mesh | None = None,
        info: DatasetInfo | None = None,
        manifest: Manifest | None = None,
    ) -> Self:
        """Returns the task of data that need not exist, to study the step; a loss may read the `manifest`."""
        sizes = {"length": config.shards.length, "records": config.data.global_batch}
        info = info or DatasetInfo.synthetic(vocab_size=config.tokenizer.vocab_size, **sizes)
        starts_V = np.arange(info.vocab_size) % 3 > 0  # two in three start a word
        return cls(config, info, mesh=mesh, word_starts_V=starts_V, manifest=manifest or NoData(cls))

    # What a subclass may override

    def loss(self, logits_BxKxV: jax.Array, masked: Masked) -> RowSums:
        """Returns the loss of the predictions, summed over each row, and its weight; divided once, later."""
        return masked_cross_entropy(logits_BxKxV, masked.labels_BxK, masked.weights_BxK, self.info.vocab_size)

    def make_optimizer(self) -> optax.GradientTransformation:
        """Returns the optimizer; one of your own ends in `optimizer.scale_by_learning_rate(self.schedule)`."""
        return optimizer.make_optimizer(self.run, self.schedule)

    def make_attention(self, config: Any, length: int, window: int) -> Attention:
        """Returns the attention for rows of `length` tokens, given the transformers config of the model.

        A token attends to `window` tokens on each side; to the whole row if it is 0.
        """
        model, isolated = self.config.model, self.config.data.isolate_documents
        shared = {"mesh": self.mesh, "dtype": model.dtype, "isolated": isolated, "window": window}
        return make_attention(model.attention, config, length=length, **shared)

    def make_gradient(self, length: int) -> step.Gradient:
        """Returns the gradient of the mean loss over rows of `length` tokens, from `step.mean_gradient`."""
        config, module, parts = self.config, self.module, self.info.length // length
        if parts > 1:
            module = self._with_attention(module, length)
        rate_at = rate_schedule(config.masking.rate, config.masking.end_rate, self.steps)

        def prepare(batch: step.Batch, number: jax.Array) -> step.Inputs:
            rate = None if rate_at is None else rate_at(step.schedule_step(batch) if "share" in batch else number)
            batch = step.split_rows(batch, parts)
            columns = (batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch"))
            return self.masking(jax.random.key(config.masking.seed), *columns, rate), batch["attention_mask"]

        def row_sums(params: Params, inputs: step.Inputs, rows_B: jax.Array, key: jax.Array) -> RowSums:
            masked, attention_BxL = inputs
            logits = module.logits(params, masked.ids_BxL, attention_BxL, masked.positions_BxK, key, rows_B)
            return self.loss(logits, masked)

        return step.mean_gradient(self.run, prepare, row_sums, self.mesh)

    def _with_attention(self, module: Model, length: int) -> Model:
        return families.with_attention(module, lambda window: self.make_attention(module.config, length, window))

    def _make_step(self, length: int) -> step.TrainStep:
        return step.make_train_step(self.run, self.make_gradient(length), self.tx, self.schedule, self.shapes)

    def make_batch(self, ids_BxL: np.ndarray) -> step.Batch:
        """Returns rows of tokens as a batch on the devices, without padding, numbered from 0."""
        return sharding.put_batch(batches.in_memory(ids_BxL), self.mesh, len(ids_BxL))

    # What the loop calls

    def step_at(self, step: int, position: int | None = None) -> step.TrainStep:
        """Returns the jitted train step of a step, counted from 1; `position`: in the schedules, if not `step`."""
        return self.train_steps[self._length_at(step if position is None else position), self.rows_at(step)]

    def _length_at(self, step: int) -> int:
        return self.config.data.short_length if step <= self.short_steps else self.info.length

    def rows_at(self, step: int) -> int:
        """Returns the rows of the global batch of a step, counted from 1."""
        batch = skip_batches.batch_of(step, parse_ranges(self.config.data.skip_batches))
        return next(between(self.stages, batch)).rows

    def tokens_read(self, step: int) -> int:
        """Returns the tokens that the steps up to `step` read, padding included."""
        return recipe.rows_read(self.run, step) * self.info.length

    def _init(self, counts_V: jax.Array | None = None) -> state.TrainState:
        key = jax.random.key(self.config.train.seed)
        params = self.module.init_params(key)
        if counts_V is not None:
            params = priming.prime(params, self.module.config, counts_V, jax.random.fold_in(key, 1))
        return state.TrainState.create(params, self.tx, ema=self.config.optimizer.ema_decay > 0)

    def initial_state(self) -> state.TrainState:
        """Returns the state before the first step, as model.init or train.init_from asks for."""
        if self.config.train.init_from:
            return self._warm_start()
        if self.config.model.init == "stock":
            return self.init()
        counts_V = batches.count_tokens(self.manifest, split="train").astype(np.float32)
        return self.init(np.pad(counts_V, (0, self.module.config.vocab_size - len(counts_V))))

    def _warm_start(self) -> state.TrainState:
        """Returns a fresh state with the parameters of train.init_from, as far as they fit."""
        source, config = load.load(self.config.train.init_from, head=None, flag=load.INIT_FROM), self.module.config
        warm_start.refuse_another_model(source, config, tiled=self.config.train.init_tiled)
        folder = self.workdir.tokenizer
        shapes = {name: leaf.shape for name, leaf in sharding.named_leaves(self.shapes.params)}
        source, tiled = warm_start.tile(source, config, shapes) if self.config.train.init_tiled else (source, [])
        ours = {"pad_id": config.pad_token_id, "vocab_size": self.info.vocab_size}
        ours["tokens"] = str(folder) if (folder / "tokenizer.json").is_file() else None
        taken, lines = warm_start.fit(source, shapes, **ours)
        lines += entry.changes(source.meta.get("class", {}), entry.describe(type(self)))
        if cluster.is_primary():
            print("\n".join(lines + tiled + warm_start.rotary_changes(source, config)), file=sys.stderr, flush=True)
        fresh = self.init()
        ema = fresh.ema and warm_start.start(fresh.ema, taken)
        return fresh.replace(params=warm_start.start(fresh.params, taken), ema=ema)

    def batches(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        """Returns this host's rows of the batches after step `start`."""
        return train_batches(self.config, self.manifest, self.mesh, start)

    def evaluate(self, params: Params) -> dict[str, float]:
        """Returns the scores of the validation split and of the sets of evaluate.sets."""
        return score_split(self.config, self.manifest, self.mesh, self.eval_step, params, "validation")

    def flops_per_token(self, step: int) -> float:
        """Returns the useful FLOPs of a step per token."""
        return recipe.flops_per_token(self.run, self.info.vocab_size, length=self._length_at(step))

    def words_per_row(self) -> float:
        """Returns the words in a row, about, as cut at white space."""
        words_V = tokenizer.counted_words(str(self.workdir.tokenizer), key="config.checkpoint.milestones")
        return batches.words_per_row(self.manifest, words_V)

    def make_hooks(self, notify: Callable[[str], None]) -> list[MetricsHook]:
        """Returns the monitor of advice and loss spikes."""
        own = {"steps": self.steps, "warmup": recipe.warmup_steps(self.run, self.steps), "stages": self.stages}
        return [Monitor(self.run, self.workdir, self.manifest, notify, **own)]


class NoData:
    """The manifest of a task without data: false, and what a subclass reads of it is an InputError."""

    def __init__(self, task: type[Pretraining]):
        self._task = task

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        fix = "name its shards (plan --workdir=DIR), or use a command that reads them (train, bench --parts loop)"
        raise InputError(f"{self._task.__qualname__} reads self.manifest.{name}, but this command has no data; {fix}.")


def train_batches(config: ConfigDict, manifest: Manifest, mesh: Mesh, start: int) -> Iterator[dict[str, np.ndarray]]:
    """Returns this host's rows of the batches after step `start`."""
    run, order = configs.flatten(config), {"split": "train", "seed": config.data.seed, "lanes": config.data.lanes}
    stages = recipe.stages(run)

    def open_at(before: int) -> Iterator[dict[str, np.ndarray]]:
        for part in between(stages, before + 1):
            sizes = {"global_batch": part.rows, "rows": sharding.local_rows(mesh, part.rows)}
            stream = batches.train_batches(manifest, start_row=part.before, **sizes, **order)
            yield from stream if part.last == math.inf else itertools.islice(stream, part.last - part.first + 1)

    return skip_batches.follow(open_at, parse_ranges(config.data.skip_batches), start)


def score_split(
    config: ConfigDict, manifest: Manifest, mesh: Mesh, eval_step: Callable, params: Params, split: str
) -> dict[str, float]:
    """Returns the scores of a split, the mean of a mixture's folders; those of its sets are "NAME/loss" and so on."""
    parts, sets = mixture.parts(manifest), mixture.sets(manifest) if split != "train" else {}
    named = {name: each for name, each in sets.items() if split in each.splits}
    rows, scores = config.evaluate.batch, {}  # by folder
    for each in (*(part.manifest for part in parts), *named.values()):
        if each.folder not in scores:
            read = batches.eval_batches(each, split=split, batch=rows, rows=sharding.local_rows(mesh, rows))
            own = {"tokens_per_byte": _tokens_per_byte(each, split), "draws": config.evaluate.draws}
            scores[each.folder] = evaluation.score(eval_step, params, read, mesh=mesh, rows=rows, **own)
    own = [(part.share, scores[part.manifest.folder], _tokens_per_byte(part.manifest, split)) for part in parts]
    found = evaluation.mean(*zip(*own, strict=True))
    others = [(name, scores[each.folder]) for name, each in named.items()]
    return found | {f"{name}/{key}": value for name, own in others for key, value in own.items()}


def _tokens_per_byte(manifest: Manifest, split: str) -> float | None:
    counts = manifest.splits[split]
    return counts.tokens / counts.text_bytes if counts.text_bytes else None


def dataset_info(manifest: Manifest) -> DatasetInfo:
    """Returns what a checkpoint is to know of the data: of a mixture, its folders and shares, too."""
    own = tuple(
        {"name": name, "share": share, "records": each.splits["train"].records, "fingerprint": each.fingerprint}
        for name, share, each in mixture.parts(manifest)
    )
    return dataclasses.replace(DatasetInfo.from_manifest(manifest), mixture=own if len(own) > 1 else ())


def word_starts(config: ConfigDict, workdir: Workdir) -> np.ndarray | None:
    """Returns which tokens of the workdir's tokenizer start a word, or None if config.masking.kind needs no words."""
    kind, folder = config.masking.kind, str(workdir.tokenizer)
    return None if kind == "token" else tokenizer.word_starts(folder, key=f"config.masking.kind = {kind}")
