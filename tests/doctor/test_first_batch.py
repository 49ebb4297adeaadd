"""The rows of the first batch as a person sees them: the masks are marked, and nothing of the corpus is obeyed."""

import io

from mlm.doctor import first_batch
from mlm.text import show
from tests.support.streams import Terminal

ROW = [
    (" the", "", ""),
    (" cat", "mask", "<mask>"),
    (" sat\n\x1b[2J", "", ""),
    (" on", "random", " off\x1b[0m"),
    (" [red]it", "kept", " it"),
]


def shown(out: io.StringIO) -> str:
    show(*first_batch.render([ROW]), out=out)
    return out.getvalue().splitlines()[-1]


def test_marks_without_colors_in_a_pipe():
    assert shown(io.StringIO()) == r"   the [cat] sat \u001b[2J [on> off\u001b[0m] [[red]it=]"


def test_colors_of_the_marks_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    wanted = r"   the !31m[cat]!0m sat \u001b[2J !35m[on> off\u001b[0m]!0m !36m[[red]it=]!0m"
    assert shown(Terminal()) == wanted.replace("!", "\x1b[")
