"""The loss by position and by distance of the nearest copy: those of a double loop, whatever the batch and devices."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from mlm.data.manifest import DatasetInfo
from mlm.tasks import pretraining
from mlm.tasks.pretraining import Pretraining
from mlm.training import breakdown, evaluation, sharding
from tests.support.tiny import INFO, random_batch, slow, tiny_config

KINDS = ("masking.mask_share=0.4", "masking.random_share=0.3", "masking.rate=0.3", "model.init_stddev=0.3")
WORDS = np.arange(INFO.vocab_size) % 2 == 0  # the tokens that start a word


def step_of(run: Pretraining, *, with_breakdown: bool = True):
    return evaluation.make_eval_step(
        run.module,
        run.eval_masking,
        run.config.evaluate.seed,
        run.mesh,
        sharding.shardings_of(run.abstract_state).params,
        with_breakdown=with_breakdown,
    )


def few_ids() -> dict[str, np.ndarray]:
    """Rows of documents of 20 different tokens, with padding, the last of which is not to be counted."""
    batch = random_batch()
    ids, special = batch["input_ids"], batch["input_ids"] < 5
    batch["input_ids"] = np.where(special, ids, 5 + ids % 20)
    batch["input_ids"][:, INFO.length // 3 + 1] = INFO.special_ids["cls"]
    return batch | {"valid": np.arange(16) < 15}


def nearest(ids: list[int], documents: list[int], visible: list[bool], place: int) -> int:
    """The distance of the nearest visible token of the same id and document; 0 if there is none."""
    alike = [j for j in range(len(ids)) if j != place and ids[j] == ids[place] and documents[j] == documents[place]]
    return min((abs(j - place) for j in alike if visible[j]), default=0)


def line_of(number: int) -> str:
    """The line of a number from 1 up."""
    low = 1
    while low * 2 <= number:
        low *= 2
    return str(low) if low == 1 else f"{low}-{2 * low - 1}"


@pytest.mark.standard
@pytest.mark.parametrize(
    ("isolated", "masks", "shape"),
    [
        slow(False, "masking.kind=token", (8, 1, 1)),
        (True, "masking.kind=span", (2, 2, 2)),
        slow(True, "evaluate.count=independent", (1, 8, 1)),
    ],
)
def test_lines_are_those_of_a_double_loop(isolated, masks, shape):
    """Masked, replaced and kept tokens are no copies, nor are tokens of other documents if those are isolated."""
    config = tiny_config(*KINDS, masks, f"data.isolate_documents={str(isolated).lower()}")
    mesh = sharding.make_mesh(**dict(zip(sharding.AXES, shape, strict=True)))
    run = Pretraining(config, INFO, mesh=mesh, word_starts_V=WORDS)
    batch, params = few_ids(), run.init().params
    means = jax.device_get(step_of(run)(params, sharding.put_batch(batch, run.mesh, 16)))
    rows, sums = (*means["loss"], means["accuracy"].sum), means["breakdown"]
    columns = [batch[name] for name in ("input_ids", "attention_mask", "record_id", "epoch")]
    masked = jax.device_get(run.eval_masking(jax.random.key(config.evaluate.seed), *columns))
    inputs = (masked.ids_BxL, batch["attention_mask"], masked.positions_BxK)
    logits = np.asarray(jax.jit(run.module.logits)(params, *inputs), np.float64)[..., : INFO.vocab_size]

    expected, kinds, across = {}, set(), 0
    for b in range(15):
        ids, attention = batch["input_ids"][b].tolist(), batch["attention_mask"][b].tolist()
        predictions = [k for k in range(len(masked.positions_BxK[b])) if masked.weights_BxK[b, k]]
        places = [int(masked.positions_BxK[b, k]) for k in predictions]
        visible = [bool(attention[j]) and j not in places for j in range(len(ids))]
        starts = [isolated and token == INFO.special_ids["cls"] for token in ids]
        documents = np.cumsum(starts).tolist()
        for k, place in zip(predictions, places, strict=True):
            read, target, scores = masked.ids_BxL[b, place], ids[place], logits[b, k]
            kinds.add("mask" if read == 4 else "kept" if read == target else "replaced")
            distance = nearest(ids, documents, visible, place)
            across += distance != nearest(ids, [0] * len(ids), visible, place)
            loss = np.log(np.exp(scores).sum()) - scores[target]
            lines = ("0-1" if place < 2 else line_of(place), line_of(distance) if distance else "no copy")
            for key in zip(breakdown.TABLES, lines, strict=True):
                expected[key] = expected.get(key, 0) + np.array([loss, 1, np.argmax(scores) == target])
    assert kinds == {"mask", "kept", "replaced"} and (across > 5) == isolated
    assert {line for table, line in expected if table == "by_copy_distance"} >= {"1", "2-3", "4-7", "8-15", "no copy"}
    for number, table in enumerate(breakdown.TABLES):
        found = np.sum(sums[:, number], axis=0, dtype=np.float64)
        for line, values in zip(breakdown.names(table, len(found)), found, strict=True):
            np.testing.assert_allclose(values, expected.get((table, line), np.zeros(3)), rtol=1e-5, err_msg=line)
        np.testing.assert_allclose(found.sum(0), np.sum(rows, axis=1), rtol=1e-6)


@pytest.mark.parametrize("length", [2, 13, 37])
def test_distances_in_rows_of_any_length(length):
    rng = np.random.default_rng(length)
    for case in range(20):
        ids, segments = rng.integers(5, 6 + case % 7, length), np.sort(rng.integers(0, 3, length))
        visible = (rng.random(length) < 0.5) & (segments > 0)
        found = jax.jit(breakdown.copy_distances)(*(np.asarray(x, np.int32) for x in (ids, segments)), visible)
        for place in np.flatnonzero(~visible):
            expected = nearest(ids.tolist(), segments.tolist(), visible.tolist(), place)
            assert found[place] == expected or (expected == 0 and found[place] >= length), (ids, segments, visible)


def test_the_longest_rows_count_without_overflow():
    """The last groups in the order of (segment, id) have the largest numbers: a pair far apart, a token without any."""
    length = breakdown.LONGEST
    ids, visible = np.arange(length, dtype=np.int32), np.arange(length) == length - 1
    ids[0] = ids[-1]
    found = np.asarray(jax.jit(breakdown.copy_distances)(ids, np.ones_like(ids), visible))
    assert found[0] == length - 1 and (found[1:-1] == length).all()
    ids[0] = 0
    assert jax.jit(breakdown.copy_distances)(ids, np.ones_like(ids), visible & False)[-1] == length
    assert breakdown.names("by_position", 14)[:-1] == ["0-1", *map(line_of, 2 ** np.arange(1, 13))], "8,192 tokens"


def scores(manifest, rows: int, devices: int, *, draws: int = 1, with_breakdown: bool = True) -> dict:
    config = tiny_config("data.lanes=4", f"evaluate.batch={rows}", "model.init_stddev=0.3", f"evaluate.draws={draws}")
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), sharding.AXES)
    run = Pretraining(config, DatasetInfo.from_manifest(manifest), mesh=mesh)
    eval_step = step_of(run, with_breakdown=with_breakdown)
    return pretraining.score_split(config, manifest, mesh, eval_step, run.init().params, "validation")


@pytest.fixture(scope="module")
def reference(manifest) -> dict:
    return scores(manifest, 16, 1)


@pytest.mark.standard
def test_the_lines_add_up_to_the_plain_scores(reference, manifest):
    plain = scores(manifest, 16, 1, with_breakdown=False)
    assert {key: value for key, value in reference.items() if key not in breakdown.TABLES} == pytest.approx(plain)
    for found in (reference, scores(manifest, 64, 8, draws=2)):
        for table in breakdown.TABLES:
            lines = found[table].values()
            assert len(lines) > 4 and sum(line["predictions"] for line in lines) == found["predictions"]
            for key, rel in (("loss", 1e-6), ("accuracy", 1e-9)):
                mean = sum(line[key] * line["predictions"] for line in lines) / found["predictions"]
                rel = rel if found is reference else 1e-3  # the plain scores of draws are the mean of theirs
                assert mean == pytest.approx(found[key], rel=rel), (table, key)


@pytest.mark.parametrize(("rows", "devices"), [(7, 1), (64, 8)])
def test_the_same_lines_for_every_batch_and_devices(reference, manifest, rows, devices):
    assert manifest.splits["validation"].records % 16, "the last batch must be a partial one"
    found = scores(manifest, rows, devices)
    for table in breakdown.TABLES:
        assert list(found[table]) == list(reference[table])
        for name, line in found[table].items():
            assert line == pytest.approx(reference[table][name], rel=1e-6), (table, name)
