"""Masked-language-model pretraining (Devlin et al., 2019; Liu et al., 2019), as a task of the loop.

To change one part, subclass `Pretraining`, override one of its methods, and start commands by
`mlm.__main__.main(pretraining=...)`. Keys of a config's group `mine` are yours: `self.config.mine`.
`mlm.testing.check_task` tests a subclass.

Dimensions: B rows, L tokens in a row, K predictions in a row, V padded vocabulary.
"""

import dataclasses
from typing import Any

import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm.data.manifest import DatasetInfo, Manifest
from mlm.data.stages import make_stages
from mlm.errors import InputError
from mlm.model import attention, families, masking
from mlm.model.attention import Attention
from mlm.model.keys import make_key
from mlm.model.loss import Mean, RowSums, masked_cross_entropy
from mlm.model.module import Model, Params
from mlm.model.token_masking import Masked, Masking, TokenMasking
from mlm.tasks.pretraining_data import PretrainingData, document_start
from mlm.training import optimizer, schedules, sharding, train
from mlm.training.task import Batch
from mlm.workdir import Workdir


class Pretraining(PretrainingData):
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
        attend = self.make_attention(module)
        compute = dataclasses.replace(module.compute, attend=attend, cls_id=document_start(config, info))
        self.module = module.clone(compute=compute)
        self.masking = self.make_masking()
        self.masking_rate = schedules.rate_schedule(config.masking.rate, config.masking.end_rate, self.stages.steps)
        self.schedule = schedules.make_schedule(config, self.stages.steps)
        self.optimizer = self.make_optimizer()

        self.init, self.abstract_state = train.make_init(self)  # init takes () or token counts [V]
        self.train_step = train.make_train_step(self)
        self.eval_masking = masking.make_eval_masking(self.make_eval_masking(), config.evaluate.count)
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
        maskers = ("make_masking", "make_eval_masking", "inputs", "forward")
        masks_itself = any(getattr(type(self), name) is not getattr(Pretraining, name) for name in maskers)
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

    def inputs(self, batch: Batch, position: Array) -> Masked:
        """Returns the batch with masks drawn, at the rate of a step of the schedules."""
        rate = None if self.masking_rate is None else self.masking_rate(position)
        columns = (batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch"))
        return self.masking(make_key(self.config.masking.seed), *columns, rate)

    def forward(
        self, params: Params, masked: Masked, rows_B: Array, dropout_key: Array
    ) -> tuple[Array, dict[str, Any]]:
        """Returns logits_BxKxV, and what modules have sown."""
        inputs = (masked.ids_BxL, masked.attention_BxL, masked.positions_BxK)
        return self.module.forward(params, *inputs, dropout_key, rows_B)
