"""Text from elsewhere: nothing of it moves a cursor, and all of it can be read."""

import fcntl
import io
import os
import struct
import subprocess
import sys
import termios

import pytest
from rich.text import Text

from mlm.text import can_draw, code, markdown, prepare_streams, printable, show, table
from tests.support.streams import Terminal


def shown(*parts, out: io.StringIO) -> str:
    show(*parts, out=out)
    return out.getvalue()


def test_control_characters_are_shown_and_all_else_is_kept():
    hostile = "a\x1b[2J\r\x9b\u202e\n\udcff\x7f"
    assert printable(hostile) == r"a\u001b[2J\u000d\u009b\u202e\u000a\udcff\u007f"
    text = "naïve 東京 \N{THUMBS UP SIGN}\t\N{ZERO WIDTH JOINER} <mask> \\"
    assert printable(text) == text


def test_code_in_markdown():
    assert markdown("a my_model-v2 of 0.5, 80%") == "a my_model-v2 of 0.5, 80%"
    assert code("a`|b") == "<code>a&#96;&#124;b</code>"


ROWS = [("short", "1", "a" * 300), ("[red]longer:smile:", "1,000", Text("colored", "red"))]


@pytest.mark.parametrize("forced", ["", "1"])
def test_a_pipe_gets_whole_lines_of_plain_text(monkeypatch, forced):
    """Whatever the environment says of colors and widths; nothing in a cell or a line is markup."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, forced)
    monkeypatch.setenv("COLUMNS", "40")
    text = shown(
        table("name", ">count", "words", rows=ROWS, indent=2),
        "",
        Text("x " * 100, "red"),
        "[b]\x1b[2J" + "y" * 200,
        out=io.StringIO(),
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


@pytest.mark.parametrize(
    ("is_terminal", "encoding", "expected"),
    [
        (False, "ascii", "naïve 東京 \\udcff\n東京\n".encode()),
        (True, "latin-1", b"na\xefve \\u6771\\u4eac \\udcff\n\\u6771\\u4eac\n"),
    ],
)
def test_output_takes_any_text(monkeypatch, is_terminal, encoding, expected):
    """A pipe gets UTF-8, a terminal what it can show: of a table, a line, a warning."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding))
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: is_terminal)
    prepare_streams()
    print("naïve 東京 \udcff")
    show(table("", rows=[("東京",)]))
    print("naïve 東京 \udcff\n東京", file=sys.stderr, flush=True)
    assert sys.stdout.buffer.getvalue() == sys.stderr.buffer.getvalue() == expected


def test_a_terminal_of_no_rows_or_columns_gets_lines_not_bars():
    terminal, other = os.openpty()
    with open(terminal, "w") as stream:
        for rows, columns, draws in ((25, 80, True), (0, 80, False), (0, 0, False)):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            assert can_draw(stream) == draws
    os.close(other)
    assert not can_draw(io.StringIO())


CLOSED = """
import os, sys
for number in (0, 1, 2): os.close(number)
sys.stdin = sys.stdout = sys.stderr = None
from mlm.text import prepare_streams, show
prepare_streams()
with open(sys.argv[1], "w") as file:
    print("lost"), print("lost", file=sys.stderr), show("lost")
    os.write(1, b"lost"), os.write(2, b"lost")
    file.write(f"{sys.stdin.read()!r} {file.fileno() > 2} {os.get_inheritable(2)}")
"""


@pytest.mark.standard
def test_closed_streams_are_no_files(tmp_path):
    """As with `>&-`: what libraries write to stdout does not end up in the file that was opened first."""
    subprocess.run([sys.executable, "-c", CLOSED, str(tmp_path / "file")], check=True)
    assert (tmp_path / "file").read_text() == "'' True True"
