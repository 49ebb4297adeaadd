"""Models compared by the words of a text: scored as by transformers, and what is refused."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from transformers import FlaxAutoModelForMaskedLM

from mlm import __main__
from mlm import config as configs
from mlm.data import tokenizer
from mlm.entry import Entry
from mlm.export import export
from mlm.inference import comparison
from tests.support import corpora, trained_model
from tests.support.refusals import refuse
from tests.support.reports import Cells
from tests.support.tokenizers import random_model

FAMILIES = {"bert": "wordpiece", "modernbert": "unigram"}
BIASES = {"cls/predictions/bias", "lm_head/bias", "decoder/bias"}  # of the heads
METRICS = ("nats_per_word", "bits_per_byte", "exact_match")


def write_model(folder: pathlib.Path, tokenizer_folder: str, family: str) -> str:
    """A transformers folder of random values, whose bias for one word makes some matches exact."""
    model = random_model(tokenizer_folder, f"model.family={family}", "model.positions=256")
    (the,) = tokenizer.load(tokenizer_folder)("of the", add_special_tokens=False)["input_ids"][-1:]
    (bias,) = (model.leaves[name] for name in BIASES & model.leaves.keys())
    bias[the] += 25.0
    shutil.copytree(tokenizer_folder, folder)
    export.write_model(model, folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("compared")
    tokenizers = {
        kind: trained_model.train_tokenizer(root / kind, kind) for kind in FAMILIES.values()
    }
    return [
        write_model(root / family, tokenizers[kind], family) for family, kind in FAMILIES.items()
    ]


def test_a_word_of_one_token_is_scored_as_by_transformers_model(folders):
    """That with its token masked, and all others seen."""
    name = folders[0]
    tok = tokenizer.load(name)
    stock = FlaxAutoModelForMaskedLM.from_pretrained(name)
    forward = jax.jit(lambda ids: stock(ids).logits)
    config = configs.load(str(configs.BASE), ["evaluate.batch=8"])
    opened = comparison.open_models([name], Entry())[name]
    found = []
    for text in ("one of the models", "one of model"):
        ids = tok(text)["input_ids"]
        masked = np.array([ids])
        masked[0, 3] = tok.mask_token_id
        logits_V = forward(masked)[0, 3]
        spellings = np.array([(3, 4)], [("first", int), ("stop", int)])
        scores = comparison._score(config, name, opened, [ids], spellings)
        nats = -jax.nn.log_softmax(logits_V)[ids[3]]
        assert scores[0, 0] == pytest.approx(float(nats), rel=1e-4, abs=1e-5)
        assert scores[1, 0] == (logits_V.argmax() == ids[3])
        found.append(scores[1, 0])
    assert found == [1, 0], "the first is the word that the bias makes likely"


def test_means_and_their_intervals_by_document(trained_workdir, monkeypatch):
    """Bits are per byte of the words' UTF-8, without the white space between them."""
    scores_2xW = np.array([[1.0, 2.0, 3.0, 6.0], [1.0, 0.0, 0.0, 1.0]])
    monkeypatch.setattr(
        comparison,
        "_score",
        lambda config, name, opened, rows, words_W: scores_2xW[:, : len(words_W)],
    )
    name = str(trained_workdir.root)
    config = configs.load(str(configs.BASE), [])
    opened = comparison.open_models([name], Entry())

    def compare(texts: list[str]) -> tuple:
        found = comparison.compare(config, opened, texts, count=9, size=1000, seed=0)
        words = found["groups"]["words"]["as they are"]
        return words["words"], *(words["scores"][name][metric] for metric in METRICS)

    count, nats, bits, exact = compare(["na\u00efve  caf\u00e9", "plain \u6771"])
    assert (count, nats["mean"], exact["mean"]) == (4, 3.0, 0.5)
    assert bits["mean"] == pytest.approx(12 / np.log(2) / (6 + 5 + 5 + 3))
    # Of the documents 3 nats in two words and 9 in two: influences of -3/4 and 3/4.
    width = 1.959964 * 3 / 2
    assert (nats["low"], nats["high"]) == pytest.approx((3 - width, 3 + width))
    _, nats, *_ = compare(["plain \u6771"])
    assert nats == {"mean": 1.5}, "no interval of one document"


@pytest.mark.standard
def test_the_command(folders, trained_workdir, tmp_path, capsys):
    """A workdir of 32 positions among the models: documents are cut to fit it; a line of JSON, a page, both kept."""
    special = "Neither <mask> nor [MASK] or </s> is special in a text."
    docstrings = [" ".join(text.split()) for text in corpora.real_texts()]
    short = [text for text in docstrings if text.isascii() and 40 < len(text) < 250]
    source = corpora.write_jsonl(tmp_path / "texts.jsonl", [special, *short[:29]])
    models = [folders[1], str(trained_workdir.root)]
    kept = tmp_path / "kept"
    command = ["compare", "--models", *models, f"--source={source}", "--words=40", "--json"]
    assert __main__.main([*command, f"--workdir={kept}", "--config.evaluate.batch=8"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((kept / "words.json").read_text())
    assert result["windows_cut_for_positions"] > 0 and result["asked"] == 40
    by_model = result["groups"]["words"]["that all can spell"]["scores"]
    assert list(by_model) == [*models, " - ".join(models)]
    for group in ("frequency", "length", "form"):
        bands = result["groups"][group].values()
        count = sum(band["words"] for band in bands)
        for name, scores in by_model.items():
            total = sum(
                band["words"] * band["scores"][name]["nats_per_word"]["mean"] for band in bands
            )
            assert total / count == pytest.approx(scores["nats_per_word"]["mean"], abs=1e-6)
    mean = f"{by_model[models[0]]['nats_per_word']['mean']:.3f}"
    assert mean in Cells((kept / "words.html").read_text()).row("that all can spell")


def test_what_can_not_be_compared_is_refused_before_a_model_runs(
    folders, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(comparison, "_score", lambda *_: pytest.fail("a model runs"))
    sources = {"marks": "\u2014 ...\n\U0001f600", "foreign": "\u0939 \u6f22", "long": "four"}
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    (first, second) = folders
    for models, source, flags, words in (
        ([first], "marks", [], ["--source", "2 documents", "no word"]),
        ([first, second], "foreign", [], ["--models", "2 words", "can spell"]),
        ([first], "long", ["--window=3"], [" 0 fit into --window=3"]),
    ):
        command = ["compare", "--models", *models, f"--source=text:{tmp_path}/{source}", *flags]
        refuse(command, 2, *words, capsys=capsys)
