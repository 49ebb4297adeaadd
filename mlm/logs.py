"""The logs of a run, without jax. metrics.jsonl and timing.jsonl hold one JSON object a line."""

import json
import logging
import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlm.errors import DamageError
from mlm.paths import UPath, check_reachable, is_remote, write_text
from mlm.text import printable

RESULTS = "evaluation.json"  # beside a model: the scores of the command `evaluate`
SCORES = {  # in lines of metrics.jsonl and evaluation.json: key -> (name on a page, format)
    "step": ("steps", ","),
    "epoch": ("epochs", ".2f"),
    "loss": ("loss, nats", ".4f"),
    "loss_se_records": ("loss, standard error over records", ".4f"),
    "loss_se_draws": ("loss, standard error over draws of the masks", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "accuracy": ("accuracy", ".2%"),
    "bits_per_byte": ("bits per byte", ".4f"),
    "predictions": ("predictions", ","),
    "precision": ("precision, spans of words", ".2%"),
    "recall": ("recall, spans of words", ".2%"),
    "f1": ("F1, weighted", ".2%"),
    "f1_macro": ("F1, mean of classes", ".2%"),
    "f1_positive": ("F1 of the second class", ".2%"),
    "matthews": ("Matthews", ".4f"),
    "mse": ("mse", ".4f"),
    "pearson": ("pearson", ".4f"),
    "spearman": ("spearman", ".4f"),
    "words": ("words", ","),
    "words_cut": ("words cut off", ","),
    "rows": ("rows", ","),
}
# names of all numbers there, and of `evaluate`
STANDARD = (*SCORES, "grad_norm", "learning_rate", "skipped", "epoch")
STANDARD += tuple(f"pseudo_{name}" for name in ("loss", "perplexity", "accuracy", "tokens", "rows"))
NORMS = ("gradient_norms", "parameter_norms", "updates_over_parameters")  # in a row of norms.jsonl
# seconds between two writes of a log in a bucket, which can replace an object about once a second
EVERY = 20.0


class Once(logging.Filter):
    """Lets through the first line of each warning, once, and not what a library logs of an exception that it raises."""

    def __init__(self):
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to log a record, which it shortens."""
        if record.levelno < logging.WARNING or record.exc_info or str(record.msg) in self._seen:
            return False
        self._seen.add(str(record.msg))  # the text without its arguments, such as the step
        lines = re.sub(r"^(\[[^]]*\])+ *", "", record.getMessage()).strip().splitlines() or [""]
        record.msg = f"{Path(record.pathname).stem}: {printable(lines[0].rstrip(' ,'))}"
        record.args = ()
        return True


class Lines:
    """Appends to a log; in a bucket, where nothing can be appended to, replaces the object every EVERY seconds.

    A kill loses the lines since the last `flush`. It comes before each checkpoint, so a resumed run writes them again.
    """

    def __init__(self, path: UPath):
        """Opens a log without a torn line, see `cut`."""
        self._path = path
        self._remote = is_remote(path)
        self._text = path.read_text() if self._remote and path.is_file() else ""
        self._written = len(self._text)
        self._when = time.monotonic()

    def append(self, values: dict[str, Any]) -> None:
        """Appends an object as a line."""
        line = json.dumps(values) + "\n"
        if not self._remote:
            with self._path.open("a") as file:
                file.write(line)
            return
        self._text += line
        if time.monotonic() - self._when >= EVERY:
            self.flush()

    def flush(self) -> None:
        """Makes all lines safe from a kill."""
        if self._remote and self._written < len(self._text):
            write_text(self._path, self._text)
            self._written = len(self._text)
            self._when = time.monotonic()


def cut(path: UPath, start: int) -> None:
    """Drops the lines of metrics.jsonl after step `start`, and a last line that a kill has torn."""
    if path.is_file():
        kept = "".join(line for line, entry in _entries(path) if entry["step"] <= start)
        if len(kept.encode()) < path.stat().st_size:
            write_text(path, kept)


def read(path: UPath, kind: str = "") -> list[dict[str, Any]]:
    """Returns the lines of a log, or those of one kind; none if there is no such file. Raises DamageError."""
    if not path.is_file():
        return []
    return [entry for _, entry in _entries(path) if kind in ("", entry["kind"])]


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values, nested ones too, with None for numbers that JSON does not have."""
    nested = {key: finite(value) for key, value in values.items() if isinstance(value, dict)}
    absent = [
        key
        for key, value in values.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    return values | nested | dict.fromkeys(absent)


def by_set(scores: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns {"": the scores without a name, NAME: those of a validation set, which are "NAME/loss" and so on}."""
    sets: dict[str, dict[str, Any]] = {"": {}}
    for key, value in scores.items():
        name, _, score = key.rpartition("/")
        sets.setdefault(name, {})[score] = value
    return sets


def own_metrics(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the names of the metrics of a researcher's own (`Task.metrics`) in lines of metrics.jsonl, of no set."""
    names = dict.fromkeys(
        name for line in lines for name, value in line.items() if type(value) in (int, float)
    )
    return [name for name in names if name not in STANDARD and "/" not in name]


def show_own_metrics(values: dict[str, Any]) -> list[str]:
    """Returns the metrics of `own_metrics` in a line as text."""
    return [f"{name} {values[name]:.4g}" for name in own_metrics([values])]


def errors(scores: dict[str, Any], digits: int = 4) -> str:
    """Returns " (standard error 0.0123 over records, 0.0045 over draws)" of the loss, as far as it is known."""
    values = {of: scores.get(f"loss_se_{of}") for of in ("records", "draws")}
    known = [f"{value:.{digits}f} over {of}" for of, value in values.items() if value is not None]
    return f" (standard error {', '.join(known)})" if known else ""


def read_object(path: UPath) -> dict[str, Any]:
    """Returns the object in a JSON file such as config.json; {} if there is no such file. Raises DamageError."""
    check_reachable(str(path))
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())  # with a byte-order mark, too
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise DamageError(
            f"{path}: is not a JSON object; put a good copy in its place, or remove it."
        )
    return content


def _entries(path: UPath) -> list[tuple[str, dict[str, Any]]]:
    """Returns (line, its content) for each whole line: a kill may have torn the last one."""
    entries = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            continue
        try:
            entry = json.loads(line)
            if type(entry["step"]) is not int or not isinstance(entry["kind"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise DamageError(
                f"{path}, line {number}: is not a line of a log; remove it, or the file."
            ) from None
        entries.append((line.decode(), entry))
    return entries
