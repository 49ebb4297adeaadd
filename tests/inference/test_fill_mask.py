"""fill-mask: what comes out, what is refused, the two ways to call it, and the same from PyTorch's pipeline."""

import dataclasses
import functools
import io
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from transformers import FlaxRobertaForMaskedLM

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.export import export
from mlm.inference import fill_mask, minimal_pairs
from mlm.inference.minimal_pairs import Pair
from mlm.model.module import position_ids
from mlm.pretrained import load
from tests import ROOT
from tests.support.processes import environment
from tests.support.pytorch import run_torch
from tests.support.streams import Pipe
from tests.support.trained_model import train_tokenizer

TEXTS = [
    "The function returns a <mask> of all elements.",
    "<mask>",
    "If <mask> is given, the <mask> is closed and the <mask> is left open.",
    "Return the ax<mask>.",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def tok(model):
    return tokenizer.load(model.tokenizer)


@pytest.fixture(scope="module")
def filler(model, tok):
    return fill_mask.FillMask(model, tok, 5)


def test_fillings_are_the_softmax_of_the_full_head_without_padding(model, tok, filler):
    """Against the stock head on every position of the text alone: neither padding nor batching changes a filling."""
    module = FlaxRobertaForMaskedLM.module_class(model.config)
    apply = jax.jit(lambda *batch: module.apply({"params": model.params}, *batch, None).logits[0])
    for text, fillings in zip(TEXTS, filler(TEXTS), strict=True):
        ids = np.asarray([tok(text)["input_ids"]], np.int32)
        ones = np.ones_like(ids)
        positions = position_ids(jax.numpy.asarray(ones), model.config.pad_token_id + 1)
        logits = apply(ids, ones, 0 * ids, positions)
        masks = np.flatnonzero(ids[0] == tok.mask_token_id)
        assert len(fillings) == len(masks) == text.count("<mask>")
        for mask, found in zip(masks, fillings, strict=True):
            scores = np.asarray(jax.nn.softmax(logits[mask]))
            best = np.argsort(-scores)[:5]
            assert [filling["token"] for filling in found] == best.tolist(), text
            np.testing.assert_allclose([filling["score"] for filling in found], scores[best], rtol=1e-4)
            assert [filling["token_str"] for filling in found] == [tok.decode([token]) for token in best]


def test_fillings_depend_on_the_context(filler):
    first, second = filler(["Returns the <mask> of the array.", "Raised when the file <mask> not exist."])
    assert [f["token"] for f in first[0]] != [f["token"] for f in second[0]]


def test_a_text_is_filled_the_same_in_any_company(model, tok, filler):
    many = [TEXTS[i % len(TEXTS)] for i in range(23)]
    alone = {text: filler([text])[0] for text in TEXTS}
    for text, fillings in zip(many, fill_mask.FillMask(model, tok, 5)(many), strict=True):
        for mask, expected in zip(fillings, alone[text], strict=True):
            assert [f["token"] for f in mask] == [f["token"] for f in expected]
            assert [f["score"] for f in mask] == pytest.approx([f["score"] for f in expected], rel=1e-4)


def test_few_compilations(model, tok):
    filler = fill_mask.FillMask(model, tok, 3)
    filler(["a <mask> b " + "c " * count for count in range(24)])
    assert filler._fillings._cache_size() == 1, "texts of up to 32 tokens with one mask must share one program"


def test_a_row_as_long_as_the_positions_is_read_and_a_longer_one_refused(tok, filler):
    text = "<mask>" * 30  # <s> and </s> come on top
    assert len(tok(text)["input_ids"]) == 32
    assert all(np.isfinite(filling["score"]) for mask in filler([text])[0] for filling in mask)
    with pytest.raises(InputError, match="33 tokens, the model reads at most 32"):
        filler([text + "<mask>"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no mask here", "the text 'no mask here': has no <mask> in it"),
        ("", "the text '': is empty"),
        ("  \t", "is empty"),
        ("a <mask> and <pad>", "holds the padding token <pad>"),
        ("x" * 80, r"the text 'x{57,}\.\.\.': has no <mask>"),
    ],
)
def test_what_can_not_be_filled_is_named(filler, text, words):
    with pytest.raises(InputError, match=words):
        filler(["a fine <mask>", text])


@pytest.mark.parametrize("top_k", [0, -1, 1_000_000])
def test_top_k_out_of_range(model, tok, top_k):
    with pytest.raises(InputError, match=f"--top-k={top_k}: must be from 1 to 1000"):
        fill_mask.FillMask(model, tok, top_k)


def test_a_tokenizer_larger_than_the_model_is_refused(model, tok, tmp_path):
    tok.save_pretrained(tmp_path)
    larger = tokenizer.load(str(tmp_path))
    larger.add_tokens(["another"])
    larger.save_pretrained(tmp_path)
    model, pair = dataclasses.replace(model, tokenizer=str(tmp_path)), Pair(("A dog barks.", "A dog bark."), "", "")
    for scored in (lambda: fill_mask.FillMask(model, larger, 5), lambda: minimal_pairs.encode([pair], model)):
        with pytest.raises(InputError, match=r"has 1000 vocabulary entries, its tokenizer .* has 1001"):
            scored()


def test_texts_give_a_table(model, filler):
    out = io.StringIO()
    fill_mask.run(model, texts=[TEXTS[0], TEXTS[2]], top_k=5, stdin=Terminal(), stdout=out)
    one, three, _ = out.getvalue().split("\n\n")
    lines = one.splitlines()
    assert lines[0] == TEXTS[0]
    assert len(lines) == 6
    best = filler([TEXTS[0]])[0][0][0]
    assert lines[1].split() == [f"{best['score']:.2%}", best["token_str"]]
    lines = three.splitlines()
    assert lines[0] == TEXTS[2]
    assert [lines[1], lines[7], lines[13]] == ["  mask 1 of 3", "  mask 2 of 3", "  mask 3 of 3"]
    assert len(lines) == 1 + 3 * 6


def test_a_pipe_gives_a_line_of_json_for_each_line(model, filler):
    texts = [f"{TEXTS[i % 4]} {i}" for i in range(fill_mask.STREAM + 5)]  # more than are filled at a time
    out = io.StringIO()
    fill_mask.run(model, texts=None, top_k=5, stdin=Pipe("\n".join(texts) + "\r\n"), stdout=out)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["text"] for line in lines] == texts
    expected = filler(texts)
    for line, fillings in zip(lines, expected, strict=True):
        assert [[f["token"] for f in mask] for mask in line["fillings"]] == [[f["token"] for f in m] for m in fillings]


def test_a_bad_line_is_named_and_what_came_before_is_written(model):
    out = io.StringIO()
    with pytest.raises(InputError, match="line 3: has no <mask> in it"):
        fill_mask.run(model, texts=[], top_k=1, stdin=Pipe("a <mask>\nb <mask>\nc\nd <mask>\n"), stdout=out)
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == ["a <mask>", "b <mask>"]


BYTES = "a <mask>\nnaïve <mask>\n".encode() + b"\xff\xfe <mask>\nc <mask>\n"


@pytest.mark.parametrize(
    ("encoding", "errors"), [("utf-8", "strict"), ("ascii", "surrogateescape"), ("latin-1", "strict")]
)
def test_a_line_that_is_not_utf8_is_named_and_what_came_before_is_written(model, encoding, errors):
    """Whatever the locale makes of the pipe; Python's own for LC_ALL=C lets every byte through."""
    stdin = io.TextIOWrapper(io.BytesIO(BYTES), encoding=encoding, errors=errors)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with pytest.raises(InputError, match=r"^line 3: is not UTF-8; convert it first\.$"):
        fill_mask.run(model, texts=[], top_k=1, stdin=stdin, stdout=stdout)
    written = stdout.buffer.getvalue().decode()
    assert [json.loads(line)["text"] for line in written.splitlines()] == ["a <mask>", "naïve <mask>"]


@pytest.mark.standard
def test_a_pipe_that_is_not_utf8_ends_the_command_with_code_2(model, tmp_path):
    folder = folder_with(model, model.tokenizer, tmp_path / "model")
    command = [sys.executable, "-m", "mlm", "predict", f"--model={folder}", "--top-k=1"]
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment(1) | locale, input=BYTES, capture_output=True, timeout=200)
    assert done.returncode == 2, done.stderr.decode()
    assert done.stderr.decode().endswith("mlm predict: line 3: is not UTF-8; convert it first.\n")
    assert b"Traceback" not in done.stderr
    assert [json.loads(line)["text"] for line in done.stdout.decode().splitlines()] == ["a <mask>", "naïve <mask>"]


def test_arguments_that_are_not_utf8_are_refused(model):
    with pytest.raises(InputError, match=r"the text '\\udcff <mask>': is not UTF-8"):
        fill_mask.run(model, texts=["\udcff <mask>"], top_k=1, stdin=Terminal(), stdout=io.StringIO())
    with pytest.raises(InputError, match=r"--targets: '\\udcff': is not UTF-8"):
        fill_mask.run(model, texts=TEXTS, top_k=1, targets=["\udcff"], stdin=Terminal(), stdout=io.StringIO())


def test_a_terminal_gets_no_control_characters_and_a_pipe_the_bytes_as_they_are(model):
    hostile = "a \x1b[2J\x9b2K\u202e\x07 <mask>"
    for kind in (Terminal, Pipe):
        table, lines = kind(), kind()
        fill_mask.run(model, texts=[hostile], top_k=1, stdin=Terminal(), stdout=table)
        fill_mask.run(model, texts=[], top_k=1, stdin=Pipe(hostile), stdout=lines)
        if kind is Pipe:
            assert table.getvalue().startswith(f"{hostile}\n") and json.loads(lines.getvalue())["text"] == hostile
            continue
        assert table.getvalue().startswith(r"a \u001b[2J\u009b2K\u202e\u0007 <mask>" + "\n  ")
        assert all(line.isprintable() for line in (table.getvalue() + lines.getvalue()).split("\n"))
        assert json.loads(lines.getvalue())["text"] == hostile, "it is JSON all the same"


def test_no_texts_and_no_pipe(model):
    with pytest.raises(InputError, match="give texts"):
        fill_mask.run(model, texts=[], top_k=1, stdin=Terminal(), stdout=io.StringIO())


# Words that are entries of the vocabulary, with and without their space, of several pieces, and unknown to it.
TARGETS = [[" of", " the", " the"], [" the", "the", "of", " extraordinarily", "\N{THUMBS UP SIGN}"]]
MASKED = ["The function returns a <mask> of all elements.", "Returns the<mask> of the <mask>.", "ax<mask>", "<mask>"]


def folder_with(model: load.Pretrained, tokenizer_folder: str, folder: pathlib.Path) -> str:
    export.write_model(model, pathlib.Path(shutil.copytree(tokenizer_folder, folder)))
    return str(folder)


@pytest.mark.slow
def test_fillings_and_targets_are_those_of_pytorch_s_pipeline(model, tmp_path, capsys):
    """For a Metaspace and a byte-level tokenizer, in which " the" and "the" are different entries."""
    bpe = dataclasses.replace(model, tokenizer=train_tokenizer(tmp_path / "bpe tokenizer", "bpe"))
    models = {folder_with(each, each.tokenizer, tmp_path / str(n)): each for n, each in enumerate((model, bpe))}
    cases = [
        {"folder": folder, "text": text, "targets": targets, "top_k": top_k}
        for folder in models
        for text in MASKED
        for targets, top_k in [([], 5), *((targets, 3) for targets in TARGETS)]
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    wanted = json.loads(run_torch(4, "tests/pytorch/fill_mask.py", tmp_path / "cases.json"))
    toks = {folder: tokenizer.load(each.tokenizer) for folder, each in models.items()}

    @functools.cache
    def filler(folder: str, top_k: int, *targets: str) -> fill_mask.FillMask:
        return fill_mask.FillMask(models[folder], toks[folder], top_k, targets)

    for case, masks in zip(cases, wanted, strict=True):
        (found,) = filler(case["folder"], case["top_k"], *case["targets"])([case["text"]])
        for ours, theirs in zip(found, masks, strict=True):
            assert [f["token"] for f in ours] == [f["token"] for f in theirs], case
            assert [f["token_str"] for f in ours] == [f["token_str"] for f in theirs], case
            assert [f["score"] for f in ours] == pytest.approx([f["score"] for f in theirs], rel=2e-4), case
    tok = toks[max(models)]
    assert fill_mask.target_ids(tok, [" the"]) != fill_mask.target_ids(tok, ["the"])


def test_a_space_before_the_mask_is_the_mask_s(model, tmp_path):
    """The filling brings its own space, so that with and without one the model reads the same."""
    for folder in (model.tokenizer, train_tokenizer(tmp_path / "bpe", "bpe")):
        tok = tokenizer.load(folder)
        assert tok("returns the <mask> of")["input_ids"] == tok("returns the<mask> of")["input_ids"]
        assert tok("returns the <mask> of")["input_ids"] != tok("returns the <mask>of")["input_ids"]


def test_targets_of_several_pieces_or_none_are_said(model, tok, capsys):
    long = " extraordinarily"
    first = tok(long, add_special_tokens=False)["input_ids"][0]
    assert fill_mask.target_ids(tok, [long, long]) == [first]
    assert f"the target {long!r} is " in capsys.readouterr().err
    known = tok.convert_tokens_to_ids("\N{LOWER ONE EIGHTH BLOCK}the")
    assert fill_mask.target_ids(tok, ["", " the"]) == [known]
    assert "the target '' has no piece" in capsys.readouterr().err
    with pytest.raises(InputError, match="--targets: none of the words"):
        fill_mask.FillMask(model, tok, 5, [""])


def test_targets_through_the_command(model):
    out = io.StringIO()
    words = [" the", " a"]
    fill_mask.run(model, texts=[TEXTS[0]], top_k=5, targets=words, stdin=Terminal(), stdout=out)
    assert sorted(line.split()[1] for line in out.getvalue().splitlines()[1:3]) == ["a", "the"]
    assert len(out.getvalue().strip().splitlines()) == 3
    piped = io.StringIO()
    fill_mask.run(model, texts=[], top_k=1, targets=words, stdin=Pipe(TEXTS[2]), stdout=piped)
    fillings = json.loads(piped.getvalue())["fillings"]
    assert [len(mask) for mask in fillings] == [1, 1, 1]
