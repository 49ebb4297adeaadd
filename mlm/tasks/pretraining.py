"""Masked-language-model pretraining (Devlin et al., 2019; Liu et al., 2019), as a task of the loop.

To change one part, subclass `Pretraining`, override one of its methods, and start commands by
`mlm.__main__.main(pretraining=...)`. Keys of a config's group `mine` are yours: `self.config.mine`.
`mlm.testing.check_task` tests a subclass.

Dimensions: B rows, L tokens in a row, K predictions in a row, V padded vocabulary.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import cluster, entry
from mlm.data import batches, tokenizer
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.data.stages import make_stages
from mlm.errors import InputError
from mlm.model import families, masking, priming
from mlm.model.attention import Attention, by_length
from mlm.model.kernels import make_attention
from mlm.model.loss import Mean, RowSums, masked_cross_entropy
from mlm.model.module import Model, Params
from mlm.model.token_masking import Masked, Masking, TokenMasking, rate_schedule
from mlm.monitor.metrics_hooks import MetricsHook, Monitor
from mlm.pretrained import warm_start
from mlm.tasks.pretraining_data import dataset_info, score_split, train_batches, word_starts
from mlm.training import evaluation, optimizer, sharding, train
from mlm.training.task import Batch, Task, TrainState
from mlm.workdir import Workdir


class Pretraining(Task):
    """The task of a config; with a manifest and a workdir, `train.train` trains it."""

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
        self.config, self.info, self.workdir, self._manifest = config, info, workdir, manifest
        self.word_starts_V = word_starts_V
        self.mesh = sharding.mesh_of(config.mesh) if mesh is None else mesh
        sharding.check_batches(self.mesh, config)
        self.stages = make_stages(config, info.records)
        self.model_alone(config, info)  # refuses now what would fail when the trained model is read
        module = self.make_model()
        if config.model.implementation == "transformers" and type(self).make_attention != Pretraining.make_attention:
            what = f"computes its own attention, not {type(self).__qualname__}.make_attention"
            raise InputError(f"config.model.implementation = transformers: {what}; set it to mlm.")
        if config.data.isolate_documents:
            module = module.clone(compute=dataclasses.replace(module.compute, cls_id=info.special_ids["cls"]))
        lengths = {length for _, length in self.stages.sizes} | {info.length}
        self.module = module.with_attention(
            lambda window: by_length(lambda length: self.make_attention(module.config, length, window), lengths)
        )
        self.masking = self.make_masking()
        self.masking_rate = rate_schedule(config.masking.rate, config.masking.end_rate, self.stages.steps)
        self.schedule = optimizer.make_schedule(config, self.stages.steps)
        self.optimizer = self.make_optimizer()

        self.init, self.abstract_state = train.make_init(self)  # init takes () or token counts [V]
        self.train_step = train.make_train_step(self)
        self.eval_masking = masking.make_eval_masking(self.make_eval_masking(), config.evaluate.count)
        self.eval_step = evaluation.make_eval_step(
            self.module,
            self.eval_masking,
            config.evaluate.seed,
            self.mesh,
            sharding.shardings_of(self.abstract_state).params,
            metrics=self.metrics,
        )
        self.metadata = dataclasses.asdict(info) | {"model": self.module.config.to_dict()}
        self.data_fingerprint = manifest.fingerprint if manifest else ""

    @classmethod
    def open(cls, config: ConfigDict, workdir: Workdir, manifest: Manifest) -> Self:
        """Returns the task of a run."""
        starts_V = word_starts(config, workdir)
        task = cls(config, dataset_info(manifest), word_starts_V=starts_V, workdir=workdir, manifest=manifest)
        sharding.check_batch(task.mesh, rows=config.evaluate.batch, key="evaluate.batch")
        optimizer.check_schedule(config, task.stages.steps)
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
        try:
            return task.make_model()
        except AttributeError as error:
            what = "to evaluate, export and predict, it has self.config and self.info alone"
            raise InputError(f"{cls.__qualname__}.make_model: {error}; {what}.") from error

    @property
    def manifest(self) -> Manifest:
        """The shards; raises InputError in a command that has none."""
        if self._manifest is None:
            fix = "name its shards (plan --workdir=DIR), or use a command that reads them (train, bench --parts loop)"
            raise InputError(f"{type(self).__qualname__} reads self.manifest, but this command has no data; {fix}.")
        return self._manifest

    # What a subclass may override

    def make_model(self) -> Model:
        """Returns the linen module, which then gets `make_attention`; `families.make_module` takes a class of yours."""
        return families.make_module(self.config.model, self.info)

    def make_attention(self, config: Any, length: int, window: int) -> Attention:
        """Returns the attention for rows of `length` tokens, given the transformers config of the model.

        A token attends to `window` tokens on each side; to the whole row if it is 0.
        """
        return make_attention(
            self.config.model.attention,
            config,
            length=length,
            mesh=self.mesh,
            dtype=self.config.model.dtype,
            isolated=self.config.data.isolate_documents,
            window=window,
        )

    def make_masking(self) -> Masking:
        """Returns the masking of training."""
        return masking.make_masking(self.config.masking, self.info, self.word_starts_V)

    def make_eval_masking(self) -> TokenMasking:
        """Returns the masking of evaluation, that of the config by default, whatever `make_masking` returns."""
        return masking.make_masking(self.config.masking, self.info, self.word_starts_V)

    def loss(self, logits_BxKxV: Array, masked: Masked) -> RowSums:
        """Returns the loss of the predictions, summed over each row, and its weight; divided once, later."""
        return masked_cross_entropy(logits_BxKxV, masked.labels_BxK, masked.weights_BxK, self.info.vocab_size)

    def metrics(self, logits_BxKxV: Array, masked: Masked, intermediates: dict[str, Any]) -> dict[str, Mean]:
        """Returns further metrics of training and evaluation, {name: Mean of a sum and its weight, float32 [B]}.

        `intermediates` are what the modules of the model `sow`, by their path.
        """
        return {}

    def make_optimizer(self) -> optax.GradientTransformation:
        """Returns the optimizer; one of your own ends in `optimizer.scale_by_learning_rate(self.schedule)`."""
        return optimizer.make_optimizer(self.config.optimizer, self.schedule)

    # What the step calls

    def init_params(self, key: Array, counts_V: Array | None = None) -> Params:
        """Returns random parameters, primed if the counts of the tokens are given."""
        params = self.module.init_params(key)
        if counts_V is None:
            return params
        return priming.prime(params, self.module.config, counts_V, jax.random.fold_in(key, 1))

    def inputs(self, batch: Batch, position: Array) -> Masked:
        """Returns the batch with masks drawn, at the rate of a step of the schedules."""
        rate = None if self.masking_rate is None else self.masking_rate(position)
        columns = (batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch"))
        return self.masking(jax.random.key(self.config.masking.seed), *columns, rate)

    def forward(
        self, params: Params, masked: Masked, rows_B: Array, dropout_key: Array
    ) -> tuple[Array, dict[str, Any]]:
        """Returns logits_BxKxV, and what modules have sown."""
        inputs = (masked.ids_BxL, masked.attention_BxL, masked.positions_BxK)
        return self.module.forward(params, *inputs, dropout_key, rows_B)

    def batch_shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        ids = jax.ShapeDtypeStruct((rows, self.info.length), jnp.int32)
        column = jax.ShapeDtypeStruct((rows,), jnp.uint32)
        return {"input_ids": ids, "attention_mask": ids, "record_id": column, "epoch": column}

    def make_batch(self, ids_BxL: np.ndarray) -> Batch:
        """Returns rows of tokens as a batch on the devices, without padding, numbered from 0."""
        return sharding.put_batch(batches.in_memory(ids_BxL), self.mesh, len(ids_BxL))

    # What the loop calls

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
        source, lines = warm_start.read_source(self.config.train, self.module.config, self.abstract_state.params)
        has_tokenizer = (self.workdir.tokenizer / "tokenizer.json").is_file()
        taken, fit_lines = warm_start.fit(
            source,
            self.abstract_state.params,
            pad_id=self.module.config.pad_token_id,
            vocab_size=self.info.vocab_size,
            tokens=str(self.workdir.tokenizer) if has_tokenizer else None,
        )
        if cluster.is_primary():
            lines = fit_lines + entry.changes(source.meta.get("class", {}), entry.describe(type(self))) + lines
            print("\n".join(lines), file=sys.stderr, flush=True)
        state = self.init()
        ema = None if state.ema is None else warm_start.start(state.ema, taken)
        return state.replace(params=warm_start.start(state.params, taken), ema=ema)

    def batches(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        return train_batches(self.config, self.manifest, self.mesh, self.stages, start=start)

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
        return self.module.flops_per_token(
            self.abstract_state.params,
            length=min(length, self.info.length * self.info.real_share),  # others that a token can attend to, about
            predicted_share=mean_rate if rate is None else rate,
            vocab_size=self.info.vocab_size,
        )

    def useful_flops(self, step: int, share: float) -> float:
        masking, start = self.config.masking, self.stages.start
        steps = round(step / share) if share else self.stages.steps
        rate_at = rate_schedule(masking.rate, masking.end_rate, steps) or (lambda position: masking.rate)
        parts = list(self.stages.between(start + 1, step))
        if by_hours := self.stages.by_hours:  # rows are short up to a share of the time, of which a step takes as much
            short_steps = round(self.config.data.short_share * steps)
            short = self.stages.between(start + 1, min(step, short_steps))
            parts = [part._replace(length=by_hours.length) for part in short]
            parts += self.stages.between(max(start, short_steps) + 1, step)
        flops = 0.0
        for part in parts:
            rate = float(rate_at((part.first + part.last) / 2 - 1))  # linear, so the mean is the rate in the middle
            flops += part.count * part.rows * self.flops_per_token(part.length, rate)
        return flops * self.info.length * self.info.real_share

    def words_per_row(self) -> float:
        """Returns the words in a row, about, as cut at white space."""
        words_V = tokenizer.counted_words(str(self.workdir.tokenizer), key="config.checkpoint.milestones")
        return batches.words_per_row(self.manifest, words_V)

    def make_hooks(self, notify: Callable[[str], None]) -> list[MetricsHook]:
        """Returns the monitor of advice and loss spikes."""
        warmup = optimizer.warmup_steps(self.config, self.stages.steps)
        return [Monitor(self.config, self.workdir, self.manifest, notify, stages=self.stages, warmup=warmup)]
