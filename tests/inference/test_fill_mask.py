"""fill-mask: what comes out, what is refused, the two ways to call it, and the same from PyTorch's pipeline."""

import dataclasses
import io
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import scipy
from transformers import FlaxRobertaForMaskedLM

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.export import export
from mlm.inference import fill_mask, minimal_pairs
from mlm.inference.fill_mask import FillMask
from mlm.inference.minimal_pairs import Pair
from mlm.model.module import position_ids
from tests.support.pytorch import run_torch
from tests.support.streams import Pipe, Terminal
from tests.support.trained_model import train_tokenizer

TEXTS = [
    "The function returns a <mask> of all elements.",
    "<mask>",
    "If <mask> is given, the <mask> is closed and the <mask> is left open.",
    "Return the ax<mask>.",
]


@pytest.fixture(scope="module")
def tok(model):
    return tokenizer.load(model.tokenizer)


@pytest.fixture(scope="module")
def filler(model, tok):
    return FillMask(model, tok, 5)


@pytest.fixture
def compiled_once(model, filler, monkeypatch):
    """`run` uses the program of `filler`, for any number of fillings."""
    monkeypatch.setattr(fill_mask, "FillMask", lambda *_: filler)


def run(model, *, texts=(), stdin="", stdout=None, **settings) -> str:
    """Returns what the command prints for texts, or for lines of a pipe."""
    stdin, stdout = Terminal() if texts else Pipe(stdin), stdout or io.StringIO()
    fill_mask.run(model, texts=list(texts), stdin=stdin, stdout=stdout, **{"top_k": 5} | settings)
    return stdout.getvalue()


def test_fillings_are_the_softmax_of_the_full_head_without_padding(model, tok, filler):
    """Against the stock head on every position of the text alone: neither padding nor batching changes a filling."""
    module = FlaxRobertaForMaskedLM.module_class(model.config)
    apply = jax.jit(lambda *batch: module.apply({"params": model.params}, *batch, None).logits[0])
    seen = set()
    for text, fillings in zip(TEXTS[::2], filler(TEXTS)[::2], strict=True):  # each length is a program of its own
        ids = np.asarray([tok(text)["input_ids"]], np.int32)
        ones = np.ones_like(ids)
        positions = position_ids(jax.numpy.asarray(ones), model.config.pad_token_id + 1)
        logits = np.asarray(apply(ids, ones, 0 * ids, positions))
        masks = np.flatnonzero(ids[0] == tok.mask_token_id)
        assert len(fillings) == len(masks) == text.count("<mask>")
        for mask, found in zip(masks, fillings, strict=True):
            scores = scipy.special.softmax(logits[mask])
            best = np.argsort(-scores)[:5]
            assert [filling["token"] for filling in found] == best.tolist(), text
            np.testing.assert_allclose([filling["score"] for filling in found], scores[best], rtol=1e-4)
            assert [filling["token_str"] for filling in found] == [tok.decode([token]) for token in best]
            seen.add(tuple(best))
    assert len(seen) > 2, "fillings that don't depend on the text prove little"


def test_few_compilations(model, tok):
    filler = FillMask(model, tok, 3)
    filler(["a <mask> b " + "c " * count for count in range(24)])
    assert filler._fillings._cache_size() == 1, "texts of up to 32 tokens with one mask must share one program"


def test_a_row_as_long_as_the_positions_is_read_and_a_longer_one_refused(tok, filler):
    text = "<mask>" * 30  # <s> and </s> come on top
    assert len(tok(text)["input_ids"]) == 32
    assert all(np.isfinite(filling["score"]) for mask in filler([text])[0] for filling in mask)
    with pytest.raises(InputError, match=r"33 tokens, .* 32"):
        filler([text + "<mask>"])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("no mask here", "the text 'no mask here': .*<mask>"),
        ("  \t", "the text .* empty"),
        ("a <mask> and <pad>", "the text .*: .* <pad>"),
        ("\udcff <mask>", r"the text '\\udcff <mask>': .* UTF-8"),
        ("x" * 80, r"the text 'x{57,}\.\.\.': "),
    ],
)
def test_what_can_not_be_filled_is_named(filler, text, match):
    with pytest.raises(InputError, match=match):
        filler(["a fine <mask>", text])


def test_calls_without_sense(model, tok):
    for top_k in (0, 1_000_000):
        with pytest.raises(InputError, match=f"--top-k={top_k}: .*1000"):
            FillMask(model, tok, top_k)
    for targets, match in (([""], "--targets: "), (["\udcff"], r"--targets: '\\udcff': .* UTF-8")):
        with pytest.raises(InputError, match=match):
            FillMask(model, tok, 5, targets)
    with pytest.raises(InputError, match="give texts"):
        fill_mask.run(model, texts=[], top_k=1, stdin=Terminal(), stdout=io.StringIO())


def test_a_tokenizer_larger_than_the_model_is_refused(model, tok, tmp_path):
    tok.save_pretrained(tmp_path)
    larger = tokenizer.load(str(tmp_path))
    larger.add_tokens(["another"])
    larger.save_pretrained(tmp_path)
    model, pair = dataclasses.replace(model, tokenizer=str(tmp_path)), Pair(("A dog barks.", "A dog bark."), "", "")
    for scored in (lambda: FillMask(model, larger, 5), lambda: minimal_pairs.encode([pair], model)):
        with pytest.raises(InputError, match=r"has 1000 vocabulary entries, .* 1001"):
            scored()


@pytest.mark.usefixtures("compiled_once")
def test_texts_give_a_table(model, filler):
    one, three, _ = run(model, texts=[TEXTS[0], TEXTS[2]]).split("\n\n")
    lines = one.splitlines()
    assert lines[0] == TEXTS[0]
    assert len(lines) == 6
    best = filler([TEXTS[0]])[0][0][0]
    assert lines[1].split() == [f"{best['score']:.2%}", best["token_str"].strip() or repr(best["token_str"])]
    lines = three.splitlines()
    assert lines[0] == TEXTS[2]
    assert [lines[1], lines[7], lines[13]] == ["  mask 1 of 3", "  mask 2 of 3", "  mask 3 of 3"]
    assert len(lines) == 1 + 3 * 6


@pytest.mark.usefixtures("compiled_once")
def test_a_pipe_gives_a_line_of_json_for_each_line(model, filler):
    texts = [f"{TEXTS[i % 4]} {i}" for i in range(fill_mask.STREAM + 5)]  # more than are filled at a time
    lines = [json.loads(line) for line in run(model, stdin="\n".join(texts) + "\r\n").splitlines()]
    assert [line["text"] for line in lines] == texts
    for line, fillings in zip(lines[::7], filler(texts)[::7], strict=True):
        assert [[f["token"] for f in mask] for mask in line["fillings"]] == [[f["token"] for f in m] for m in fillings]


@pytest.mark.parametrize(
    ("encoding", "errors"), [("utf-8", "strict"), ("ascii", "surrogateescape"), ("latin-1", "strict")]
)
@pytest.mark.parametrize(("line", "match"), [(b"\xff\xfe <mask>", "^line 3: .* UTF-8"), (b"c", "^line 3: .*<mask>")])
@pytest.mark.usefixtures("compiled_once")
def test_a_bad_line_is_named_and_what_came_before_is_written(model, encoding, errors, line, match):
    """Whatever the locale makes of the pipe; Python's own for LC_ALL=C lets every byte through."""
    content = "a <mask>\nnaïve <mask>\n".encode() + line + b"\nd <mask>\n"
    stdin = io.TextIOWrapper(io.BytesIO(content), encoding=encoding, errors=errors)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with pytest.raises(InputError, match=match):
        fill_mask.run(model, texts=[], top_k=1, stdin=stdin, stdout=stdout)
    written = stdout.buffer.getvalue().decode()
    assert [json.loads(answer)["text"] for answer in written.splitlines()] == ["a <mask>", "naïve <mask>"]


@pytest.mark.usefixtures("compiled_once")
def test_a_terminal_gets_no_control_characters_and_a_pipe_the_bytes_as_they_are(model):
    hostile = "a \x1b[2J\x9b2K\u202e\x07 <mask>"
    table, lines = (run(model, stdout=Terminal(), **source) for source in ({"texts": [hostile]}, {"stdin": hostile}))
    assert table.startswith(r"a \u001b[2J\u009b2K\u202e\u0007 <mask>" + "\n  ")
    assert all(line.isprintable() for line in (table + lines).split("\n"))
    assert json.loads(lines)["text"] == hostile, "it is JSON all the same"
    table, lines = (run(model, stdout=Pipe(), **source) for source in ({"texts": [hostile]}, {"stdin": hostile}))
    assert table.startswith(f"{hostile}\n") and json.loads(lines)["text"] == hostile


# Words that are entries of the vocabulary, with and without their space, of several pieces, and unknown to it.
TARGETS = [" the", " the", "the", "of", " extraordinarily", "\N{THUMBS UP SIGN}"]


@pytest.mark.slow
def test_fillings_and_targets_are_those_of_pytorch_s_pipeline(model, tmp_path):
    """For a Metaspace and a byte-level tokenizer, in which " the" and "the" are different entries."""
    bpe = dataclasses.replace(model, tokenizer=train_tokenizer(tmp_path / "bpe tokenizer", "bpe"))
    models = {}
    for number, source in enumerate((model, bpe)):
        folder = pathlib.Path(shutil.copytree(source.tokenizer, tmp_path / str(number)))
        export.write_model(source, folder)
        models[str(folder)] = source
    cases = [
        {"folder": folder, "text": "Returns the<mask> of the <mask>.", "targets": targets, "top_k": 3}
        for folder in models
        for targets in ([], TARGETS)
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    wanted = json.loads(run_torch(4, "tests/pytorch/fill_mask.py", tmp_path / "cases.json"))
    for case, masks in zip(cases, wanted, strict=True):
        source = models[case["folder"]]
        (found,) = FillMask(source, tokenizer.load(source.tokenizer), 3, case["targets"])([case["text"]])
        for ours, theirs in zip(found, masks, strict=True):
            assert [f["token"] for f in ours] == [f["token"] for f in theirs], case
            assert [f["token_str"] for f in ours] == [f["token_str"] for f in theirs], case
            assert [f["score"] for f in ours] == pytest.approx([f["score"] for f in theirs], rel=2e-4), case


def test_a_space_before_the_mask_is_the_mask_s(tok, tmp_path):
    """The filling brings its own space, so that with and without one the model reads the same."""
    for encode in (tok, tokenizer.load(train_tokenizer(tmp_path / "bpe", "bpe"))):
        assert encode("returns the <mask> of")["input_ids"] == encode("returns the<mask> of")["input_ids"]
        assert encode("returns the <mask> of")["input_ids"] != encode("returns the <mask>of")["input_ids"]


def test_targets_alone_are_filled_in_and_those_of_several_pieces_or_none_are_said(model, tok, filler, capsys):
    long = " extraordinarily"
    first = tok(long, add_special_tokens=False)["input_ids"][0]
    assert fill_mask.target_ids(tok, [long, long]) == [first]
    assert repr(long) in capsys.readouterr().err
    known = tok.convert_tokens_to_ids("\N{LOWER ONE EIGHTH BLOCK}the")
    assert fill_mask.target_ids(tok, ["", " the"]) == [known]
    assert "''" in capsys.readouterr().err
    table = run(model, texts=[TEXTS[0]], targets=[" the", " a"]).strip().splitlines()
    assert sorted(line.split()[1] for line in table[1:]) == ["a", "the"]
    probs = {f["token"]: f["score"] for f in FillMask(model, tok, 1000)([TEXTS[0]])[0][0]}
    shown = {line.split()[1]: line.split()[0] for line in table[1:]}
    assert shown["the"] == f"{probs[known]:.2%}", "the share of the whole vocabulary"
