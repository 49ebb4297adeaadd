"""A task that compiles in a moment, for the loop and the step, which know nothing of a model.

It predicts a number at each token: embeddings of words and places, dropout, one column of weights. A batch is a
function of its number.

Dimensions: B rows, L tokens, V words, H hidden.
"""

import functools
import itertools
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from transformers import RobertaConfig

from mlm import logs
from mlm.data.stages import make_stages
from mlm.model.loss import Mean, RowSums
from mlm.training import optimizer, sharding, train
from mlm.training.task import Task
from mlm.workdir import Workdir
from tests.support.tiny import tiny_config

VOCABULARY = 16
HIDDEN = 8
RECORDS = 100
RULES = (
    ("table/kernel", P("fsdp", "tensor")),
    ("position_embeddings/embedding", P(None, "fsdp")),
    ("head/kernel", P("tensor", None)),
    ("head/bias", P()),
)


class Toy(Task):
    """With dropout of 0.2 where `model.hidden_dropout` is not 0."""

    def __init__(self, config, mesh=None):
        self.config = config
        self.mesh = mesh or sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
        self.stages = make_stages(config, RECORDS)
        self.schedule = optimizer.make_schedule(config, self.stages.steps)
        self.optimizer = optimizer.make_optimizer(config.optimizer, self.schedule)
        self.module = types.SimpleNamespace(partition_rules=lambda: RULES)
        self.init, self.abstract_state = train.make_init(self)
        self.train_step = train.make_train_step(self)
        self.metadata = {
            "records": RECORDS,
            "vocab_size": VOCABULARY,
            "special_ids": {},
            "all_special_ids": [],
            # for those who ask whether two checkpoints are of one model
            "model": RobertaConfig(vocab_size=VOCABULARY).to_dict(),
        }
        self.data_fingerprint = "toy"
        self.poisoned: set[int] = set()  # steps whose loss is not finite

    def init_params(self, key):
        keys = jax.random.split(key, 3)
        places = jax.random.normal(keys[2], (self.config.model.positions, HIDDEN))
        return {
            "table": {"kernel": jax.random.normal(keys[0], (VOCABULARY, HIDDEN))},
            "position_embeddings": {"embedding": places},
            "head": {"kernel": jax.random.normal(keys[1], (HIDDEN, 1)), "bias": jnp.zeros(1)},
        }

    def batch_shapes(self, rows):
        return jax.eval_shape(lambda: batch_of(rows, length=self.config.shards.length))

    def inputs(self, batch, step):
        """The weight of a token falls with the schedules; records from 10,000 up are poisoned."""
        weights_BxL = batch["attention_mask"] * (1 - 0.5 * step / self.stages.steps)
        target_B = jnp.where(
            batch["record_id"] < 10_000, batch["record_id"] % 5 + batch["epoch"], jnp.nan
        )
        return {
            "ids": batch["input_ids"],
            "weights": weights_BxL,
            "target": target_B.astype(jnp.float32),
        }

    def forward(self, params, inputs, rows_B, dropout_key):
        places_LxH = params["position_embeddings"]["embedding"][: inputs["ids"].shape[1]]
        # XLA on CPU can't partition a gather from a table that is split over two axes.
        hidden_BxLxH = (
            jax.nn.one_hot(inputs["ids"], VOCABULARY) @ params["table"]["kernel"] + places_LxH
        )
        if self.config.model.hidden_dropout:
            keys_B = jax.vmap(lambda row: jax.random.fold_in(dropout_key, row))(rows_B)
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, hidden_BxLxH.shape[1:]))(
                keys_B
            )
            hidden_BxLxH = hidden_BxLxH * kept
        return hidden_BxLxH @ params["head"]["kernel"][:, 0] + params["head"]["bias"], {}

    def loss(self, logits_BxL, inputs):
        error_BxL = jnp.square(logits_BxL - inputs["target"][:, None]) * inputs["weights"]
        return RowSums(jnp.sum(error_BxL, -1), jnp.sum(inputs["weights"], -1), None)

    def metrics(self, logits_BxL, inputs, intermediates):
        """The mean weight of the tokens, those of padding included."""
        sum_B = jnp.sum(inputs["weights"], -1)
        return {"visible": Mean(sum_B, jnp.full_like(sum_B, inputs["weights"].shape[1]))}

    def initial_state(self):
        return self.init()

    def batches(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        for step in itertools.count(start + 1):
            stage = self.stages.stage_at(step)
            batch = batch_of(stage.rows, stage.batch_of(step), self.config.shards.length)
            if step in self.poisoned:
                batch["record_id"] += 10_000
            yield batch

    def evaluate(self, params):
        return {"loss": float(jnp.abs(params["table"]["kernel"]).mean())}

    def tokens_read(self, step):
        return self.stages.own_rows_read(step) * self.config.shards.length

    def flops_per_token(self, length):
        return 10.0 * length

    def useful_flops(self, step):
        return 1000.0 * (step - self.stages.start)

    def words_per_row(self):
        return 25.0


def batch_of(rows: int, number: int = 0, length: int = 32) -> dict[str, np.ndarray]:
    """A batch whose last row is half padding."""
    rng = np.random.default_rng(number)
    attention = np.ones((rows, length), np.int32)
    attention[-1, length // 2 :] = 0
    return {
        "input_ids": rng.integers(VOCABULARY, size=(rows, length), dtype=np.int32),
        "attention_mask": attention,
        "record_id": rng.integers(1000, size=rows).astype(np.uint32),
        "epoch": np.full(rows, number % 2, np.uint32),
        "row": np.arange(rows, dtype=np.uint32),
    }


@functools.cache
def toy(*overrides: str, mesh: tuple[int, int, int] = (1, 1, 1)) -> Toy:
    """Of a tiny config, on a mesh of the first devices; compiled once, for tests that change nothing of it."""
    devices = jax.devices()[: int(np.prod(mesh))]
    shape = dict(zip(sharding.AXES, mesh, strict=True))
    return Toy(
        tiny_config("data.lanes=1", *overrides), sharding.make_mesh(**shape, devices=devices)
    )


def logged_task(
    *overrides: str, hooks=(), tokens_read=lambda step: 1000.0 * step, epoch=None
) -> types.SimpleNamespace:
    """What a log is told of a task."""
    config = tiny_config(*overrides)
    return types.SimpleNamespace(
        config=config,
        stages=make_stages(config, RECORDS),
        tokens_read=tokens_read,
        flops_per_token=lambda length: 2.0,
        epoch=lambda step: epoch and step * epoch,
        make_hooks=lambda notify: list(hooks),
    )


def run(folder, *overrides: str, task: Toy | None = None) -> Workdir:
    """Trains in a workdir, as the command does."""
    task = task or toy(*overrides)
    workdir = Workdir(str(folder))
    train.train(task.config, workdir, task)
    return workdir


def losses(workdir: Workdir) -> list[float]:
    return [line["loss"] for line in logs.read(workdir.metrics, "train")]
