"""Masked-language-model pretraining (Devlin et al., 2019; Liu et al., 2019), as a task of the loop.

To change one part, subclass `Pretraining`, override one of its methods, and start commands by
`mlm.__main__.main(pretraining=...)`. Keys of a config's group `mine` are yours: `self.config.mine`.
`mlm.testing.check_task` tests a subclass.

Dimensions: B rows, L tokens in a row, K predictions in a row, V padded vocabulary.
"""

import dataclasses
import itertools
import math
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
from mlm.data import batches, tokenizer, tokenizer_checks
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.data.stages import Stages, make_stages
from mlm.errors import InputError
from mlm.model import attention, families, flops, masking, priming
from mlm.model.attention import Attention
from mlm.model.keys import make_key
from mlm.model.loss import Mean, RowSums, masked_cross_entropy
from mlm.model.masking import Masked, Masking
from mlm.model.module import Model, Params
from mlm.monitor.loss_spikes import LossSpikes, MetricsHook
from mlm.pretrained import warm_start
from mlm.text import say
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
        self.config = config
        self.info = info
        module = self.make_model()  # first: a trained model is made from config and info alone, too
        self.workdir = workdir
        self._manifest = manifest
        self.word_starts_V = word_starts_V
        self.mesh = sharding.mesh_of(config.mesh) if mesh is None else mesh
        sharding.check_batches(self.mesh, config)
        self.stages = make_stages(config, info.records)
        if config.model.implementation == "transformers" and self._overrides("make_attention"):
            raise InputError(
                "config.model.implementation = transformers: computes its own attention, not "
                f"{type(self).__qualname__}.make_attention; set it to mlm."
            )
        attend = self.make_attention(module)
        compute = dataclasses.replace(
            module.compute, attend=attend, cls_id=document_start(config, info)
        )
        self.module = module.clone(compute=compute)
        self.masking = self.make_masking()
        self.schedule = optimizer.make_schedule(config, self.stages.steps)
        self.optimizer = self.make_optimizer()

        self.init, self.abstract_state = train.make_init(self)  # init takes () or token counts [V]
        self.train_step = train.make_train_step(self)
        # whatever `make_masking` returns, so that scores can be compared
        self.eval_masking = masking.make_eval_masking(
            masking.make_masking(config.masking, info, word_starts_V), config.evaluate.count
        )
        self.eval_step = self.make_eval_step()
        self.metadata = dataclasses.asdict(info) | {"model": self.module.config.to_dict()}
        self.data_fingerprint = manifest.fingerprint if manifest else ""

    # What a subclass may override

    def make_model(self) -> Model:
        """Returns the linen module, which then gets `make_attention`; `families.make_module` takes a class of yours."""
        return families.make_module(self.config.model, self.info)

    def make_attention(self, module: Model) -> Attention:
        """Returns the attention that all layers of the module call; `mlm.model.attention.Attention` says how."""
        # A subclass that makes or hands on masks of its own may take tokens out of a row that is full.
        masks_itself = self._overrides("make_masking", "inputs", "forward")
        return attention.make_attention(
            self.config.model.attention,
            module.config,
            lengths={length for _, length in self.stages.sizes} | {self.info.length},
            windows=set(module.windows()),
            mesh=self.mesh,
            dtype=self.config.model.dtype,
            padding="any" if masks_itself else self.info.padding,
        )

    def make_masking(self) -> Masking:
        """Returns the masking of training."""
        return masking.make_masking(self.config.masking, self.info, self.word_starts_V)

    def loss(self, logits_BxKxV: Array, masked: Masked) -> RowSums:
        """Returns the loss of the predictions, summed over each row, and its weight; divided once, later."""
        return masked_cross_entropy(
            logits_BxKxV, masked.labels_BxK, masked.weights_BxK, self.info.vocab_size
        )

    def metrics(
        self, logits_BxKxV: Array, masked: Masked, intermediates: dict[str, Any]
    ) -> dict[str, Mean]:
        """Returns further metrics of training and evaluation, {name: Mean of a sum and its weight, float32 [B]}.

        `intermediates` are what the modules of the model `sow`, by their path.
        """
        return {}

    def make_optimizer(self) -> optax.GradientTransformation:
        """Returns the optimizer; one of your own ends in `optimizer.scale_by_learning_rate(self.schedule)`.

        That goes by the steps of the run: a count of your own stands still where a step is skipped.
        """
        return optimizer.make_optimizer(self.config.optimizer, self.schedule)

    # What the step calls

    def inputs(self, batch: Batch, step: Array) -> Masked:
        """Returns the batch with masks drawn."""
        columns = (batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch"))
        return self.masking(make_key(self.config.masking.seed), *columns)

    def forward(
        self, params: Params, masked: Masked, rows_B: Array, dropout_key: Array
    ) -> tuple[Array, dict[str, Any]]:
        """Returns logits_BxKxV, and what modules have sown."""
        inputs = (masked.ids_BxL, masked.attention_BxL, masked.positions_BxK)
        return self.module.forward(params, *inputs, dropout_key, rows_B)

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(Pretraining, name) for name in names)

    # How commands make the task

    @classmethod
    def open(cls, config: ConfigDict, workdir: Workdir, manifest: Manifest) -> Self:
        """Returns the task of a run that is trained."""
        info = DatasetInfo.from_manifest(manifest)
        starts_V = word_starts(config, workdir)
        task = cls(config, info, word_starts_V=starts_V, workdir=workdir, manifest=manifest)
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
                vocab_size=config.tokenizer.vocab_size,
                length=config.shards.length,
                records=config.data.global_batch,
            )
        starts_V = np.arange(info.vocab_size) % 3 > 0  # two in three start a word
        return cls(config, info, mesh=mesh, word_starts_V=starts_V, manifest=manifest)

    @classmethod
    def model_alone(cls, config: ConfigDict, info: DatasetInfo) -> Model:
        """Returns the model without a mesh, data or state, as commands that read a trained one make it."""
        task = cls.__new__(cls)
        task.config = config
        task.info = info
        return task.make_model()

    @property
    def manifest(self) -> Manifest:
        """The shards; raises InputError in a command that has none."""
        if self._manifest is None:
            raise InputError(
                f"{type(self).__qualname__} reads self.manifest, but this command has no data; name its shards (plan "
                "--workdir=DIR), or use a command that reads them (train, bench --parts loop)."
            )
        return self._manifest

    # What the loop calls

    def batch_shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        ids = jax.ShapeDtypeStruct((rows, self.info.length), jnp.int32)
        column = jax.ShapeDtypeStruct((rows,), jnp.uint32)
        columns = dict.fromkeys(("record_id", "epoch", "row"), column)
        return {"input_ids": ids, "attention_mask": ids, **columns}

    def make_batch(self, ids_BxL: np.ndarray) -> Batch:
        """Returns rows of tokens as a batch on the devices, without padding, numbered from 0."""
        return sharding.put_batch(batches.in_memory(ids_BxL), self.mesh, len(ids_BxL))

    def init_params(self, key: Array, counts_V: Array | None = None) -> Params:
        """Returns random parameters, primed if the counts of the tokens are given."""
        params = self.module.init_params(key)
        if counts_V is None:
            return params
        try:
            return priming.prime(params, self.module.config, counts_V, jax.random.fold_in(key, 1))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"config.model.init = primed: the model of {type(self).__qualname__} lacks what is primed ({error}), "
                "or has it in other shapes; set it to stock."
            ) from error

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
        source, lines = warm_start.read_source(
            self.config, self.module.config, self.abstract_state.params
        )
        taken, fit_lines = warm_start.fit(
            source,
            self.abstract_state.params,
            pad_id=self.module.config.pad_token_id,
            vocab_size=self.info.vocab_size,
            tokens=self.workdir.tokenizer_folder,
        )
        if cluster.is_primary():
            changes = entry.changes(source.meta.get("class", {}), entry.describe(type(self)))
            say("\n".join(fit_lines + changes + lines))
        state = self.init()
        ema = None if state.ema is None else warm_start.start(state.ema, taken)
        return state.replace(params=warm_start.start(state.params, taken), ema=ema)

    def batches(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        return train_batches(self.config, self.manifest, self.mesh, self.stages, start=start)

    def make_eval_step(self) -> evaluation.EvalStep:
        """Returns the step of evaluation, which draws masks by a seed of its own and drops nothing out."""
        return evaluation.make_eval_step(
            self.module,
            self.eval_masking,
            self.mesh,
            sharding.shardings_of(self.abstract_state).params,
            metrics=self.metrics,
        )

    def evaluate(self, params: Params) -> dict[str, float]:
        """Returns the scores of the validation split and of the sets of evaluate.sets."""
        return score_split(
            self.config, self.manifest, self.mesh, self.eval_step, params, "validation"
        )

    def describe(self) -> dict[str, str]:
        """Returns what is read, for the lines before the first step."""
        train_split = self.manifest.splits["train"]
        rows = f"{train_split.records:,} rows of {self.info.length} tokens"
        if train_split.tokens is not None:
            rows += f", {train_split.tokens:,} tokens of text"
        if train_split.documents is not None:
            rows += f", {train_split.documents:,} documents"
        if train_split.duplicates:
            rows += f" ({train_split.duplicates:,} duplicates left out)"
        return {"data": rows, "validation": f"{self.manifest.splits['validation'].records:,} rows"}

    def epoch(self, step: int) -> float | None:
        if not self.config.train.epochs:
            return None
        return self.stages.rows_read(step) / self.info.records

    def tokens_read(self, step: int) -> int:
        """Returns the tokens that the steps up to `step` read, padding left out."""
        return round(self.stages.rows_read(step) * self.info.length * self.info.real_share)

    def flops_per_token(self, length: int) -> float:
        """Returns the useful FLOPs of a step per token, padding aside."""
        return flops.per_token(
            self.module,
            self.abstract_state.params,
            # others that a token can attend to, about
            length=min(length, self.info.length * self.info.real_share),
            predicted_share=self.config.masking.rate,
            vocab_size=self.info.vocab_size,
        )

    def useful_flops(self, step: int) -> float:
        total = 0.0
        for part in self.stages.between(self.stages.start + 1, step):
            total += part.count * part.rows * self.flops_per_token(part.length)
        return total * self.info.length * self.info.real_share

    def words_per_row(self) -> float:
        """Returns the words in a row, about, as cut at white space."""
        words_V = tokenizer.counted_words(
            str(self.workdir.tokenizer), key="config.checkpoint.milestones"
        )
        return batches.words_per_row(self.manifest, words_V)

    def make_hooks(self, notify: Callable[[str], None]) -> list[MetricsHook]:
        return [LossSpikes(self.config, self.workdir, self.manifest, notify, stages=self.stages)]


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
    config: ConfigDict,
    manifest: Manifest,
    mesh: Mesh,
    eval_step: Callable,
    params: Params,
    split: str,
    *,
    draws: int = 1,
) -> dict[str, float]:
    """Returns the scores of a split, the mean of a mixture's folders; those of its sets are "NAME/loss" and so on."""
    rows = config.evaluate.batch

    def score(data: Manifest) -> dict[str, float]:
        local = sharding.local_rows(mesh, rows)
        return evaluation.score(
            eval_step,
            params,
            batches.eval_batches(data, split=split, batch=rows, rows=local),
            mesh=mesh,
            rows=rows,
            tokens_per_byte=_tokens_per_byte(data, split),
            draws=draws,
            count=math.ceil(data.splits[split].records / rows),
        )

    return _score_mixture(manifest, split, score) if manifest.mixture else score(manifest)


def _score_mixture(
    manifest: Manifest, split: str, score: Callable[[Manifest], dict[str, float]]
) -> dict[str, float]:
    """Returns the mean of a mixture's folders, and "NAME/loss" and so on of its sets."""
    folders = manifest.mixture
    sets = {
        name: data
        for name, data in manifest.sets.items()
        if split in data.splits and split != "train"
    }
    scored = [folder.manifest for folder in folders] + list(sets.values())
    scores = {
        folder: score(data) for folder, data in {data.folder: data for data in scored}.items()
    }
    mean = evaluation.mean(
        [folder.share for folder in folders],
        [scores[folder.manifest.folder] for folder in folders],
        [_tokens_per_byte(folder.manifest, split) for folder in folders],
    )
    for name, data in sets.items():
        mean = mean | {f"{name}/{key}": score for key, score in scores[data.folder].items()}
    return mean


def _tokens_per_byte(manifest: Manifest, split: str) -> float | None:
    """Returns None as well if many tokens are unknown: no score is of the bytes that they stand for."""
    counts = manifest.splits[split]
    is_scored = (
        counts.text_bytes
        and (counts.unknown_tokens or 0) <= tokenizer_checks.UNKNOWN * counts.tokens
    )
    return counts.tokens / counts.text_bytes if is_scored else None


def document_start(config: ConfigDict, info: DatasetInfo) -> int | None:
    """Returns the id at which documents of a row are told apart, None if data.isolate_documents is off."""
    if not config.data.isolate_documents:
        return None
    cls_id = info.special_ids["cls"]
    for role in ("sep", "unk"):
        if info.special_ids.get(role) == cls_id:
            raise InputError(
                f"config.data.isolate_documents = True: the cls token of the tokenizer is its {role} token too, so it "
                "doesn't show where a document starts; set it to false, or use another tokenizer."
            )
    return cls_id


def word_starts(config: ConfigDict, workdir: Workdir) -> np.ndarray | None:
    """Returns which tokens of the workdir's tokenizer start a word, or None if config.masking.kind needs no words."""
    kind = config.masking.kind
    if kind == "token":
        return None
    return tokenizer.word_starts(str(workdir.tokenizer), key=f"config.masking.kind = {kind}")
