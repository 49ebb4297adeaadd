import shutil

import numpy as np
import pytest

from mlm.data import shards
from tests.support.corpora import write_shards


@pytest.fixture(scope="session")
def healthy(texts, tokenizer_folder, tmp_path_factory):
    """Shards of documents that have nothing in common but their words."""
    # of a few tokens
    words = sorted({word for text in texts for word in text.split() if len(word) < 12})
    rng = np.random.default_rng(0)
    made = [" ".join(rng.choice(words, 25)) for _ in range(200)]
    # small blocks, so that lanes differ by a few rows alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK_BYTES", (200, 10**9))
        return write_shards(made, tmp_path_factory.mktemp("healthy") / "shards", tokenizer_folder)


@pytest.fixture
def workdir(tokenizer_folder, tmp_path):
    shutil.copytree(tokenizer_folder, tmp_path / "run" / "tokenizer")
    return tmp_path / "run"
