"""Length and cost of a run: the same for a config and for the config that a checkpoint holds."""

import pytest

from mlm import config as configs
from mlm.model import flops
from mlm.training import recipe
from tests.fixtures import tiny_config


def flat(*overrides: str):
    return configs.flatten(tiny_config(*overrides))


def test_steps_and_warmup():
    assert recipe.total_steps(flat("train.steps=7"), records=10_000) == 7
    epochs = flat("train.steps=0", "train.epochs=1.5", "data.global_batch=16")
    assert recipe.total_steps(epochs, records=100) == 10, "150 rows in batches of 16, the last one is whole too"
    assert recipe.warmup_steps(flat("schedule.warmup_steps=5", "schedule.warmup_fraction=0"), 1000) == 5
    assert recipe.warmup_steps(flat("schedule.warmup_steps=0", "schedule.warmup_fraction=0.06"), 1000) == 60
    assert recipe.short_steps(flat(), 10) == 0
    assert recipe.short_steps(flat("data.short_length=8", "data.short_share=0.7"), 10) == 7


def test_flops_know_the_falling_rate_and_the_short_rows():
    """The steps of short rows and those of long ones, each with its own attention, at the mean rate of the run."""
    run = flat("masking.rate=0.4", "masking.end_rate=0.2", "data.short_length=8", "data.short_share=0.5")
    sizes = {"hidden": 32, "layers": 1, "intermediate": 64, "vocab_size": 500}

    def by_hand(steps: int, length: int, rate: float) -> float:
        return steps * 16 * 32 * flops.train_flops_per_token(**sizes, length=length, predicted_share=rate)

    whole = recipe.useful_flops(run, 500, step=11, steps=11)
    assert whole == pytest.approx(by_hand(6, 8, 0.3) + by_hand(5, 32, 0.3))
    half = recipe.useful_flops(run, 500, step=6, steps=11)
    assert half == pytest.approx(by_hand(6, 8, 0.35)), "stopped halfway, the rate has fallen by half"
    assert recipe.tokens_per_step(run) == 16 * 32
