"""check_task: what it refuses of a researcher's class, and in which words."""

import re

import jax.numpy as jnp
import pytest

from mlm.model.loss import Mean, RowSums
from mlm.tasks.pretraining import Pretraining
from mlm.testing import check_task
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.standard


class Wrong(Pretraining):
    """In one place each: masks, the loss, the batches after a restart, and two metrics."""

    def make_masking(self):
        """Masks a batch of 8 rows as if they were other records."""
        draw = super().make_masking()
        return lambda key, ids_BxL, attention_BxL, record_B, *rest: draw(
            key, ids_BxL, attention_BxL, record_B + (len(record_B) == 8), *rest
        )

    def loss(self, logits_BxKxV, masked):
        """Divides by the weight of a microbatch, not of the batch."""
        sums = super().loss(logits_BxKxV, masked)
        return RowSums(sums.loss_B / jnp.sum(sums.weight_B), sums.weight_B, sums.correct_B)

    def batches(self, start):
        for number, batch in enumerate(super().batches(start)):
            yield batch | {"epoch": batch["epoch"] + number % 256}

    def metrics(self, logits_BxKxV, masked, intermediates):
        """How rows are split over devices, and a mean of rows that may have no predictions."""
        ones_B = jnp.ones(len(logits_BxKxV))
        weight_B = masked.weights_BxK.sum(-1)
        return {
            "row_shards": Mean(ones_B * self.mesh.shape["data"], ones_B),
            "mean_of_rows": Mean(weight_B / weight_B, ones_B),
        }


class RareAccuracy(Pretraining):
    def metrics(self, logits_BxKxV, masked, intermediates):
        rare_BxK = masked.weights_BxK * (masked.labels_BxK > 100)
        right_BxK = rare_BxK * (jnp.argmax(logits_BxKxV, -1) == masked.labels_BxK)
        return {"rare_accuracy": Mean(right_BxK.sum(-1), rare_BxK.sum(-1))}


def test_a_metric_of_ones_own_is_the_same_on_devices_with_microbatches_and_after_an_end():
    settings = (
        "model.hidden_dropout=0.1",
        "model.attention_dropout=0.1",
        "optimizer.ema_decay=0.9",
    )
    check_task(RareAccuracy, tiny_config(*settings), {"model.layers": 1})


def test_says_what_is_wrong_and_where():
    with pytest.raises(AssertionError) as error:
        check_task(Wrong, tiny_config("mesh.fsdp=2"), {"model.layers": 1})
    message = str(error.value)
    for what in (
        "Wrong: ",
        "labels_BxK depends",
        "train.accumulate = 2, evaluate.batch = 24: train, step 1, loss",
        "8 devices, .*row_shards is 8",
        "mean_of_rows is not finite",
        "resumed: .*'step': 3",
    ):
        assert re.search(what, message), what
    assert not re.search("mesh.fsdp.*train, step 1, loss", message), (
        "there the compiler splits the batch"
    )
