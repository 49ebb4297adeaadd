"""The batches of pretraining: one stream of rows whatever their sizes are, from any step, without skipped ones."""

import dataclasses
import itertools

import numpy as np
import pytest

from mlm.data.stages import make_stages
from mlm.errors import InputError
from mlm.tasks import pretraining
from mlm.training import sharding
from tests.support.corpora import in_epochs, manifest_of
from tests.support.tiny import INFO, tiny_config, tiny_run

# TensorFlow, which they read with, asks uname
pytestmark = [
    pytest.mark.standard,
    pytest.mark.usefixtures("one_device"),
]
LANES = 3
READ = (
    f"data.lanes={LANES}",
    "data.global_batch=24",
    "data.batch_stages=((6, 30), (12, 30))",
    "train.steps=150",
)


def batches_of(manifest, start: int, *overrides: str):
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1)
    config = tiny_config(*READ, *overrides)
    stages = make_stages(config, manifest.splits["train"].records)
    return pretraining.train_batches(config, manifest, mesh, stages, start=start)


@pytest.mark.parametrize(
    ("ranges", "skipped"),
    [("()", ()), ("('2:3', '29:32', '60:60')", (2, 3, *range(29, 33), 60))],
)
def test_from_any_step_the_batches_are_those_of_a_straight_run(manifest, ranges, skipped):
    """But for those that are skipped, which leave the others as they are."""
    straight = itertools.islice(batches_of(manifest, 0), 80)
    kept = [batch for number, batch in enumerate(straight, 1) if number not in skipped]
    for start in (0, 1, 26, 29, 30, 50, 59, 60):
        found = in_epochs(batches_of(manifest, start, f"data.skip_batches={ranges}"), 6)
        for key in found:
            expected = np.concatenate([batch[key] for batch in kept[start : start + 6]])
            np.testing.assert_array_equal(found[key], expected, err_msg=f"{key} from {start}")


@pytest.mark.parametrize("role", ["sep", "unk"])
def test_documents_are_not_isolated_by_a_token_that_also_stands_within_them(role):
    info = dataclasses.replace(INFO, special_ids=INFO.special_ids | {role: INFO.special_ids["cls"]})
    with pytest.raises(InputError, match=rf"data\.isolate_documents = True: .* {role} token"):
        tiny_run("data.isolate_documents=true", mesh=(1, 1, 1), info=info)
    assert tiny_run(mesh=(1, 1, 1), info=info).module.compute.cls_id is None


@pytest.mark.parametrize(("unknown", "ratio"), [(None, 0.25), (10, 0.25), (11, None)])
def test_bits_per_byte_are_not_of_text_that_is_unknown_tokens(monkeypatch, unknown, ratio):
    """WordPiece makes one of a word of Thai: the scores of the other tokens, over all bytes, would be near 0 bits."""
    evaluation = pretraining.evaluation
    calls = []
    monkeypatch.setattr(evaluation, "score", lambda *_, **settings: calls.append(settings) or {})
    counts = {"records": [8], "tokens": 1000, "text_bytes": 4000, "unknown_tokens": unknown}
    data = manifest_of(32, validation=counts)
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1)
    pretraining.score_split(tiny_config(), data, mesh, None, None, "validation")
    assert calls[0]["tokens_per_byte"] == ratio
