"""Text from elsewhere: nothing of it moves a cursor, and all of it can be read."""

import io

import jinja2
import pytest
from rich.text import Text

from mlm.text import code, is_text, markdown, printable, show, table, templates


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(*parts, out: io.StringIO | None = None) -> str:
    out = out or io.StringIO()
    show(*parts, out=out)
    return out.getvalue()


def test_control_characters_are_shown_and_all_else_is_kept():
    assert printable("a\x1b[2J\r\x9b\u202e\n\udcff\x7f") == r"a\u001b[2J\u000d\u009b\u202e\u000a\udcff\u007f"
    text = "naïve 東京 \N{THUMBS UP SIGN}\t\N{ZERO WIDTH JOINER} <mask> \\"
    assert printable(text) == text


def test_half_of_a_surrogate_pair_is_no_text():
    assert is_text("naïve \N{THUMBS UP SIGN}") and is_text("")
    assert not any(map(is_text, ["\udcff", "a\ud800", None, 3, b"x"]))


def test_plain_text_stays_plain():
    assert markdown("a my_model-v2 of 0.5, 80%") == "a my_model-v2 of 0.5, 80%"
    assert code("hf:Salesforce/wikitext:wikitext-103-raw-v1") == "`hf:Salesforce/wikitext:wikitext-103-raw-v1`"
    assert code("a`|b") == "<code>a&#96;&#124;b</code>"


def test_templates_escape_what_they_show_and_refuse_to_guess():
    page = templates("mlm.report").from_string("<h1>{{ name }}</h1>{{ lead }}")
    assert "<h1>&lt;b&gt;</h1>" in page.render(name="<b>", lead="")
    with pytest.raises(jinja2.UndefinedError, match="'lead' is undefined"):
        page.render(name="x")


ROWS = [("short", "1", "a" * 300), ("[red]longer:smile:", "1,000", Text("colored", "red"))]


@pytest.mark.parametrize("forced", ["", "1"])
def test_a_pipe_gets_whole_lines_of_plain_text(monkeypatch, forced):
    """Whatever the environment says of colors and widths; nothing in a cell or a line is markup."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, forced)
    monkeypatch.setenv("COLUMNS", "40")
    text = shown(
        table("name", ">count", "words", rows=ROWS, indent=2), "", Text("x " * 100, "red"), "[b]\x1b[2J" + "y" * 200
    )
    assert text.splitlines() == [
        "  name                count  words",
        "  short                   1  " + "a" * 300,
        "  [red]longer:smile:  1,000  colored",
        "",
        ("x " * 100).rstrip(),
        "[b]\x1b[2J" + "y" * 200,
    ]


@pytest.mark.parametrize(("term", "cell"), [("xterm", "\x1b[31mcolored "), ("dumb", "colored\n")])
def test_a_terminal_gets_colors_and_no_control_characters(monkeypatch, term, cell):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown(table("", "", "", rows=ROWS), "[b]\x1b[2J\n" + "y" * 50, out=Terminal())
    assert f"1,000  {cell}" in text and "\x1b[2J" not in text
    assert "a" * 300 in text, "nothing is cut, and a terminal wraps long lines itself"
    assert shown(Text("z" * 50), out=Terminal()) == "z" * 50 + "\n"
    assert text.splitlines()[-1] == r"[b]\u001b[2J\u000a" + "y" * 50


def test_a_table_without_heads_begins_with_its_first_row():
    assert shown(table("", "", rows=[("a", "\x1b[2J")])) == "a  \\u001b[2J\n"


def test_a_pipe_that_is_not_utf8_gets_utf8():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show("naïve", table("", rows=[("東京",)]), out=out)
    assert out.buffer.getvalue().decode() == "naïve\n東京\n"
