"""Masks: a pure function of (seed, record, epoch), with the statistics that were asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm.model.masking import TokenMasking
from tests.fixtures import FACTS, random_batch

MASKING = TokenMasking(0.15, 0.8, 0.1, 4, (0, 1, 2, 3, 4), FACTS.vocab_size)


def draw(masking: TokenMasking, batch: dict, seed: int = 0):
    arguments = (batch[key] for key in ("input_ids", "attention_mask", "record_id", "epoch"))
    return jax.tree.map(np.asarray, jax.jit(masking)(jax.random.key(seed), *arguments))


def test_rate_and_shares_within_four_sigma():
    rows, length = 4096, 32
    batch = random_batch(rows)
    masked = draw(MASKING, batch)
    chosen = masked.weights_BxK > 0
    ordinary = (batch["input_ids"] > 4) & (batch["attention_mask"] > 0)

    # A row of m ordinary tokens has floor or ceil of rate * m predictions, so only the rounding varies.
    wanted = 0.15 * ordinary.sum(1)
    fraction = wanted - np.floor(wanted)
    sigma = np.sqrt(np.sum(fraction * (1 - fraction)))
    assert abs(chosen.sum() - wanted.sum()) < 4 * sigma
    assert np.all(np.abs(chosen.sum(1) - wanted) < 1)

    labels, read = masked.labels_BxK[chosen], np.take_along_axis(masked.ids_BxL, masked.positions_BxK, 1)[chosen]
    total = len(labels)
    same_by_chance = 0.1 / (FACTS.vocab_size - 5)  # a random token can be the old one
    for share, count in (
        (0.8, np.sum(read == 4)),
        (0.1 + same_by_chance, np.sum(read == labels)),
        (0.1 - same_by_chance, np.sum((read != 4) & (read != labels))),
    ):
        assert abs(count - share * total) < 4 * np.sqrt(total * share * (1 - share)), (share, count / total)

    # Every position of a full row is as likely as any other.
    full = ordinary.sum(1) == ordinary.sum(1).max()
    hits = np.zeros((rows, length))
    np.put_along_axis(hits, masked.positions_BxK, masked.weights_BxK, 1)
    per_position = hits[full].sum(0)[ordinary[full][0]]
    mean = per_position.mean()
    assert np.all(np.abs(per_position - mean) < 5 * np.sqrt(mean))


def test_specials_are_never_touched_nor_drawn():
    batch = random_batch(2048)
    masked = draw(TokenMasking(0.5, 0.0, 1.0, 4, (0, 1, 2, 3, 4), FACTS.vocab_size), batch)
    special = (batch["input_ids"] <= 4) | (batch["attention_mask"] == 0)
    assert np.array_equal(masked.ids_BxL[special], batch["input_ids"][special])
    assert np.all(masked.ids_BxL[~special] > 4)
    assert np.all(masked.ids_BxL < FACTS.vocab_size)
    chosen = masked.weights_BxK > 0
    assert np.all(masked.labels_BxK[chosen] > 4)
    drawn = np.take_along_axis(masked.ids_BxL, masked.positions_BxK, 1)[chosen]
    assert len(np.unique(drawn)) == FACTS.vocab_size - 5, "every ordinary token must be drawn in so many draws"


def test_special_ids_need_not_come_first():
    masking = TokenMasking(0.5, 0.0, 1.0, 499, (7, 250, 499), FACTS.vocab_size)
    batch = random_batch(1024)
    masked = draw(masking, batch)
    changed = masked.ids_BxL != batch["input_ids"]
    assert changed.sum() > 1000
    assert not np.isin(masked.ids_BxL[changed], (7, 250, 499)).any()
    assert not np.isin(batch["input_ids"][changed], (7, 250, 499)).any()


def test_depends_on_seed_record_and_epoch_alone():
    batch = random_batch(64)
    whole = draw(MASKING, batch)
    order = np.random.default_rng(1).permutation(64)[:24]
    part = draw(MASKING, {key: value[order] for key, value in batch.items()})
    for a, b in zip(whole, part, strict=True):
        assert np.array_equal(a[order], b), "a row's mask must not depend on the rows beside it"
    for changed in ({"epoch": batch["epoch"] + 1}, {"record_id": batch["record_id"] + 1}):
        assert not np.array_equal(draw(MASKING, batch | changed).positions_BxK, whole.positions_BxK)
    assert not np.array_equal(draw(MASKING, batch, seed=1).positions_BxK, whole.positions_BxK)


def test_same_bits_on_one_and_eight_devices():
    batch = random_batch(16)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.NamedSharding(mesh, jax.P("data"))
    on_eight = draw(MASKING, {key: jax.device_put(value, spread) for key, value in batch.items()})
    for a, b in zip(draw(MASKING, batch), on_eight, strict=True):
        assert np.array_equal(a, b)


def test_golden_row():
    """These numbers may change only with the format of a run: a change here breaks the resume of every run."""
    batch = {key: value[:1] for key, value in random_batch(16, seed=3).items()}
    masked = draw(MASKING, batch)
    assert masked.positions_BxK.tolist() == [[4, 5, 22, 30, 29]]
    assert masked.weights_BxK.tolist() == [[1.0, 1.0, 1.0, 1.0, 1.0]]
    assert np.flatnonzero(masked.ids_BxL[0] != batch["input_ids"][0]).tolist() == [4, 5, 22, 29, 30]


@pytest.mark.parametrize("ordinary", [0, 1, 2])
def test_rows_with_few_tokens(ordinary: int):
    ids = np.full((512, 32), 1, np.int32)
    ids[:, :ordinary] = 9
    batch = {
        "input_ids": ids,
        "attention_mask": (ids != 1).astype(np.int32),
        "record_id": np.arange(512, dtype=np.uint32),
        "epoch": np.zeros(512, np.uint32),
    }
    masked = draw(TokenMasking(1.0, 1.0, 0.0, 4, (0, 1, 2, 3, 4), 500), batch)
    assert np.all(masked.weights_BxK.sum(1) == ordinary)
    assert np.all(masked.ids_BxL[:, :ordinary] == 4)
    assert np.all(masked.ids_BxL[:, ordinary:] == 1)
    assert jnp.all(jnp.isfinite(masked.weights_BxK))
