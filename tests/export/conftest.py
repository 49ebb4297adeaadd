"""Exports of a small model and of small classifiers, each made once."""

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import reset_sessions

from mlm.export import export
from mlm.paths import UPath
from mlm.workdir import Workdir
from tests.export.folders import KINDS, SCORES
from tests.export.hub_stand_in import serving
from tests.support.trained_classifier import make

TOKEN = "hf_canaryDoNotShowThisTokenAnywhere"


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub, of this process and of those that it starts."""
    with serving(TOKEN) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        for name, value in (("HF_TOKEN", TOKEN), ("HF_HUB_OFFLINE", "0"), ("HF_ENDPOINT", hub.url)):
            monkeypatch.setenv(name, value)
        reset_sessions()
        yield hub
    reset_sessions()


@pytest.fixture(scope="session")
def exported(model, tmp_path_factory) -> pathlib.Path:
    """Of a model whose tokenizer was trained for longer rows."""
    folder = tmp_path_factory.mktemp("exported") / "export"
    tokenizer = tmp_path_factory.mktemp("long") / "tokenizer"
    file = pathlib.Path(shutil.copytree(model.tokenizer, tokenizer), "tokenizer_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 8192}))
    export.export(
        dataclasses.replace(model, tokenizer=str(tokenizer)),
        UPath(folder),
        scores=SCORES,
        name="small",
    )
    return folder


@pytest.fixture(scope="session")
def classifier_of(tmp_path_factory) -> Callable[[str], Workdir]:
    """The workdir of a kind of classifier, with its export."""

    @functools.cache
    def make_workdir(kind: str) -> Workdir:
        workdir = Workdir(str(tmp_path_factory.mktemp(kind)))
        scores = {
            "step": 5,
            "kind": "eval",
            "loss": 1.25,
            "accuracy": 0.5,
            "f1": 0.4321,
            "rows": 29,
        }
        model = make(pathlib.Path(str(workdir.root)), **KINDS[kind])
        export.export(model, workdir.export, scores=scores, name=kind)
        return workdir

    return make_workdir
