"""The proof of an export in PyTorch: it holds for what was exported, and finds what is not that model."""

import json
import re
import shutil
import sys

import pytest

from mlm import __main__
from mlm.errors import DamageError, InputError
from mlm.export import export, reference
from mlm.paths import UPath
from mlm.workdir import Workdir
from tests import ROOT
from tests.export import folders
from tests.export.folders import damaged
from tests.support.pytorch import run_torch, torch_python
from tests.support.tokenizers import make_bert_tokenizer, make_tokenizer_with_pad_3, random_model
from tests.support.trained_model import train_tokenizer

pytestmark = pytest.mark.standard

FAMILIES = {
    "Bert": ("model.family=bert",),
    "RobertaPreLayerNorm": ("model.family=roberta_prelayernorm",),
    # both kinds of layers, windows that end within a row, and no value that is transformers' default
    "ModernBert": (
        *(
            "model.family=modernbert",
            "model.layers=3",
            "model.local_attention=8",
        ),
        *("model.global_rope_theta=9000", "model.local_rope_theta=800"),
    ),
}
TOKENIZERS = {
    "bpe": lambda folder: train_tokenizer(folder, "bpe"),
    "wordpiece": lambda folder: train_tokenizer(folder, "wordpiece"),
    "pad id 3": make_tokenizer_with_pad_3,
    "bert": make_bert_tokenizer,
}


def verified(generation: int, *exports: object) -> list[dict]:
    """Returns the exit code and the output for each folder."""
    return [
        json.loads(line)
        for line in run_torch(generation, "tests/pytorch/verify.py", *exports).splitlines()
    ]


CLASSIFIERS = {  # by the kinds of tests/export/folders.py
    "classes": "RobertaForSequenceClassification",
    "tokens": "RobertaForTokenClassification",
    "pairs": "RobertaForSequenceClassification",
    "regression": "RobertaForSequenceClassification",
    "modernbert": "ModernBertForSequenceClassification",
    "prelayernorm": "RobertaPreLayerNormForSequenceClassification",
    "real-bert pairs": "BertForSequenceClassification",
}


def test_pytorch_gives_the_same_and_finds_what_is_not_the_model(exported, classifier_of, tmp_path):
    """Ids, logits and the pipeline's answers of a language model and of classifiers, by transformers 5."""
    kinds = ("classes", "tokens", "real-bert pairs")
    wrong = {
        "logits": (exported, folders.damage_embedding),
        "weights": (exported, folders.damage_name),
        "token ids": (exported, folders.damage_tokenizer),
        "fillings": (exported, folders.damage_ranks),
        "labels": (classifier_of("classes").export, folders.damage_labels),
        "labels: the pipeline gives": (classifier_of("tokens").export, folders.damage_labels),
    }
    copies = [
        damaged(folder, tmp_path / words, damage) for words, (folder, damage) in wrong.items()
    ]
    good = (exported, *(classifier_of(kind).export for kind in kinds))
    first, *others = verified(5, *good, *copies)
    lines = first["printed"].splitlines()
    assert first["code"] == 0 and "transformers 5." in lines[0]
    checks = ["ok    weights", "ok    token ids", "ok    logits", "ok    fillings"]
    assert [line.split(":")[0] for line in lines[1:]] == checks
    for kind, result in zip(kinds, others[: len(kinds)], strict=True):
        assert result["code"] == 0, result["printed"]
        assert CLASSIFIERS[kind] in result["printed"]
        assert "ok    labels" in result["printed"]
    for words, result in zip(wrong, others[len(kinds) :], strict=True):
        assert result["code"] == 4 and f"WRONG {words}" in result["printed"], words


@pytest.mark.slow
def test_every_family_tokenizer_and_kind_of_classifier(classifier_of, tmp_path):
    tokenizers = {name: make(tmp_path / f"tokenizer {name}") for name, make in TOKENIZERS.items()}
    models = {name: random_model(folder) for name, folder in tokenizers.items()}
    assert (
        models["pad id 3"].config.pad_token_id == 3
        and models["pad id 3"].config.max_position_embeddings == 36
    )
    models |= {
        name: random_model(tokenizers["bpe"], *settings) for name, settings in FAMILIES.items()
    }
    for name, model in models.items():
        export.export(model, UPath(tmp_path / name), scores=None, name=name)
    results = verified(
        5,
        *(tmp_path / name for name in models),
        *(classifier_of(kind).export for kind in CLASSIFIERS),
    )
    for name, result in zip([*models, *CLASSIFIERS], results, strict=True):
        assert result["code"] == 0, f"{name}: {result['printed']}"
        family = name if name in FAMILIES else "Roberta"
        wanted = CLASSIFIERS.get(name, f"{family}ForMaskedLM")
        assert f"every parameter of {wanted} is there" in result["printed"]
        assert ("ok    labels" in result["printed"]) == (name in CLASSIFIERS)
        if name in FAMILIES:
            difference, largest = re.search(
                r"difference (\S+) \(largest logit (\S+),", result["printed"]
            ).groups()
            assert float(difference) < 1e-4 and float(largest) > 1


@pytest.mark.slow
def test_the_command_with_the_proof(trained_workdir, tmp_path, capsys):
    """Modules beside the script must not be taken for installed ones of the same names."""
    workdir = Workdir(shutil.copytree(str(trained_workdir.root), tmp_path / "run"))
    assert __main__.main(["export", f"--workdir={workdir.root}", f"--torch={torch_python(4)}"]) == 0
    assert "ok    fillings" in capsys.readouterr().err
    script = shutil.copy(ROOT / "mlm/export/verify_export.py", tmp_path)
    (tmp_path / "tokenizers.py").write_text("raise AssertionError('not the installed one')")
    assert "transformers 4." in run_torch(4, script, workdir.export)


def test_what_is_not_proven_is_not_exported(model, tmp_path, monkeypatch):
    """And a Python that can't prove anything is named; nothing is left."""
    expected = reference.compute(model)
    monkeypatch.setattr(reference, "compute", lambda _: expected)
    monkeypatch.setattr(export, "check_files", lambda *_: [])
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\necho 'ok    weights'\necho 'WRONG logits: not equal'\nexit 4\n")
    fails.chmod(0o755)
    for python, error, match in (
        (fails, DamageError, r"--torch=.*WRONG logits: not equal"),
        ("/no/such/python", InputError, "--torch=/no/such/python: "),
        (sys.executable, InputError, "--torch=.*No module named 'torch'"),
    ):
        with pytest.raises(error, match=match):
            export.export(
                model, UPath(tmp_path / "new"), scores=None, name="x", torch_python=str(python)
            )
        assert [path.name for path in tmp_path.iterdir()] == ["fails"]
