"""Scores of masked spans: those of a plain loop over transformers' own model, whatever the batch and the devices."""

import jax
import numpy as np
import pytest
from transformers import FlaxRobertaForMaskedLM

from mlm.data import batches, tokenizer
from mlm.inference import pseudo_perplexity, spans
from mlm.inference.forward import put_on_devices
from tests.support.corpora import real_texts
from tests.support.tiny import meshes_of, tiny_config

MASK = 4


@pytest.fixture(scope="module")
def rows(model) -> list[list[int]]:
    """One as long as the positions, with </s> and <mask> in its middle, and a shorter one."""
    tok = tokenizer.load(model.tokenizer)
    ids = np.concatenate(tok(real_texts()[40:80])["input_ids"]).tolist()
    return [[*ids[:10], tok.sep_token_id, MASK, *ids[10:30]], ids[32:48]]


def score(model, rows, spans_P, *, batch: int, devices: int, **settings) -> np.ndarray:
    with meshes_of(devices):
        mesh, padded = put_on_devices(tiny_config(f"evaluate.batch={batch}"), model)
    settings |= {"mask_id": MASK, "batch": batch, "multiple": 16}
    module = padded.module
    return np.array(spans.score(module, padded.params, mesh, model, rows, spans_P, **settings))


@pytest.mark.parametrize("first_alone", [True, False])
def test_equals_a_plain_loop_over_transformers_model(model, rows, first_alone):
    """One row at a time, through the stock full head; and on two devices."""
    stock = FlaxRobertaForMaskedLM(model.config, _do_init=False)
    forward = jax.jit(lambda ids: stock(ids, params=model.params).logits)
    places = [
        (row, place, place + size)
        for row, ids in enumerate(rows)
        for place in range(0, len(ids) - 3, 3)
        for size in (1, 3)
    ]
    expected = []
    for row, first, stop in places:
        ids = np.array(rows[row])
        masked = ids.copy()
        masked[first:stop] = MASK
        predicted = np.arange(first, first + 1 if first_alone else stop)
        logits = forward(masked[None])[0, predicted]
        nats = -jax.nn.log_softmax(logits)[np.arange(len(predicted)), ids[predicted]].sum()
        expected.append((nats, (np.argmax(logits, axis=-1) == ids[predicted]).all()))
    spans_P = tuple(np.array(places).T)
    found = score(model, rows, spans_P, batch=16, devices=1, first_alone=first_alone)
    np.testing.assert_allclose(found, np.array(expected, float).T, rtol=1e-4)
    other = score(model, rows, spans_P, batch=6, devices=2, first_alone=first_alone)
    np.testing.assert_allclose(found, other, rtol=1e-5)


def test_a_sample_is_spread_evenly_over_the_split(manifest):
    records = manifest.splits["validation"].records
    whole = list(batches.eval_batches(manifest, split="validation", batch=16, rows=(0, 16)))
    every = np.concatenate([batch["input_ids"][batch["valid"] > 0] for batch in whole]).tolist()
    found = pseudo_perplexity.sample(iter(whole), count=4, records=records)
    assert found == [every[records * odd // 8] for odd in (1, 3, 5, 7)]
    found = pseudo_perplexity.sample(iter(whole), count=10 * records, records=records)
    assert found == every, "asked for more than there are: each of them once"
