"""The result of `compare` as tables, on a terminal and on a page. Nothing here imports jax."""

from collections.abc import Iterator
from typing import Any

from mlm.report import page

METRICS = {
    "nats_per_word": ("nats a word", ".3f"),
    "bits_per_byte": ("bits a byte", ".3f"),
    "exact_match": ("exact", ".1%"),
}
COUNTS = {"tokens_per_word": ".2f", "unknown": ",", "joined": ",", "changed": ","}


def summary(result: dict[str, Any]) -> str:
    """Returns what was asked, as sentences."""
    n = {key: f"{value:,}" for key, value in result.items() if isinstance(value, int)}
    return (
        f"{n['asked']} of the {n['words']} words in {n['documents']} documents, drawn by seed {n['seed']}, each "
        f"predicted alone in a window of at most {n['window']} characters. {n['documents_cut']} documents were cut "
        f"before the white space nearest the middle, and {n['windows_cut_for_positions']} windows once more for the "
        f"positions of a model; {n['in_no_window']} words are in no window."
    )


def tables(result: dict[str, Any]) -> Iterator[tuple[list[str], page.Rows]]:
    """Yields heads (">": of numbers) and rows: all words with the models' differences, groups of words, counts."""
    heads = [head for name, _ in METRICS.values() for head in (f">{name}", "95%")]
    for group, bands in result["groups"].items():
        rows = [
            (band, f"{estimates['words']:,}", name, *_cells(scores))
            for band, estimates in bands.items()
            for name, scores in estimates["scores"].items()
            if group == "words" or name in result["models"]
        ]
        yield [group, ">count", "model", *heads], rows
    rows = [
        (name, *(format(m[key], spec) for key, spec in COUNTS.items()))
        for name, m in result["models"].items()
    ]
    yield ["words asked", *(f">{key.replace('_per_', ' a ')}" for key in COUNTS)], rows


def _cells(scores: dict[str, dict[str, float]]) -> Iterator[str]:
    for metric, (_, spec) in METRICS.items():
        mean, *interval = scores[metric].values()
        yield format(mean, spec)
        yield f"\u00b1 {interval[1] - mean:{spec}}" if interval else ""


def to_page(result: dict[str, Any]) -> str:
    """Returns a page, one file that needs no network."""
    shown = [
        ("", [[head.removeprefix(">") for head in heads], *rows], "numbers")
        for heads, rows in tables(result)
    ]
    return page.render_tables(result["source"], summary(result), shown)
