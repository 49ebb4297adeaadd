"""Pseudo-perplexity: that of a plain loop over transformers' own model, whatever the batch and the devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from transformers import FlaxRobertaForMaskedLM

from mlm.data import batches, tokenizer
from mlm.inference import pseudo_perplexity
from mlm.training import sharding
from tests.support.corpora import real_texts

SPECIAL = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def rows(model) -> tuple[np.ndarray, np.ndarray]:
    """Three rows of 32 tokens: one full, one with </s> and <mask> in its middle, one half padding."""
    tok = tokenizer.load(model.tokenizer)
    ids = np.concatenate(tok(real_texts()[40:80])["input_ids"])[:96].reshape(3, 32).astype(np.int32)
    ids[1, 10] = tok.sep_token_id
    ids[1, 11] = tok.mask_token_id
    attention = np.ones_like(ids)
    attention[2, 16:] = 0
    ids[attention == 0] = tok.pad_token_id
    return ids, attention


def score(model, rows, *, batch: int, devices: int) -> dict[str, float]:
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), sharding.AXES)
    shardings = sharding.tree_shardings(
        model.params, mesh, model.params, model.module.partition_rules()
    )
    step = pseudo_perplexity.make_step(
        module=model.module, mask_id=4, vocab_size=1000, mesh=mesh, param_shardings=shardings
    )
    params = jax.device_put(model.params, shardings)
    found = pseudo_perplexity.score(
        step, params, *rows, special_ids=SPECIAL, mesh=mesh, batch=batch
    )
    assert step._cache_size() == 1, "every batch must have the same shape"
    return found


def test_equals_a_plain_loop_over_transformers_model(model, rows):
    """One masked position at a time, one row at a time, through the stock full head; and on two devices."""
    stock = FlaxRobertaForMaskedLM(model.config, _do_init=False)
    forward = jax.jit(lambda ids, attention: stock(ids, attention, params=model.params).logits)
    total = 0.0
    right = 0
    count = 0
    for ids, attention in zip(*rows, strict=True):
        for position in range(len(ids)):
            if attention[position] == 0 or ids[position] in SPECIAL:
                continue
            masked = ids.copy()
            masked[position] = 4
            logits = forward(masked[None], attention[None])[0, position]
            total += float(jax.nn.log_softmax(logits.astype(jnp.float32))[ids[position]])
            right += int(jnp.argmax(logits) == ids[position])
            count += 1
    found = score(model, rows, batch=16, devices=1)
    other = score(model, rows, batch=6, devices=2)
    assert found["pseudo_tokens"] == count
    assert found["pseudo_rows"] == 3
    assert found["pseudo_loss"] == pytest.approx(-total / count, rel=1e-5)
    assert found["pseudo_perplexity"] == pytest.approx(math.exp(-total / count), rel=1e-4)
    assert found["pseudo_accuracy"] == pytest.approx(right / count)
    assert other == {key: pytest.approx(value, rel=1e-6) for key, value in found.items()}


def test_a_sample_is_spread_evenly_over_the_split(manifest):
    records = manifest.splits["validation"].records
    whole = list(batches.eval_batches(manifest, split="validation", batch=16, rows=(0, 16)))
    every = np.concatenate([batch["input_ids"][batch["valid"] > 0] for batch in whole])
    ids, attention = pseudo_perplexity.sample(iter(whole), count=4, records=records)
    assert np.array_equal(ids, every[[records * odd // 8 for odd in (1, 3, 5, 7)]])
    assert attention.shape == ids.shape
    all_ids, _ = pseudo_perplexity.sample(iter(whole), count=10 * records, records=records)
    assert np.array_equal(all_ids, every), "asked for more than there are: each of them once"
