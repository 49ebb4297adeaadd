"""Minimal pairs: the sums by their definitions, ties, intervals, and input that is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from scipy.stats import binomtest

from mlm import __main__
from mlm.data import tokenizer
from mlm.errors import DamageError, InputError
from mlm.inference import minimal_pairs
from mlm.inference.minimal_pairs import Pair
from tests.support.labelled_texts import write_jsonl
from tests.support.refusals import refuse
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("one_device")

PAIRS = {
    "subject_verb_agreement": """
        The functions of this module return a list. | The functions of this module returns a list.
        Every file has a header. | Every file have a header.
        The keys to the cabinet were lost. | The keys to the cabinet was lost.""",
    "anaphor_agreement": """
        The clients blamed themselves. | The clients blamed himself.
        Many waiters reveal themselves. | Many waiters reveal herself.""",
    "word_order": """
        Return the number of elements. | Return number the of elements.
        She always eats fish. | She eats always fish.
        The string is not empty. | The string is not empty.""",  # twins: a tie
}
ROWS = [
    {"sentence_good": good.strip(), "sentence_bad": bad.strip(), "UID": name, "field": "syntax"}
    for name, lines in PAIRS.items()
    for good, bad in (line.split("|") for line in lines.strip().splitlines())
]
CONFIG = ("model.positions=32", "model.layers=2", "model.hidden_size=64", "evaluate.batch=64")


def scores(model, pairs: list[Pair]) -> dict[str, np.ndarray]:
    sentences = minimal_pairs.encode(pairs, model)
    config = tiny_config(*CONFIG)
    return minimal_pairs.pseudo_log_likelihoods(config, model, sentences)


def test_they_are_sums_over_the_tokens_masked_in_turn(model):
    """By the model's own logits: each token alone, or with the rest of its word; equal sentences are a tie."""
    pairs = [Pair((row["sentence_good"], row["sentence_bad"]), row["UID"], "") for row in ROWS]
    found = scores(model, pairs)
    assert (found["within_word"] - found["original"]).std() > 0.1, "no word has several pieces"
    tok = tokenizer.load(model.tokenizer)
    logits = jax.jit(model.module.logits)
    encoded = tok(pairs[0].texts[1])
    ids = np.array(encoded["input_ids"])
    words = encoded.word_ids()
    sums = dict.fromkeys(minimal_pairs.METHODS, 0.0)
    for place in range(1, len(ids) - 1):
        rest = [later for later in range(place, len(ids)) if words[later] == words[place]]
        for method, hidden in (("original", [place]), ("within_word", rest)):
            masked = ids.copy()
            masked[hidden] = tok.mask_token_id
            row = logits(model.params, masked[None], np.ones_like(masked)[None])[0, place]
            sums[method] += float(jax.nn.log_softmax(row)[ids[place]])
    for method, total in sums.items():
        assert found[method][1] == pytest.approx(total, rel=1e-5)
        assert found[method][-1] == found[method][-2], "twins"


def test_ties_count_half_and_intervals_are_wilsons():
    pairs = [Pair(("a", "b"), name, "") for name in ("x", "x", "x", "y", "y")]
    found = minimal_pairs.accuracies(pairs, {"original": np.array([0.0, 0.0, 1.0, 1.0, -1.0])})
    scores = found["original"]
    assert (scores["accuracy"], scores["pairs"], scores["ties"]) == (3 / 5, 5, 2)
    first = found["phenomena"]["x"]["original"]
    assert (first["accuracy"], first["pairs"], first["ties"]) == (2 / 3, 3, 2)
    for right, count in ((5, 6), (0, 3), (40, 40)):
        scores = minimal_pairs._accuracy(np.where(np.arange(count) < right, 2.0, -0.5))
        wilson = binomtest(right, count).proportion_ci(method="wilson")
        assert (scores["low"], scores["high"]) == pytest.approx((wilson.low, wilson.high), abs=1e-6)


@pytest.mark.standard
def test_the_command(trained_workdir, tmp_path, capsys):
    """Two files by a pattern; the table, the line of JSON and evaluation.json; no shards are needed."""
    (tmp_path / "run").mkdir()
    for name in ("tokenizer", "checkpoints"):
        (tmp_path / "run" / name).symlink_to(trained_workdir.root / name)
    config = tiny_config(*CONFIG)
    (tmp_path / "run" / "config.json").write_text(config.to_json())
    write_jsonl(tmp_path / "a.jsonl", ROWS[:4])
    unnamed = [{k: v for k, v in row.items() if k != "UID"} for row in ROWS[4:]]
    write_jsonl(tmp_path / "b.jsonl", unnamed)
    command = ["evaluate", f"--workdir={tmp_path}/run", f"--pairs=jsonl:{tmp_path}/?.jsonl"]
    assert __main__.main(command) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert list(found["phenomena"]) == ["anaphor_agreement", "b", "subject_verb_agreement"]
    assert f"{found['original']['accuracy']:.1%}" in err
    (key,) = kept = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert kept[key] == found and key == f"pairs jsonl:{tmp_path}/?.jsonl, step 5"
    flags = ("--pairs", "--masks", "--draws", "--pseudo", "--breakdown")
    refuse([*command, "--masks", "word"], 2, *flags, capsys=capsys)
    refuse([*command[:2], "--phenomenon=field"], 2, "--phenomenon=field", "--pairs", capsys=capsys)


GOOD = {"sentence_good": "It works.", "sentence_bad": "It work."}


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"sentence_good": "It works."}, "'sentence_bad' .* sentence_good"),
        (GOOD | {"sentence_bad": " "}, "'sentence_bad' is empty"),
        (GOOD | {"sentence_good": 3}, "'sentence_good' has 3"),
        (GOOD | {"sentence_good": "Returns it. " * 40}, "'sentence_good' .* at most 32"),
    ],
)
def test_a_pair_that_can_not_be_scored_is_named(model, tmp_path, row, match):
    source = write_jsonl(tmp_path / "pairs.jsonl", [GOOD, row])
    with pytest.raises(InputError, match=f"{source}.* line 2: .*{match}"):
        minimal_pairs.encode(minimal_pairs.read_pairs(source), model)


def test_a_model_that_gives_no_numbers_has_no_accuracy(model):
    params = jax.tree.map(lambda x: np.full_like(x, np.nan), model.params)
    with pytest.raises(DamageError, match="not finite"):
        scores(dataclasses.replace(model, params=params), [Pair(("It is.", "It are."), "x", "")])
