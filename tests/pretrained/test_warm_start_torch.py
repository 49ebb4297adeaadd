"""A start from the folders that PyTorch's transformers writes: what our model gives then is what PyTorch's gave."""

import json
import pathlib

import jax
import numpy as np
import pytest

from mlm.model import families, weights
from mlm.pretrained import load
from tests.support.pytorch import run_torch
from tests.support.tiny import slow

pytestmark = pytest.mark.standard

CASES = [  # the generation of transformers, and the types that one process writes
    (5, ("modernbert",)),
    slow((5, ("roberta", "bert", "roberta-prelayernorm"))),
    slow((4, ("modernbert", "camembert"))),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def written(request, tmp_path_factory) -> list[pathlib.Path]:
    """What tests/pytorch/write.py writes of each type."""
    generation, types = request.param
    folder = tmp_path_factory.mktemp("torch")
    ids = np.random.default_rng(0).integers(5, 1000, (2, 32))
    (folder / "ids.json").write_text(json.dumps(ids.tolist()))
    run_torch(generation, "tests/pytorch/write.py", folder, *types)
    return [folder / name for name in types]


def test_logits_are_those_of_pytorch(written):
    for folder in written:
        model, parts = (
            load.load(str(folder / name), head=load.LM_HEAD) for name in ("whole", "parts")
        )
        assert (folder / "parts" / "model.safetensors.index.json").is_file()
        for name, value in parts.leaves.items():
            assert np.array_equal(value, model.leaves[name])
        files = (folder.parent / "ids.json", folder / "logits.json")
        ids, wanted = (np.asarray(json.loads(file.read_text())) for file in files)
        logits = jax.jit(model.module.logits)(model.params, ids.astype(np.int32), np.ones_like(ids))
        np.testing.assert_allclose(logits, wanted, atol=2e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification"])
def test_initial_values_are_drawn_as_pytorch_draws_them(written, head):
    """Standard deviations to four standard errors; the largest values to 2%, where a normal is truncated."""
    for folder in written:
        config = load.load(str(folder / "whole"), head=load.LM_HEAD).config
        module = families.family_of(config).make_module(config, head)
        params = jax.jit(module.init_params)(jax.random.key(0))
        ours = weights.to_torch(jax.device_get(params))
        theirs = json.loads((folder / "drawn.json").read_text())[head]
        if "lm_head.decoder.weight" in theirs:  # another name of the tied tensor
            theirs["roberta.embeddings.word_embeddings.weight"] = theirs.pop(
                "lm_head.decoder.weight"
            )
        assert ours.keys() <= theirs.keys() and len(ours) > 20
        for name, value in ours.items():
            stddev, largest = theirs[name]
            assert value.std() == pytest.approx(stddev, rel=4 / value.size**0.5, abs=1e-8), name
            if config.model_type == "modernbert":
                assert np.abs(value).max() == pytest.approx(largest, rel=0.02), name
