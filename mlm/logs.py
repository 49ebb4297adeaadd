"""The logs of a run, without jax. metrics.jsonl and timing.jsonl hold one JSON object a line."""

from __future__ import annotations

import json
import time
from typing import Any

from mlm.errors import DamageError
from mlm.paths import UPath, is_remote, write_text

RESULTS = "evaluation.json"  # beside a model: what the command `evaluate` found
EVERY = 20.0  # seconds between two writes of a log in a bucket, which takes an object about once a second


class Lines:
    """Appends to a log; in a bucket, where nothing can be appended to, the whole object is replaced now and then.

    What a kill can lose there are lines since the last `flush`, so that comes before each checkpoint: what is cut at a
    restart are only lines after one.
    """

    def __init__(self, path: UPath):
        """Opens a log that `cut` has left whole."""
        self._path, self._remote = path, is_remote(path)
        there = self._remote and path.is_file()
        self._text: list[str] = [path.read_text()] if there else []
        self._written, self._when = len(self._text), time.monotonic()

    def append(self, values: dict[str, Any]) -> None:
        """Appends an object as a line."""
        line = json.dumps(values) + "\n"
        if not self._remote:
            with self._path.open("a") as file:
                file.write(line)
            return
        self._text.append(line)
        if time.monotonic() - self._when >= EVERY:
            self.flush()

    def flush(self) -> None:
        """Returns when all lines are where a kill leaves them."""
        if self._remote and self._written < len(self._text):
            text = "".join(self._text)
            write_text(self._path, text)
            self._text, self._written, self._when = [text], 1, time.monotonic()


def cut(path: UPath, start: int) -> None:
    """Drops the lines of metrics.jsonl after update `start`, and a last line that was torn by a kill.

    Raises:
      DamageError: a line in the middle of the log is not JSON.
    """
    if not path.is_file():
        return
    lines = _lines(path)
    kept = [line for line, entry in _entries(path, lines) if entry["step"] <= start]
    if kept != lines:
        write_text(path, "".join(kept))


def read(path: UPath, kind: str = "") -> list[dict[str, Any]]:
    """Returns the lines of one kind of a log, or of all kinds; none if there is no such file.

    Raises:
      DamageError: a line in the middle of the log is not JSON.
    """
    if not path.is_file():
        return []
    return [entry for _, entry in _entries(path, _lines(path)) if kind in ("", entry["kind"])]


def read_object(path: UPath) -> dict[str, Any]:
    """Returns the content of a JSON file such as config.json; nothing if there is no such file.

    Raises:
      DamageError: it is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError):  # of Unicode too
        content = None
    if not isinstance(content, dict):
        raise DamageError(f"{path}: is not a JSON object; put a good copy in its place, or remove it.")
    return content


def _lines(path: UPath) -> list[str]:
    return path.read_bytes().decode(errors="surrogateescape").splitlines(keepends=True)


def _entries(path: UPath, lines: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Returns (line, its content) for each whole line: a last one without its newline was torn by a kill."""
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            continue
        try:
            line.encode()  # what was not UTF-8 is no log of ours
            entry = json.loads(line)
            if type(entry["step"]) is not int or not isinstance(entry["kind"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DamageError(f"{path}, line {number}: is not a line of a log; remove it, or the file.") from None
        entries.append((line, entry))
    return entries
