"""A start from the folders that PyTorch's transformers writes: what our model gives then is what PyTorch's gave."""

import functools
import json
import pathlib
from collections.abc import Callable

import jax
import numpy as np
import pytest

from mlm.model import families, weights
from mlm.pretrained import load
from tests.support.pytorch import run_torch

pytestmark = pytest.mark.standard

STANDARD = [(5, "modernbert")]
SLOW = [
    (5, "roberta"),
    (5, "bert"),
    (5, "roberta-prelayernorm"),
    (4, "modernbert"),
    (4, "camembert"),
]


@pytest.fixture(scope="module")
def write(tmp_path_factory) -> Callable[[int, tuple[str, ...]], pathlib.Path]:
    """Returns the folder of tests/pytorch/write.py, by transformers 4 or 5, with models of several types."""

    @functools.cache
    def write_models(generation: int, types: tuple[str, ...]) -> pathlib.Path:
        folder = tmp_path_factory.mktemp("torch")
        ids = np.random.default_rng(0).integers(5, 1000, (2, 32))
        (folder / "ids.json").write_text(json.dumps(ids.tolist()))
        run_torch(generation, "tests/pytorch/write.py", folder, *types)
        return folder

    return write_models


@pytest.fixture(
    params=[*STANDARD, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: f"{case[0]} {case[1]}",
)
def written(request, write) -> pathlib.Path:
    generation, model_type = request.param
    cases = STANDARD if request.param in STANDARD else SLOW
    return (
        write(generation, tuple(name for number, name in cases if number == generation))
        / model_type
    )


def test_logits_are_those_of_pytorch(written):
    model, parts = (
        load.load(str(written / name), head=load.LM_HEAD) for name in ("whole", "parts")
    )
    assert (written / "parts" / "model.safetensors.index.json").is_file()
    assert all(np.array_equal(value, model.leaves[name]) for name, value in parts.leaves.items())
    files = (written.parent / "ids.json", written / "logits.json")
    ids, wanted = (np.asarray(json.loads(file.read_text())) for file in files)
    everywhere = np.broadcast_to(np.arange(32, dtype=np.int32), ids.shape)
    logits = jax.jit(model.module.logits)(
        model.params, ids.astype(np.int32), np.ones_like(ids), everywhere
    )
    np.testing.assert_allclose(logits, wanted, atol=2e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification"])
def test_initial_values_are_drawn_as_pytorch_draws_them(written, head):
    """Standard deviations to four standard errors; the largest values to 2%, where a normal is truncated."""
    config = load.load(str(written / "whole"), head=load.LM_HEAD).config
    module = families.family_of(config).make_module(config, head)
    params = jax.jit(module.init_params)(jax.random.key(0))
    ours = weights.to_torch(jax.device_get(params))
    theirs = json.loads((written / "drawn.json").read_text())[head]
    if "lm_head.decoder.weight" in theirs:  # another name of the tied tensor
        theirs["roberta.embeddings.word_embeddings.weight"] = theirs.pop("lm_head.decoder.weight")
    assert ours.keys() <= theirs.keys() and len(ours) > 20
    for name, value in ours.items():
        stddev, largest = theirs[name]
        assert value.std() == pytest.approx(stddev, rel=4 / value.size**0.5, abs=1e-8), name
        if config.model_type == "modernbert":
            assert np.abs(value).max() == pytest.approx(largest, rel=0.02), name
