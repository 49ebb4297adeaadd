"""Text from elsewhere: nothing of it moves a cursor, and all of it can be read."""

import jinja2
import pytest

from mlm.text import code, is_text, markdown, printable, templates


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
    page = templates("mlm.report").get_template("page.html.j2")
    assert "<h1>&lt;b&gt;</h1>" in page.render(name="<b>", lead="")
    with pytest.raises(jinja2.UndefinedError, match="'lead' is undefined"):
        page.render(name="x")
