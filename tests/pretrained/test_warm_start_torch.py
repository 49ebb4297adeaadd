"""A start from the folders that PyTorch's transformers writes: what our model gives then is what PyTorch's gave."""

import json
import pathlib

import jax
import numpy as np
import pytest

from mlm.model import families, weights
from mlm.pretrained import load
from tests.pretrained.starts import started
from tests.support.pytorch import run_torch
from tests.support.tiny import slow

TYPES = ("roberta", "roberta-prelayernorm", "bert", "modernbert")
CASES = [f"{generation} {model_type}" for generation in (4, 5) for model_type in TYPES]
CASES += ["5 xlm-roberta", "4 camembert"]


@pytest.fixture(scope="module", params=[case if case == "5 modernbert" else slow(case) for case in CASES])
def written(request, tmp_path_factory) -> pathlib.Path:
    """The folder of tests/pytorch/write.py, by transformers 4 and 5."""
    generation, model_type = request.param.split()
    folder = tmp_path_factory.mktemp("torch")
    ids = np.random.default_rng(0).integers(5, 1000, (2, 32))
    (folder / "ids.json").write_text(json.dumps(ids.tolist()))
    run_torch(int(generation), "tests/pytorch/write.py", folder, model_type)
    return folder


@pytest.mark.standard
@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_logits_are_those_of_pytorch(written, kind):
    assert (written / kind / "model.safetensors.index.json").is_file() == (kind == "parts")
    model = load.load(str(written / kind), head=load.LM_HEAD)
    ids, wanted = (np.asarray(json.loads((written / f"{name}.json").read_text())) for name in ("ids", "logits"))
    everywhere = np.broadcast_to(np.arange(32, dtype=np.int32), ids.shape)
    logits = jax.jit(model.module.logits)(model.params, ids.astype(np.int32), np.ones_like(ids), everywhere)
    np.testing.assert_allclose(logits, wanted, atol=2e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification"])
def test_initial_values_are_drawn_as_pytorch_draws_them(written, head):
    """Standard deviations to four standard errors; the largest values to 2%, where a normal is truncated."""
    config = load.load(str(written / "whole"), head=load.LM_HEAD).config
    module = families.family_of(config).make_module(config, head)
    params = jax.jit(module.init_params)(jax.random.key(0))
    ours, theirs = weights.to_torch(jax.device_get(params)), json.loads((written / "drawn.json").read_text())[head]
    if "lm_head.decoder.weight" in theirs:  # another name of the tied tensor
        theirs["roberta.embeddings.word_embeddings.weight"] = theirs.pop("lm_head.decoder.weight")
    assert ours.keys() <= theirs.keys() and len(ours) > 20
    for name, value in ours.items():
        stddev, largest = theirs[name]
        assert value.std() == pytest.approx(stddev, rel=4 / value.size**0.5, abs=1e-8), name
        if config.model_type == "modernbert":
            assert np.abs(value).max() == pytest.approx(largest, rel=0.02), name


@pytest.mark.slow
def test_a_start_takes_everything(written, trained_workdir):
    folder, model = str(trained_workdir.tokenizer), load.load(str(written / "whole"), head=load.LM_HEAD)
    own = {"modernbert": ("model.local_attention=8",), "bert": ("model.positions=34",)}.get(model.config.model_type, ())
    family = f"model.family={families.name_of(model.config)}"
    _, after, lines = started(str(written / "whole"), folder, family, "model.layers=4", *own)
    assert "1,000 of 1,000 rows copied;" in lines[2]
    assert not any("newly initialized" in line or "unused" in line for line in lines)
    positions = 34 if model.config.model_type == "bert" else 32
    assert [line for line in lines if f"{positions} of {positions} positions copied" in line] == lines[3:4]
    for name, value in model.leaves.items():
        np.testing.assert_array_equal(after[name][: len(value)], value, err_msg=name)
