"""fill-mask: what comes out, what is refused, the two ways to call it, and the same from PyTorch's pipeline."""

import io
import json

import jax
import numpy as np
import pytest
import scipy
from transformers import FlaxRobertaForMaskedLM

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.inference import fill_mask
from mlm.inference.answers import answer_texts
from mlm.inference.fill_mask import FillMask
from mlm.model.module import position_ids
from tests.support.streams import Pipe, Terminal

TEXTS = [
    "The function returns a <mask> of all elements.",
    "<mask>",
    "If <mask> is given, the <mask> is the same and the <mask> is not set.",
    "Return the ax<mask>.",
]


@pytest.fixture(scope="module")
def tok(model):
    return tokenizer.load(model.tokenizer)


@pytest.fixture(scope="module")
def filler(model, tok):
    return FillMask(model, tok, 5)


def run(predictor, *, texts=(), stdin="") -> str:
    """Returns what the command prints for texts, or for lines of a pipe."""
    stdout = io.StringIO()
    answer_texts(predictor, list(texts), Terminal() if texts else Pipe(stdin), stdout)
    return stdout.getvalue()


def test_fillings_are_the_softmax_of_the_full_head_without_padding(model, tok, filler):
    """Against the stock head on every position of the text alone: neither padding nor batching changes a filling."""
    module = FlaxRobertaForMaskedLM.module_class(model.config)
    apply = jax.jit(lambda *batch: module.apply({"params": model.params}, *batch, None).logits[0])
    seen = set()
    # each length is a program of its own
    for text, fillings in zip(TEXTS[::2], filler(TEXTS)[::2], strict=True):
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
            np.testing.assert_allclose(
                [filling["score"] for filling in found], scores[best], rtol=1e-4
            )
            assert [filling["token_str"] for filling in found] == [
                tok.decode([token]) for token in best
            ]
            seen.add(tuple(best))
    assert len(seen) > 2, "fillings that don't depend on the text prove little"


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


@pytest.mark.parametrize(
    ("line", "match"), [(b"\xff\xfe <mask>", "^line 3: .* UTF-8"), (b"c", "^line 3: .*<mask>")]
)
def test_a_bad_line_is_named_and_what_came_before_is_written(filler, line, match):
    """Whatever the locale makes of the pipe; Python's own for LC_ALL=C lets every byte through."""
    content = "a <mask>\nnaïve <mask>\n".encode() + line + b"\nd <mask>\n"
    stdin = io.TextIOWrapper(io.BytesIO(content), encoding="ascii", errors="surrogateescape")
    stdout = io.StringIO()
    with pytest.raises(InputError, match=match):
        answer_texts(filler, [], stdin, stdout)
    texts = [json.loads(answer)["text"] for answer in stdout.getvalue().splitlines()]
    assert texts == ["a <mask>", "naïve <mask>"]


def test_targets_alone_are_filled_in_and_those_of_several_pieces_or_none_are_said(
    model, tok, capsys
):
    long = " extraordinarily"
    first = tok(long, add_special_tokens=False)["input_ids"][0]
    assert fill_mask.target_ids(tok, [long, long]) == [first]
    assert repr(long) in capsys.readouterr().err
    known = tok.convert_tokens_to_ids("\N{LOWER ONE EIGHTH BLOCK}the")
    assert fill_mask.target_ids(tok, ["", " the"]) == [known]
    assert "''" in capsys.readouterr().err
    table = run(FillMask(model, tok, 5, [" the", " a"]), texts=[TEXTS[0]]).strip().splitlines()
    assert sorted(line.split()[1] for line in table[1:]) == ["a", "the"]
    probs = {f["token"]: f["score"] for f in FillMask(model, tok, 1000)([TEXTS[0]])[0][0]}
    shown = {line.split()[1]: line.split()[0] for line in table[1:]}
    assert shown["the"] == f"{probs[known]:.2%}", "the share of the whole vocabulary"
