"""Masks: a pure function of (seed, record, epoch), with the statistics that were asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm.model import masking
from mlm.model.token_masking import TokenMasking
from tests.model.masks import (
    KINDS,
    LONG,
    SPECIAL,
    draw,
    long_batch,
    make,
    ordinary_of,
    predicted,
    within,
)
from tests.support.tiny import INFO, random_batch

MASKING = TokenMasking(0.15, 0.8, 0.1, 4, SPECIAL, INFO.vocab_size)


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
    same_by_chance = 0.1 / (INFO.vocab_size - 5)  # a random token can be the old one
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
    masked = draw(TokenMasking(0.5, 0.0, 1.0, 4, (0, 1, 2, 3, 4), INFO.vocab_size), batch)
    special = (batch["input_ids"] <= 4) | (batch["attention_mask"] == 0)
    assert np.array_equal(masked.ids_BxL[special], batch["input_ids"][special])
    assert np.all(masked.ids_BxL[~special] > 4)
    assert np.all(masked.ids_BxL < INFO.vocab_size)
    chosen = masked.weights_BxK > 0
    assert np.all(masked.labels_BxK[chosen] > 4)
    drawn = np.take_along_axis(masked.ids_BxL, masked.positions_BxK, 1)[chosen]
    assert len(np.unique(drawn)) == INFO.vocab_size - 5, "every ordinary token must be drawn in so many draws"


def test_special_ids_need_not_come_first():
    masking = TokenMasking(0.5, 0.0, 1.0, 499, (7, 250, 499), INFO.vocab_size)
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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_predicts_its_rate_and_touches_nothing_else(kind):
    batch, _ = long_batch(4096)
    masking, ordinary = make(kind), ordinary_of(batch)
    masked = draw(masking, batch)
    found = predicted(masked, batch)
    most = {"token": 15, "word": 20, "span": 15}[kind]
    assert masked.positions_BxK.shape[1] == masking.max_predictions_per_row(96) == most
    assert all(len(set(row)) == len(row) for row in masked.positions_BxK), "positions must be distinct within a row"
    assert np.array_equal(found.sum(1), masked.weights_BxK.sum(1))
    assert not found[~ordinary].any()
    assert np.array_equal(masked.ids_BxL[~found], batch["input_ids"][~found])
    assert within(found.sum(1) - 0.15 * ordinary.sum(1)), "the mean number of predictions is rate * m"
    if kind != "word":
        assert np.all(np.abs(found.sum(1) - 0.15 * ordinary.sum(1)) < 1)
    read, labels = masked.ids_BxL[found], batch["input_ids"][found]
    for share, got in ((0.8, read == 4), (0.1 + 0.1 / 495, read == labels)):
        # Spans are decided as a whole: as independent as there are spans, of 5 tokens or so.
        assert abs(got.mean() - share) < 4 * np.sqrt(share * (1 - share) / len(got) * (16 if kind == "span" else 1))
    assert np.all(read[read != 4] > 4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_is_predicted_as_often(kind):
    batch, _ = long_batch(8192, 1)
    rows = ordinary_of(batch)[0]
    hits = predicted(draw(make(kind), batch), batch)[:-1]  # without the row that has padding
    deviations = (hits.mean(0)[rows] - 0.15) / np.sqrt(0.15 * 0.85 / len(hits))
    assert np.abs(deviations).max() < 4.5
    assert 0.4 < np.mean(deviations**2) < 1.8


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_depends_on_seed_record_and_epoch_alone(kind):
    batch, _ = long_batch(64)
    masking = make(kind)
    whole = draw(masking, batch)
    order = np.random.default_rng(1).permutation(64)[:24]
    part = draw(masking, {key: value[order] for key, value in batch.items()})
    for a, b in zip(whole, part, strict=True):
        assert np.array_equal(a[order], b), "a row's mask must not depend on the rows beside it"
    for changed in ({"epoch": batch["epoch"] + 1}, {"record_id": batch["record_id"] + 1}):
        assert not np.array_equal(draw(masking, batch | changed).positions_BxK, whole.positions_BxK)
    assert not np.array_equal(draw(masking, batch, seed=1).positions_BxK, whole.positions_BxK)


@pytest.mark.parametrize("kind", KINDS)
def test_static_masks_are_those_of_epoch_0(kind):
    batch, _ = long_batch(64)
    dynamic = draw(make(kind), batch)
    for epoch in (0, 7):
        masked = draw(make(kind, static=True), batch | {"epoch": np.full(64, epoch, np.uint32)})
        assert all(np.array_equal(a, b) for a, b in zip(masked, dynamic, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_higher_rate_adds_to_the_masks_of_a_lower_one(kind):
    batch, _ = long_batch(512)
    masking = make(kind, 0.3, end_rate=0.15, mask_share=0.4, random_share=0.3)
    masks = {rate: draw(masking, batch, rate=np.float32(rate)) for rate in (0.15, 0.2, 0.3)}
    for low, high in ((0.15, 0.2), (0.2, 0.3)):
        one, other = (predicted(masks[rate], batch) for rate in (low, high))
        assert np.all(other[one]) and other.sum() > 1.2 * one.sum()
        assert np.array_equal(masks[low].ids_BxL[one], masks[high].ids_BxL[one])
    for rate, masked in masks.items():
        assert masked.positions_BxK.shape[1] == masking.max_predictions_per_row(96), "one shape for every rate"
        assert within(masked.weights_BxK.sum(1) - rate * ordinary_of(batch).sum(1))
    constant = draw(dataclasses.replace(masking, end_rate=0.0), batch)
    assert np.array_equal(predicted(constant, batch), predicted(masks[0.3], batch))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mask_share", "random_share"), [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0)])
def test_shares_of_all_and_nothing(kind, mask_share, random_share):
    batch, _ = long_batch(512)
    masked = draw(make(kind, 0.4, mask_share, random_share), batch)
    found = predicted(masked, batch)
    read, labels = masked.ids_BxL[found], batch["input_ids"][found]
    assert np.all(masked.ids_BxL[ordinary_of(batch) & ~found] == batch["input_ids"][ordinary_of(batch) & ~found])
    if mask_share:
        assert np.all(read == 4)
    elif random_share:
        assert np.all(read > 4) and np.mean(read == labels) < 0.01
    else:
        assert np.array_equal(read, labels)


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


def test_independent_masks_have_the_rate_and_shares_of_the_collators():
    """Each ordinary token by itself: a binomial number of predictions in a row, 80/10/10, never a special token."""
    batch = random_batch(4096, 0, LONG)
    masked = draw(
        masking.make_eval_masking(dataclasses.replace(MASKING, end_rate=0.4, static=True), "independent"), batch
    )
    ordinary, found = ordinary_of(batch), predicted(masked, batch)
    assert masked.positions_BxK.shape[1] == 96
    assert not found[~ordinary].any() and (masked.ids_BxL[~found] == batch["input_ids"][~found]).all()
    count, total = found.sum(1), ordinary.sum(1)
    assert found.sum() / ordinary.sum() == pytest.approx(0.15, abs=4 * (0.15 * 0.85 / ordinary.sum()) ** 0.5)
    spread = np.mean((count - 0.15 * total) ** 2 / (0.15 * 0.85 * total))
    assert spread == pytest.approx(1, abs=0.1), "the variance of a binomial distribution"
    read, labels = masked.ids_BxL[found], batch["input_ids"][found]
    assert not np.isin(read[read != 4], SPECIAL).any()
    for share, wanted in (((read == 4).mean(), 0.8), ((read == labels).mean(), 0.1)):
        assert share == pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / len(read)) ** 0.5 + 1 / INFO.vocab_size)
    other = draw(
        masking.make_eval_masking(dataclasses.replace(MASKING, static=True), "independent"),
        batch | {"epoch": batch["epoch"] + 1},
    )
    assert (predicted(other, batch) != found).any(), "static masks are of training: evaluation can draw others"
    neighbours = np.corrcoef(found[:, 10], found[:, 11])[0, 1]
    assert abs(neighbours) < 4 / len(found) ** 0.5
    assert (
        draw(masking.make_eval_masking(MASKING, "fixed"), batch).positions_BxK == draw(MASKING, batch).positions_BxK
    ).all()
