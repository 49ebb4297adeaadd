"""Reading what a run has written, without jax. metrics.jsonl and timing.jsonl hold one JSON object a line."""

from __future__ import annotations

import json
from typing import Any

from mlm.errors import DamageError
from mlm.paths import UPath


def cut(path: UPath, start: int) -> None:
    """Drops the lines of metrics.jsonl after update `start`, and a last line that was torn by a kill.

    Raises:
      DamageError: a line in the middle of the log is not JSON.
    """
    if not path.is_file():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line, entry in _entries(path, lines) if entry["step"] <= start]
    if kept != lines:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept))
        temporary.rename(path)


def read(path: UPath, kind: str = "") -> list[dict[str, Any]]:
    """Returns the lines of one kind of a log, or of all kinds; none if there is no such file.

    Raises:
      DamageError: a line in the middle of the log is not JSON.
    """
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [entry for _, entry in _entries(path, lines) if kind in ("", entry["kind"])]


def read_object(path: UPath) -> dict[str, Any]:
    """Returns the content of a JSON file such as config.json; nothing if there is no such file.

    Raises:
      DamageError: it is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise DamageError(f"{path}: is not a JSON object; put a good copy in its place, or remove it.")
    return content


def _entries(path: UPath, lines: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Returns (line, its content) for each whole line: a last one without its newline was torn by a kill."""
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            continue
        try:
            entry = json.loads(line)
            entry["step"], entry["kind"]
        except (ValueError, KeyError, TypeError):
            raise DamageError(f"{path}, line {number}: is not a line of a log; remove it, or the file.") from None
        entries.append((line, entry))
    return entries
