"""A start from the folders that PyTorch's transformers writes: what our model gives then is what PyTorch's gave."""

import json
import pathlib

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from mlm.bench import baseline
from tests.fixtures import slow
from tests.test_warm_start import fresh, started
from tests.torch_environments import run_torch


@pytest.fixture(scope="module", params=[slow(4), 5])
def written(request, tmp_path_factory) -> pathlib.Path:
    """The folder of tests/torch_write.py, by transformers 4 and 5."""
    folder = tmp_path_factory.mktemp("torch")
    ids = np.random.default_rng(0).integers(5, 1000, (2, 32))
    (folder / "ids.json").write_text(json.dumps(ids.tolist()))
    run_torch(request.param, "tests/torch_write.py", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_logits_are_those_of_pytorch(written, kind, trained_workdir):
    assert (written / kind / "model.safetensors.index.json").is_file() == (kind == "parts")
    _, after, lines = started(str(written / kind), str(trained_workdir.tokenizer))
    assert "1,000 taken of 1,000 rows" in lines[2] and "32 taken of 32 positions" in lines[3] and len(lines) == 4
    ids, wanted = (np.asarray(json.loads((written / f"{name}.json").read_text())) for name in ("ids", "logits"))
    run = fresh(folder=str(trained_workdir.tokenizer))
    params = unflatten_dict({tuple(name.split("/")): value for name, value in after.items()})
    positions = np.broadcast_to(np.arange(2, 34), ids.shape)
    module = baseline.make_module(run.network.config, "float32")
    logits = module.apply({"params": params}, ids, np.ones_like(ids), np.zeros_like(ids), positions, None).logits
    np.testing.assert_allclose(logits[..., :1000], wanted, atol=2e-5)
