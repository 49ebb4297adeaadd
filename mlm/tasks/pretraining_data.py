"""Pretraining beside its step: how commands make the task, what it reads and scores, and the counts of its data."""

import itertools
from collections.abc import Callable, Iterator
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import cluster, entry
from mlm.data import batches, mixture, tokenizer, tokenizer_checks
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.data.stages import Stages
from mlm.errors import InputError
from mlm.model import flops, priming
from mlm.model.module import Model, Params
from mlm.monitor.metrics_hooks import MetricsHook, Monitor
from mlm.pretrained import warm_start
from mlm.text import say
from mlm.training import evaluation, schedules, sharding
from mlm.training.task import Batch, Task, TrainState
from mlm.workdir import Workdir


class PretrainingData(Task):
    """All of `Pretraining` that a step does not call."""

    info: DatasetInfo
    workdir: Workdir | None
    _manifest: Manifest | None

    # How commands make the task

    @classmethod
    def open(cls, config: ConfigDict, workdir: Workdir, manifest: Manifest) -> Self:
        info, starts_V = DatasetInfo.from_manifest(manifest), word_starts(config, workdir)
        task = cls(config, info, word_starts_V=starts_V, workdir=workdir, manifest=manifest)
        sharding.check_batch(task.mesh, rows=config.evaluate.batch, key="evaluate.batch")
        schedules.check_schedule(config, task.stages.steps)
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
        if info is None:
            info = DatasetInfo.synthetic(
                vocab_size=config.tokenizer.vocab_size, length=config.shards.length, records=config.data.global_batch
            )
        starts_V = np.arange(info.vocab_size) % 3 > 0  # two in three start a word
        return cls(config, info, mesh=mesh, word_starts_V=starts_V, manifest=manifest)

    @classmethod
    def model_alone(cls, config: ConfigDict, info: DatasetInfo) -> Model:
        """Returns the model without a mesh, data or state, as commands that read a trained one make it."""
        task = cls.__new__(cls)
        task.config, task.info, task.workdir, task._manifest = config, info, None, None
        module = task.make_model()  # which has self.config and self.info alone
        if not isinstance(module, Model):
            what = "must return a module of mlm.model or a subclass, as families.make_module does"
            raise InputError(f"{cls.__qualname__}.make_model: {what}, not {module!r:.100}.")
        return module

    @property
    def manifest(self) -> Manifest:
        """The shards; raises InputError in a command that has none."""
        if self._manifest is None:
            fix = "name its shards (plan --workdir=DIR), or use a command that reads them (train, bench --parts loop)"
            raise InputError(f"{type(self).__qualname__} reads self.manifest, but this command has no data; {fix}.")
        return self._manifest

    # What the loop calls

    def batch_shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        ids = jax.ShapeDtypeStruct((rows, self.info.length), jnp.int32)
        column = jax.ShapeDtypeStruct((rows,), jnp.uint32)
        return {"input_ids": ids, "attention_mask": ids, "record_id": column, "epoch": column, "row": column}

    def make_batch(self, ids_BxL: np.ndarray) -> Batch:
        """Returns rows of tokens as a batch on the devices, without padding, numbered from 0."""
        return sharding.put_batch(batches.in_memory(ids_BxL), self.mesh, len(ids_BxL))

    def init_params(self, key: Array, counts_V: Array | None = None) -> Params:
        """Returns random parameters, primed if the counts of the tokens are given."""
        params = self.module.init_params(key)
        if counts_V is None:
            return params
        try:
            primed = priming.prime(params, self.module.config, counts_V, jax.random.fold_in(key, 1))
        except (KeyError, TypeError, ValueError):
            primed = {}
        if jax.tree.map(jnp.shape, primed) != jax.tree.map(jnp.shape, params):
            what = f"{type(self).__qualname__}.make_model lacks some, or has them in other shapes"
            known = f"sets the embeddings, attention kernels and output bias of {self.config.model.family}"
            raise InputError(f"config.model.init = primed: {known}; {what}; set it to stock.")
        return primed

    def initial_state(self) -> TrainState:
        """Returns the state before the first step, as model.init or train.init_from asks for."""
        if self.config.train.init_from:
            return self._warm_start()
        if self.config.model.init == "stock":
            return self.init()
        counts_V = batches.count_tokens(self.manifest).astype(np.float32)
        return self.init(np.pad(counts_V, (0, self.module.config.vocab_size - len(counts_V))))

    def _warm_start(self) -> TrainState:
        """Returns a fresh state with the parameters of train.init_from, as far as they fit."""
        source, lines = warm_start.read_source(self.config, self.module.config, self.abstract_state.params)
        taken, fit_lines = warm_start.fit(
            source,
            self.abstract_state.params,
            pad_id=self.module.config.pad_token_id,
            vocab_size=self.info.vocab_size,
            tokens=self.workdir.tokenizer_folder,
        )
        if cluster.is_primary():
            lines = fit_lines + entry.changes(source.meta.get("class", {}), entry.describe(type(self))) + lines
            say("\n".join(lines))
        state = self.init()
        ema = None if state.ema is None else warm_start.start(state.ema, taken)
        return state.replace(params=warm_start.start(state.params, taken), ema=ema)

    def batches(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        return train_batches(self.config, self.manifest, self.mesh, self.stages, start=start)

    def make_eval_step(self) -> evaluation.EvalStep:
        return evaluation.make_eval_step(
            self.module,
            self.eval_masking,
            self.config.evaluate.seed,
            self.mesh,
            sharding.shardings_of(self.abstract_state).params,
            metrics=self.metrics,
        )

    def evaluate(self, params: Params) -> dict[str, float]:
        """Returns the scores of the validation split and of the sets of evaluate.sets."""
        return score_split(self.config, self.manifest, self.mesh, self.eval_step, params, "validation")

    def tokens_read(self, step: int) -> int:
        """Returns the tokens that the steps up to `step` read, padding left out."""
        return round(self.stages.rows_read(step) * self.info.length * self.info.real_share)

    def flops_per_token(self, length: int, rate: float | None = None) -> float:
        """Returns the useful FLOPs of a step per token, padding aside; `rate` is of masking, by default the mean."""
        config = self.config.masking
        mean_rate = (config.rate + (config.end_rate or config.rate)) / 2
        return flops.per_token(
            self.module,
            self.abstract_state.params,
            length=min(length, self.info.length * self.info.real_share),  # others that a token can attend to, about
            predicted_share=mean_rate if rate is None else rate,
            vocab_size=self.info.vocab_size,
        )

    def useful_flops(self, step: int, share: float, start_share: float = 0.0) -> float:
        masking, start = self.config.masking, self.stages.start
        steps, first = self.stages.steps, 0  # of the schedules: their length, and the step after which they begin
        if share > start_share:
            steps = round((step - start) / (share - start_share))
            first = start - round(start_share * steps)
        rate_at = schedules.rate_schedule(masking.rate, masking.end_rate, steps) or (lambda position: masking.rate)
        parts = list(self.stages.between(start + 1, step))
        if by_hours := self.stages.by_hours:  # rows are short up to a share of the time, of which a step takes as much
            last_short = first + round(self.config.data.short_share * steps)
            short = self.stages.between(start + 1, min(step, last_short))
            parts = [part._replace(length=by_hours.length) for part in short]
            parts += self.stages.between(max(start, last_short) + 1, step)
        total = 0.0
        for part in parts:
            middle = (part.first + part.last) / 2 - 1 - first
            rate = float(rate_at(middle))  # linear, so it is the mean
            total += part.count * part.rows * self.flops_per_token(part.length, rate)
        return total * self.info.length * self.info.real_share

    def words_per_row(self) -> float:
        """Returns the words in a row, about, as cut at white space."""
        words_V = tokenizer.counted_words(str(self.workdir.tokenizer), key="config.checkpoint.milestones")
        return batches.words_per_row(self.manifest, words_V)

    def make_hooks(self, notify: Callable[[str], None]) -> list[MetricsHook]:
        warmup = schedules.warmup_steps(self.config, self.stages.steps)
        return [Monitor(self.config, self.workdir, self.manifest, notify, stages=self.stages, warmup=warmup)]


def train_batches(
    config: ConfigDict, manifest: Manifest, mesh: Mesh, stages: Stages, *, start: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this host's rows of the batches after step `start`."""
    for stage in stages.between(start + 1):
        stream = batches.train_batches(
            manifest,
            split="train",
            seed=config.data.seed,
            lanes=config.data.lanes,
            global_batch=stage.rows,
            start_row=stage.rows_before,
            rows=sharding.local_rows(mesh, stage.rows),
        )
        yield from itertools.islice(stream, stage.count)


def score_split(
    config: ConfigDict, manifest: Manifest, mesh: Mesh, eval_step: Callable, params: Params, split: str
) -> dict[str, float]:
    """Returns the scores of a split, the mean of a mixture's folders; those of its sets are "NAME/loss" and so on."""
    folders = mixture.parts(manifest)
    sets = {name: data for name, data in manifest.sets.items() if split in data.splits and split != "train"}
    rows, scores = config.evaluate.batch, {}
    for data in (*(folder.manifest for folder in folders), *sets.values()):
        if data.folder in scores:
            continue
        scores[data.folder] = evaluation.score(
            eval_step,
            params,
            batches.eval_batches(data, split=split, batch=rows, rows=sharding.local_rows(mesh, rows)),
            mesh=mesh,
            rows=rows,
            tokens_per_byte=_tokens_per_byte(data, split),
            draws=config.evaluate.draws,
        )
    mean = evaluation.mean(
        [folder.share for folder in folders],
        [scores[folder.manifest.folder] for folder in folders],
        [_tokens_per_byte(folder.manifest, split) for folder in folders],
    )
    of_sets = {f"{name}/{key}": score for name, data in sets.items() for key, score in scores[data.folder].items()}
    return mean | of_sets


def _tokens_per_byte(manifest: Manifest, split: str) -> float | None:
    """Returns None as well if many tokens are unknown: no score is of the bytes that they stand for."""
    counts = manifest.splits[split]
    is_scored = counts.text_bytes and (counts.unknown_tokens or 0) <= tokenizer_checks.UNKNOWN * counts.tokens
    return counts.tokens / counts.text_bytes if is_scored else None


def document_start(config: ConfigDict, info: DatasetInfo) -> int | None:
    """Returns the id at which documents of a row are told apart, None if data.isolate_documents is off."""
    if not config.data.isolate_documents:
        return None
    cls_id = info.special_ids["cls"]
    if role := next((role for role in ("sep", "unk") if info.special_ids.get(role) == cls_id), None):
        what = f"the cls token of the tokenizer is its {role} token too, so it doesn't show where a document starts"
        raise InputError(f"config.data.isolate_documents = True: {what}; set it to false, or use another tokenizer.")
    return cls_id


def word_starts(config: ConfigDict, workdir: Workdir) -> np.ndarray | None:
    """Returns which tokens of the workdir's tokenizer start a word, or None if config.masking.kind needs no words."""
    kind, folder = config.masking.kind, str(workdir.tokenizer)
    return None if kind == "token" else tokenizer.word_starts(folder, key=f"config.masking.kind = {kind}")
