"""Masks: a pure function of (seed, record, epoch), with the statistics that were asked for, of tokens, words, spans."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from mlm.errors import InputError
from mlm.model import masking
from mlm.model.masking import IndependentMasking, Masked, SpanMasking, TokenMasking, WordMasking
from tests.support.tiny import INFO, random_batch, tiny_config

SPECIAL = (0, 1, 2, 3, 4)
STARTS = np.random.default_rng(0).random(INFO.vocab_size) < 0.5
LONG = dataclasses.replace(INFO, length=96)
KINDS = {
    "token": TokenMasking,
    "word": WordMasking,
    "span": SpanMasking,
    "independent": IndependentMasking,
}


def make(kind: str, rate: float = 0.15, mask_share: float = 0.8, **settings):
    if kind in ("word", "span"):
        settings = {"starts": STARTS.tobytes(), "longest": 6} | settings
    return KINDS[kind](rate, mask_share, 4, SPECIAL, INFO.vocab_size, **settings)


def draw(masking: TokenMasking, batch: dict, seed: int = 0) -> Masked:
    arguments = (batch[key] for key in ("input_ids", "attention_mask", "record_id", "epoch"))
    return jax.tree.map(np.asarray, jax.jit(masking)(jax.random.key(seed), *arguments))


def predicted(masked: Masked, batch: dict) -> np.ndarray:
    """Returns which tokens are predicted, bool [B, L]."""
    found = np.zeros(batch["input_ids"].shape)
    np.put_along_axis(found, masked.positions_BxK, masked.weights_BxK, 1)
    return found > 0


def ordinary_of(batch: dict) -> np.ndarray:
    return (batch["input_ids"] > 4) & (batch["attention_mask"] > 0)


@functools.cache
def many_rows(kind: str) -> tuple[dict, np.ndarray, Masked, np.ndarray]:
    """Rows, the number of each token's word in its row (-1 for other tokens), and masks of them."""
    batch = random_batch(4096, 0, LONG)
    masked = draw(make(kind), batch)
    return batch, words_of(batch, longest=6), masked, predicted(masked, batch)


def words_of(batch: dict, longest: int) -> np.ndarray:
    """Counts the words token by token in plain Python."""
    numbers = np.full(batch["input_ids"].shape, -1)
    for row, (ids, ordinary) in enumerate(zip(batch["input_ids"], ordinary_of(batch), strict=True)):
        word = -1
        size = 0
        for position in np.flatnonzero(ordinary):
            if (
                STARTS[ids[position]]
                or position == 0
                or not ordinary[position - 1]
                or size == longest
            ):
                word = word + 1
                size = 0
            size += 1
            numbers[row, position] = word
    return numbers


def within(sample: np.ndarray) -> bool:
    """Returns whether the mean of independent numbers is 0 but for chance."""
    return abs(sample.mean()) <= 4 * sample.std() / np.sqrt(len(sample))


GOLDEN = {  # position:id for each prediction of a row, and of one that is half padding
    "token": [
        "2:4 4:4 5:4 14:57 16:4 19:4 20:4 21:4 23:4 24:4 25:451 28:34",
        "5:4 6:4 11:4 12:242 13:4",
    ],
    "word": [
        "1:361 3:4 4:336 8:4 9:4 11:4 12:4 13:143 14:4 15:4 26:487",
        "1:106 7:358 8:4 9:4",
    ],
    "span": [
        "1:4 2:4 3:4 4:4 24:4 25:4 26:4 27:4 28:4 29:4 30:4 31:4",
        "6:4 7:4 8:4 9:4 11:228 12:78",
    ],
    "independent": [
        "1:361 6:4 11:4 13:143 15:4 17:110 18:4 22:4 26:487 27:441 29:488 31:4",
        "1:106 7:358 9:4",
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_golden_rows(kind):
    """These numbers may change only with the format of a run: a change here breaks the resume of every run."""
    batch = {key: value[14:] for key, value in random_batch(16, seed=3).items()}
    masked = draw(make(kind, 0.4), batch)
    rows = zip(masked.ids_BxL, predicted(masked, batch), strict=True)
    assert [
        " ".join(f"{at}:{ids[at]}" for at in np.flatnonzero(hits)) for ids, hits in rows
    ] == GOLDEN[kind]
    assert np.array_equal(masked.attention_BxL, batch["attention_mask"])


@pytest.mark.parametrize("kind", KINDS)
def test_rates_and_shares_within_four_sigma(kind):
    batch, _, masked, found = many_rows(kind)
    ordinary = ordinary_of(batch)
    most = {"token": 15, "word": 20, "span": 15, "independent": 96}[kind]
    assert masked.positions_BxK.shape[1] == make(kind).max_predictions_per_row(96) == most
    assert all(len(set(row)) == len(row) for row in masked.positions_BxK), (
        "positions must be distinct within a row"
    )
    assert np.array_equal(found.sum(1), masked.weights_BxK.sum(1))
    assert not found[~ordinary].any()
    assert np.array_equal(masked.ids_BxL[~found], batch["input_ids"][~found])
    assert np.array_equal(
        masked.labels_BxK, np.take_along_axis(batch["input_ids"], masked.positions_BxK, 1)
    )
    surplus = found.sum(1) - 0.15 * ordinary.sum(1)
    assert within(surplus), "the mean number of predictions is rate * m"
    if kind == "independent":
        variance = 0.15 * 0.85 * ordinary.sum(1)
        assert np.mean(surplus**2 / variance) == pytest.approx(1, abs=0.1), "binomial"
    elif kind != "word":
        assert np.all(np.abs(surplus) < 1), "rounded up or down"
    read = masked.ids_BxL[found]
    labels = batch["input_ids"][found]
    for share, got in ((0.8, read == 4), (0.1 + 0.1 / 495, read == labels)):
        # Spans are decided as a whole: as independent as there are spans, of 5 tokens or so.
        assert abs(got.mean() - share) < 4 * np.sqrt(
            share * (1 - share) / len(got) * (16 if kind == "span" else 1)
        )
    assert set(np.unique(read)) == set(range(4, INFO.vocab_size)), (
        "every ordinary token is drawn, no special one"
    )
    hits = found[:-1, ordinary[0]]  # without the row that has padding
    deviations = (hits.mean(0) - 0.15) / np.sqrt(0.15 * 0.85 / len(hits))
    assert np.abs(deviations).max() < 4.5 and 0.4 < np.mean(deviations**2) < 1.8, (
        "each position as often as another"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_special_token_of_the_tokenizer_is_masked_or_drawn(kind):
    """Beside the five roles, anywhere in the vocabulary: <url>, say, or an id without an entry."""
    info = dataclasses.replace(INFO, all_special_ids=(*SPECIAL, 7, 250, 499))
    shares = ("masking.rate=0.5", "masking.mask_share=0")
    config = tiny_config(f"masking.kind={kind.replace('independent', 'token')}", *shares)
    masks = masking.make_masking(config.masking, info, STARTS)
    masks = masking.make_eval_masking(masks, "independent" if kind == "independent" else "fixed")
    batch = random_batch(1024)
    batch["attention_mask"][:, -4:] = 0  # whatever stands there is not read, and not predicted
    masked = draw(masks, batch)
    changed = masked.ids_BxL != batch["input_ids"]
    assert changed.sum() > 1000
    assert not np.isin(masked.ids_BxL[changed], info.all_special_ids).any()
    predicted_BxL = predicted(masked, batch)
    assert not np.isin(batch["input_ids"][predicted_BxL], info.all_special_ids).any()
    assert not predicted_BxL[:, -4:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_masks_depend_on_seed_record_and_epoch_alone(kind):
    """Not on the rows beside a row, nor on the devices."""
    batch = random_batch(64)
    masks = make(kind)
    whole = draw(masks, batch)
    order = np.random.default_rng(1).permutation(64)[:24]
    part = {key: value[order] for key, value in batch.items()}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = {
        key: jax.device_put(value, jax.NamedSharding(mesh, jax.P("data")))
        for key, value in part.items()
    }
    for one, other in zip(whole, draw(masks, spread), strict=True):
        assert np.array_equal(one[order], other)
    for changed in ({"epoch": batch["epoch"] + 1}, {"record_id": batch["record_id"] + 1}):
        assert not np.array_equal(draw(masks, batch | changed).ids_BxL, whole.ids_BxL)
    assert not np.array_equal(draw(masks, batch, seed=1).ids_BxL, whole.ids_BxL)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_row_can_be_predicted(kind):
    """However few ordinary tokens it has, none included."""
    batch = random_batch(64)
    for few in range(3):
        batch["input_ids"][few, 1 + few :] = 1
        batch["attention_mask"][few, 1 + few :] = 0
    masked = draw(make(kind, 1.0, 1.0), batch)
    assert np.array_equal(predicted(masked, batch), ordinary_of(batch))
    assert np.array_equal(masked.ids_BxL, np.where(ordinary_of(batch), 4, batch["input_ids"]))


def test_words_are_never_cut_and_each_has_the_same_chance():
    _, words, _, found = many_rows("word")
    # for each row, predicted words of that size, less those expected
    surplus = {size: [] for size in range(1, 7)}
    for row, hits in zip(words, found, strict=True):
        sizes = np.bincount(row[row >= 0])
        taken = np.bincount(row[(row >= 0) & hits], minlength=len(sizes))
        assert np.all((taken == 0) | (taken == sizes)), "a word is cut"
        for size, rows in surplus.items():
            rows.append(np.sum((sizes == size) & (taken > 0)) - 0.15 * np.sum(sizes == size))
    for size, rows in surplus.items():
        assert np.std(rows) > 0.1, f"no words of {size} tokens to tell from"
        assert within(np.array(rows)), f"words of {size} tokens: {np.mean(rows)}"


def test_spans_begin_and_end_with_words_but_for_the_first_and_the_last_one():
    _, words, _, found = many_rows("span")
    cut = 0
    runs = 0
    for row, hits in zip(words, found, strict=True):
        edges = np.diff(np.concatenate([[0], hits.astype(int), [0]]))
        begins = np.flatnonzero(edges > 0)
        ends = np.flatnonzero(edges < 0)
        begun = sum(begin > 0 and row[begin - 1] == row[begin] for begin in begins)
        ended = sum(end < len(row) and row[end] == row[end - 1] for end in ends)
        assert begun <= 1 and ended <= 1, "more than the first and the last span is cut"
        cut = cut + ended
        runs = runs + len(begins)
    assert cut > 100, "spans are cut to give the exact number"
    assert found.sum() / runs > 3, "runs of several words"
    mean = np.sum(make("span", longest=10).length_probs() * np.arange(1, 11))
    assert mean == pytest.approx(3.8, abs=0.01), "as in SpanBERT"


def test_words_need_a_tokenizer_of_the_shards():
    with pytest.raises(InputError, match=r"masking.kind = word: .* 499 entries, .* 500"):
        masking.make_masking(tiny_config("masking.kind=word").masking, INFO, STARTS[1:])
    unknown = masking.make_masking(tiny_config("masking.kind=word").masking, INFO, None)
    with pytest.raises(ValueError, match="which tokens start a word"):
        draw(unknown, random_batch(4))
