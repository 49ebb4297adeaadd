"""Minimal pairs: the sums of PyTorch's model by their definitions, ties, intervals, and input that is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from scipy.stats import binomtest

from mlm import __main__
from mlm.errors import DamageError, InputError
from mlm.export import export
from mlm.inference import minimal_pairs
from mlm.inference.minimal_pairs import Pair
from mlm.paths import UPath
from tests.support.pytorch import run_torch
from tests.support.tiny import slow, tiny_config
from tests.support.trained_model import train_tokenizer

PAIRS = {
    "subject_verb_agreement": """
        The functions of this module return a list. | The functions of this module returns a list.
        The value in the tables is an integer. | The value in the tables are an integer.
        The names that the parser finds are sorted. | The names that the parser finds is sorted.
        Every file has a header. | Every file have a header.
        My brothers sing in the kitchen. | My brothers sings in the kitchen.
        The keys to the cabinet were lost. | The keys to the cabinet was lost.""",
    "anaphor_agreement": """
        The girl saw herself in the mirror. | The girl saw themselves in the mirror.
        The clients blamed themselves. | The clients blamed himself.
        A class may call itself. | A class may call themselves.
        The boys hurt themselves. | The boys hurt itself.
        Many waiters reveal themselves. | Many waiters reveal herself.""",
    "determiner_noun_agreement": """
        These arguments are ignored. | These argument are ignored.
        This option was removed. | This options was removed.
        She reads those books. | She reads those book.
        He bought that car. | He bought that cars.
        Raymond sells these lamps. | Raymond sells this lamps.""",
    "irregular_forms": """
        The child broke the window. | The child broken the window.
        The hidden path was steep. | The hid path was steep.
        She had written a letter. | She had wrote a letter.
        They began the meeting. | They begun the meeting.
        The forgotten song returned. | The forgot song returned.""",
    "npi_licensing": """
        Nobody has ever seen it. | Somebody has ever seen it.
        No file was read at all. | A file was read at all.
        She doesn't know anything. | She knows anything.
        Few people have any money. | Many people have any money.
        Not one test has failed yet. | One test has failed yet.""",
    "word_order": """
        Return the number of elements. | Return number the of elements.
        What did you open? | What you open did?
        She always eats fish. | She eats always fish.
        The string is not empty. | The string not is empty.""",
}
ROWS = [
    {"sentence_good": good.strip(), "sentence_bad": bad.strip(), "UID": name, "field": "syntax"}
    for name, lines in PAIRS.items()
    for good, bad in (line.split("|") for line in lines.strip().splitlines())
]
TEXTS = [row[field] for row in ROWS for field in minimal_pairs.FIELDS]
CONFIG = ("model.positions=32", "model.layers=2", "model.hidden_size=64", "shards.count=8", "data.lanes=4")


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def scores(model, pairs: list[Pair], *overrides: str) -> dict[str, np.ndarray]:
    sentences = minimal_pairs.encode(pairs, model)
    return minimal_pairs.pseudo_log_likelihoods(tiny_config(*CONFIG, *overrides), model, sentences)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    assert len(ROWS) == 30
    return [Pair((row["sentence_good"], row["sentence_bad"]), row["UID"], "") for row in ROWS]


@pytest.mark.standard
@pytest.mark.parametrize("kind", ["unigram", slow("bpe"), slow("wordpiece")])
def test_equal_to_the_definitions_in_pytorch(model, pairs, kind, tmp_path):
    if kind != "unigram":
        model = dataclasses.replace(model, tokenizer=train_tokenizer(tmp_path / "tokenizer", kind))
    export.export(model, UPath(tmp_path / "export"), scores=None, name="small")
    (tmp_path / "cases.json").write_text(json.dumps({"folder": str(tmp_path / "export"), "texts": TEXTS}))
    wanted = json.loads(run_torch(4, "tests/pytorch/pseudo_likelihood.py", tmp_path / "cases.json"))
    found = scores(model, pairs)
    for method in minimal_pairs.METHODS:
        np.testing.assert_allclose(found[method], wanted[method], atol=1e-4, rtol=0)
    assert (found["within_word"] - found["original"]).std() > 0.1, "the words must have several pieces"


@pytest.mark.standard
def test_batch_size_and_mesh_change_nothing(model, pairs):
    reference, other = (
        scores(model, pairs),
        scores(model, pairs[::-1], "evaluate.batch=64", "mesh.fsdp=4", "mesh.data=2"),
    )
    for method in minimal_pairs.METHODS:
        backwards = other[method].reshape(-1, 2)[::-1].reshape(-1)
        np.testing.assert_allclose(backwards, reference[method], rtol=1e-5)


def test_ties_count_half_and_intervals_are_wilsons(pairs):
    differences = np.where(np.arange(30) < 18, 1.0, -1.0)
    differences[[0, 1, 28]] = 0
    found = minimal_pairs.accuracies(pairs, {"original": differences})
    one = found["original"]
    assert (one["accuracy"], one["pairs"], one["ties"]) == ((16 + 1.5) / 30, 30, 3)
    first = found["phenomena"]["subject_verb_agreement"]["original"]
    assert (first["accuracy"], first["pairs"], first["ties"]) == (5 / 6, 6, 2)
    for right, count in ((5, 6), (0, 3), (40, 40)):
        own = minimal_pairs._accuracy(np.where(np.arange(count) < right, 2.0, -0.5))
        wilson = binomtest(right, count).proportion_ci(method="wilson")
        assert (own["low"], own["high"]) == pytest.approx((wilson.low, wilson.high), abs=1e-6)


@pytest.mark.standard
def test_equal_sentences_are_a_tie_wherever_they_stand(model, pairs):
    twins = [Pair((text, text), "same", "") for pair in pairs for text in pair.texts]
    for method, own in scores(model, twins, "evaluate.batch=24").items():
        assert (own[::2] == own[1::2]).all(), method


@pytest.mark.standard
def test_the_command(trained_workdir, tmp_path, capsys):
    """Two files by a pattern; the table, the line of JSON and evaluation.json; no shards are needed."""
    (tmp_path / "run").mkdir()
    for name in ("tokenizer", "checkpoints"):
        (tmp_path / "run" / name).symlink_to(trained_workdir.root / name)
    (tmp_path / "run" / "config.json").write_text(tiny_config(*CONFIG).to_json())
    write(tmp_path / "a.jsonl", ROWS[:11])
    write(tmp_path / "b.jsonl", [{k: v for k, v in row.items() if k != "UID"} for row in ROWS[11:]])
    command = ["evaluate", f"--workdir={tmp_path}/run", f"--pairs=jsonl:{tmp_path}/?.jsonl"]
    assert __main__.main(command) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert list(found["phenomena"]) == ["anaphor_agreement", "b", "subject_verb_agreement"], "UID, or the file's name"
    for method in minimal_pairs.METHODS:
        own = [each[method] for each in found["phenomena"].values()]
        assert sum(each["pairs"] for each in own) == found[method]["pairs"] == 30
        mean = sum(each["accuracy"] * each["pairs"] for each in own) / 30
        assert found[method]["accuracy"] == pytest.approx(mean)
        assert f"{mean:.1%}" in err
    (key,) = kept = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert kept[key] == found and key == f"pairs jsonl:{tmp_path}/?.jsonl, step 5"
    assert __main__.main([*command, "--phenomenon=field"]) == 0
    assert list(json.loads(capsys.readouterr().out)["phenomena"]) == ["syntax"]
    assert __main__.main([*command, "--masks", "word"]) == 2
    refusal = capsys.readouterr().err
    assert all(flag in refusal for flag in ("--pairs", "--split", "--masks", "--draws", "--pseudo", "--breakdown"))
    assert __main__.main([*(flag for flag in command if "--pairs" not in flag), "--phenomenon=field"]) == 2
    assert "evaluate: --phenomenon=field needs --pairs=SOURCE." in capsys.readouterr().err


def test_other_sources(tmp_path):
    """A data set of the Hugging Face library, and CSV."""
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", ROWS)
    found = minimal_pairs.read(f"hf:{folder}", "UID")
    assert [pair.texts for pair in found] == [(row["sentence_good"], row["sentence_bad"]) for row in ROWS]
    assert {pair.phenomenon for pair in found} == set(PAIRS)
    (tmp_path / "pairs.csv").write_text("sentence_good,sentence_bad\nIt works.,It work.\n")
    assert minimal_pairs.read(f"csv:{tmp_path}/pairs.csv")[0][:2] == (("It works.", "It work."), "pairs")


GOOD = {"sentence_good": "It works.", "sentence_bad": "It work."}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"sentence_good": "It works."}, "'sentence_bad' is missing; the columns are sentence_good."),
        (GOOD | {"sentence_bad": " "}, "'sentence_bad' is empty; fill it in, or remove the row."),
        (GOOD | {"sentence_good": 3}, "'sentence_good' is 3, which is not a string."),
        (
            GOOD | {"sentence_good": "Returns it. " * 40},
            "'sentence_good' has .* the model reads at most 32; shorten it.",
        ),
    ],
)
def test_a_pair_that_can_not_be_scored_is_named(model, tmp_path, row, sentence):
    source = write(tmp_path / "pairs.jsonl", [GOOD, row])
    with pytest.raises(InputError, match=rf"^{source}, line 2: its {sentence}$"):
        minimal_pairs.encode(minimal_pairs.read(source), model)


def test_what_is_no_source_is_refused(tmp_path):
    for source, sentence in (
        (f"jsonl:{tmp_path}/none*.jsonl", "no such file"),
        ("blimp", "must be jsonl:FILE"),
        (write(tmp_path / "empty.jsonl", []), "has no rows"),
    ):
        with pytest.raises(InputError, match=f"^--pairs=.*{sentence}"):
            minimal_pairs.read(source)
    with pytest.raises(InputError, match="line 1: its 'kind' is missing; the columns are sentence_good, sentence_bad"):
        minimal_pairs.read(write(tmp_path / "one.jsonl", [GOOD]), "kind")


def test_a_model_that_gives_no_numbers_has_no_accuracy(model, pairs):
    broken = dataclasses.replace(model, params=jax.tree.map(lambda x: np.full_like(x, np.nan), model.params))
    with pytest.raises(DamageError, match="not finite"):
        scores(broken, pairs[:2])
