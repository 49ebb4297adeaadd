"""Stretches of words against plain Python, on docstrings."""

import os
import subprocess
import sys
import unicodedata

import numpy as np
import pytest

from mlm.data import keep_out


def words(text: str) -> list[str]:
    return "".join(c for c in text.casefold() if unicodedata.category(c)[0] not in "PS").split()


def pieces(text: str, count: int = 13) -> set[tuple[str, ...]]:
    own = words(text)
    return {tuple(own[place : place + count]) for place in range(len(own) - count + 1)}


@pytest.fixture(scope="module")
def texts_(texts: list[str]) -> list[str]:
    return [*texts[:1500], "", "one", " ".join("abcdefghijklm"), "\u3000 " * 20]


def test_documents_with_a_stretch_are_those_found_by_plain_python(texts_):
    benchmark = [text.upper().replace(" ", " - ") for text in texts_[::9]]
    banned = keep_out.of_texts(benchmark)
    known = set().union(*map(pieces, benchmark))
    assert len(banned) == len(known) > 2000
    assert (np.diff(banned.astype(object)) > 0).all()
    found = keep_out.holds(texts_, banned)
    assert found.tolist() == [not known.isdisjoint(pieces(text)) for text in texts_]
    assert 100 < found.sum() < 1000


def test_words_have_no_case_and_no_punctuation():
    plain = "strasse one two three four five six seven eight nine ten dont eleven"
    styled = "STRAßE\u00a0one,two three\u2028four\tFIVE «six» seven \u2013 eight nine $ ten don\u2019t! (Eleven)"
    banned = keep_out.of_texts([plain])
    assert len(banned) == 1
    assert keep_out.holds([styled.replace("one,two", "one, two"), styled, plain + "s"], banned).tolist() == [1, 0, 0]


def test_a_stretch_stays_within_a_document():
    halves = ["a b c d e f g", "h i j k l m n"]
    assert not keep_out.holds(halves, keep_out.of_texts([" ".join(halves)])).any()
    assert not keep_out.holds(["a " * 20], keep_out.of_texts(halves)).any(), "nothing is kept out by short texts"


def test_hashes_are_the_same_in_every_process(texts_):
    code = "from mlm.data import keep_out; print(keep_out.of_texts([input()]).tolist())"
    text = " ".join(max(texts_, key=len).split())
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    printed = subprocess.run(
        [sys.executable, "-c", code], input=text, capture_output=True, text=True, env=env, check=True
    )
    assert printed.stdout.strip() == str(keep_out.of_texts([text]).tolist())
