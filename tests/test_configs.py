"""The shipped configs: valid, runnable as they say, and their arithmetic is right."""

import importlib
import re
import shlex

import jax
import pytest

from mlm import config as configs
from mlm.data.manifest import DatasetInfo
from mlm.data.stages import batch_sizes, make_stages
from mlm.model import families, flops
from tests import ROOT

FILES = sorted(path.name for path in (ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_every_config_is_valid_and_says_how_to_run_it(name):
    config = configs.load(f"configs/{name}", [])
    assert config.is_locked
    text = importlib.import_module(f"configs.{name[:-3]}").__doc__
    if name != "base.py":
        assert f"--config=configs/{name} --workdir=" in text, "the command must name this very file"
        assert set(re.findall(r"--config=configs/(\w+\.py)", text)) == {name}
    if rehearsal := re.search(r"rehearse it with (.*?)\)\n", text, re.DOTALL):
        flags = shlex.split(rehearsal[1])
        configs.load(f"configs/{name}", [flag.removeprefix("--config.") for flag in flags])
    for mentioned in re.findall(r"configs/\w+\.py", text):
        assert (ROOT / mentioned).is_file()


def mflop_per_token(name: str) -> tuple[float, float]:
    """Returns (MFLOP per token of the body, of the tail (mlm/model/flops.py) on every position)."""
    config = configs.load(f"configs/{name}", [])
    sizes = {"length": config.shards.length, "vocab_size": config.tokenizer.vocab_size}
    module = families.make_module(config.model, DatasetInfo.synthetic(records=1, **sizes))
    params = jax.eval_shape(module.init_params, jax.random.key(0))
    body, whole = (
        flops.per_token(module, params, predicted_share=rate, **sizes) / 1e6 for rate in (0, 1)
    )
    return body, whole - body


PUBLISHED = [
    "roberta_base.py",
    "roberta_large.py",
    "tf_tpu_wikitext.py",
    "wikitext103_large.py",
    *(name for name in FILES if name.startswith(("modernbert_base", "modernbert_large"))),
]


@pytest.mark.standard
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_arithmetic_of_the_docstrings(name):
    text = importlib.import_module(f"configs.{name[:-3]}").__doc__.replace(",", "")
    text = " ".join(text.split())
    body, head = mflop_per_token(name)
    rate = configs.load(f"configs/{name}", []).masking.rate
    assert f"{body + rate * head:.1f} MFLOP" in text
    assert f"({body:.1f} body + {rate:.0%} of the tail's {head:.1f})" in text


def test_the_arithmetic_of_the_budget_on_tpus():
    """Tokens, steps and dollars follow from the figures that the docstring quotes."""
    text = " ".join(importlib.import_module("configs.budget_v5e8").__doc__.split())
    config = configs.load("configs/budget_v5e8.py", [])
    batch = config.data.global_batch * config.shards.length
    tokens = config.train.hours * 3600 * 964_000
    assert f"{tokens / 1e9:.1f}e9 tokens in {tokens / batch / 1e3:.0f},000 steps" in text
    assert f"{config.train.hours * 8 * 1.2:.0f} dollars at 1.20" in text
    assert f"are {batch:,}: 16 rows" in text


def test_published_recipes():
    """Warmup, and the tokens of ModernBERT's three stages: growing batches, longer rows, decay."""
    steps = {"roberta_base": 24_000, "roberta_large": 30_000, "tf_tpu_wikitext": 14_675}
    for name, warmup in steps.items():
        config = configs.load(f"configs/{name}.py", [])
        assert round(config.schedule.warmup * config.train.steps) == warmup
    for size, tokens, rate in (("base", 10e9, 3e-4), ("large", 2e9, 5e-5)):
        first = configs.load(f"configs/modernbert_{size}.py", [])
        *growing, _ = batch_sizes(first)
        for stage in growing:
            read = (stage.last - stage.first + 1) * stage.rows * 1024
            assert read == pytest.approx(tokens, rel=1e-3)
        read = make_stages(first, records=1).rows_read(first.train.steps) * 1024
        assert read == pytest.approx(1719e9, rel=1e-4)
        long = configs.load(f"configs/modernbert_{size}_long.py", [])
        assert long.train.branch_from == f"runs/modernbert_{size}@{first.train.steps}"
        decay = round(long.schedule.decay_fraction * long.train.steps)
        start = long.train.steps - decay
        tokens_per_step = long.data.global_batch * 8192
        assert decay * tokens_per_step == pytest.approx(50e9, rel=1e-4)
        assert (start - first.train.steps) * tokens_per_step == pytest.approx(250e9, rel=1e-4)
        assert long.optimizer.learning_rate == rate
