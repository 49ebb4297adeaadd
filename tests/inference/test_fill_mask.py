"""fill-mask: what is refused, and the two ways to call it.

That the fillings are those of PyTorch's pipeline: tests/export/test_verify_export.py.
"""

import io
import json

import numpy as np
import pytest

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.inference import fill_mask
from mlm.inference.answers import answer_texts
from mlm.inference.fill_mask import FillMask
from tests.support.streams import Terminal

TEXT = "The function returns a <mask> of all elements."


@pytest.fixture(scope="module")
def tok(model):
    return tokenizer.load(model.tokenizer)


@pytest.fixture(scope="module")
def filler(model, tok):
    return FillMask(model, tok, 5)


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
    stdout = io.StringIO()
    answer_texts(FillMask(model, tok, 5, [" the", " a"]), [TEXT], Terminal(), stdout)
    table = stdout.getvalue().strip().splitlines()
    shown = {token: share for share, token, *_ in map(str.split, table[1:])}
    probs = {f["token"]: f["score"] for f in FillMask(model, tok, 1000)([TEXT])[0][0]}
    assert shown.keys() == {"a", "the"}
    assert shown["the"] == f"{probs[known]:.2%}", "the share of the whole vocabulary"
