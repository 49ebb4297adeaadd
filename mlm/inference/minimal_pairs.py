"""Minimal pairs (BLiMP; Warstadt et al., 2020): does the model prefer the acceptable sentence of each pair?

It prefers the higher pseudo-log-likelihood, in float32: "original" masks each token in turn
(Salazar et al., 2020), "within_word" also those to its right in its word, as the tokenizer cuts
words (Kauf and Ivanova, 2023).

Dimensions: N sentences, L tokens in a row, P copies of rows with masks.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from mlm.data import labelled, tokenizer
from mlm.entry import MLM, Entry
from mlm.errors import InputError
from mlm.files import find_files
from mlm.inference import results, spans
from mlm.inference.forward import put_on_devices
from mlm.inference.results import Z
from mlm.paths import refusing
from mlm.pretrained import load
from mlm.tasks.changed_model import with_class
from mlm.text import table
from mlm.workdir import Workdir

FIELDS = ("sentence_good", "sentence_bad")
PHENOMENON = "UID"  # BLiMP's field
METHODS = ("original", "within_word")
LENGTHS = 16  # tokens: rows are padded to a multiple of it, each of which is compiled once


class Pair(NamedTuple):
    """Two sentences, the acceptable one first."""

    texts: tuple[str, str]
    phenomenon: str
    where: str  # its source and line


class Sentence(NamedTuple):
    """A tokenized sentence."""

    ids: tuple[int, ...]
    ends: tuple[int, ...]  # of the word of each token; 0: not scored


def run(
    config: ConfigDict,
    workdir: Workdir,
    *,
    model: str,
    source: str,
    phenomenon: str = "",
    entry: Entry = MLM,
    as_json: bool = False,
) -> dict[str, Any]:
    """Scores a model on the pairs of `read_pairs`; prints and keeps the results as `evaluate.run` does."""
    pairs = read_pairs(source, phenomenon)
    loaded = load.load(model or workdir, head=load.LM_HEAD)
    loaded = with_class(loaded, entry, command="evaluate")
    sums = pseudo_log_likelihoods(config, loaded, encode(pairs, loaded))
    differences = {method: sums_N[::2] - sums_N[1::2] for method, sums_N in sums.items()}
    result = {"pairs": source, "model": loaded.source, **accuracies(pairs, differences)}
    results.publish(result, [f"{loaded.source} on {source}", _table(result)], as_json=as_json)
    grouping = f" by {phenomenon}" if phenomenon else ""
    key = f"pairs {source}{grouping}, {results.weights_name(loaded)}"
    results.add_results(model, workdir, {key: result})
    return result


def read_pairs(source: str, phenomenon: str = "") -> list[Pair]:
    """Reads pairs from a source of `labelled`, whose FILE may be a pattern; without a phenomenon they have its name."""
    pairs = []
    for name in _tables(source):
        rows = _with_columns(labelled.read_table, name, source, phenomenon)
        file = PurePosixPath(name.partition(":")[2].removesuffix(".gz"))
        names = (label or file.stem for label in rows.labels)
        pairs += map(Pair, rows.texts, names, rows.places)
    return pairs


def check(source: str, phenomenon: str = "") -> None:
    """Raises InputError if the first row shows that these are no pairs."""
    _with_columns(labelled.check, _tables(source)[0], source, phenomenon)


def _with_columns(function: Callable, name: str, source: str, phenomenon: str) -> Any:
    """Calls `labelled.read_table` or `labelled.check` for a source that --pairs names."""
    columns = labelled.Columns(FIELDS, phenomenon or PHENOMENON)
    return function(
        name, columns, split="train", require_labels=phenomenon != "", key=f"--pairs={source}"
    )


def _tables(source: str) -> list[str]:
    """Returns the sources that match a pattern; raises InputError if there are none."""
    kind, _, rest = source.partition(":")
    if kind in ("hf", "tfds"):
        return [source]
    if kind not in ("jsonl", "csv"):
        kinds = "jsonl:FILE, csv:FILE, hf:NAME[:CONFIG][#SPLIT] or tfds:NAME[#SPLIT]"
        raise InputError(f"--pairs={source}: must be {kinds}.")
    with refusing(f"--pairs={source}: can't be read", "name files that are there"):
        return [f"{kind}:{file.name}" for file in find_files(rest)]


def encode(pairs: Sequence[Pair], model: load.Pretrained) -> list[Sentence]:
    """Returns the sentences of the pairs in turn, the acceptable one first; InputError names one that is too long."""
    texts = [text for pair in pairs for text in pair.texts]
    encoded = tokenizer.load(model.tokenizer)(texts, split_special_tokens=True)
    sentences = []
    for index, (text, encoding) in enumerate(zip(texts, encoded.encodings, strict=True)):
        where = f"{pairs[index // 2].where}: its {FIELDS[index % 2]!r}"
        if len(encoding) > model.longest_row:
            raise InputError(
                f"{where} has {len(encoding)} tokens, the model reads at most {model.longest_row}; shorten it."
            )
        if not text.strip() or all(encoding.special_tokens_mask):
            raise InputError(f"{where} is empty; fill it in, or remove the row.")
        end_of_word = {word: place + 1 for place, word in enumerate(encoding.word_ids)}
        ends = [
            0 if is_added else place + 1 if word is None else end_of_word[word]
            for place, (word, is_added) in enumerate(
                zip(encoding.word_ids, encoding.special_tokens_mask, strict=True)
            )
        ]
        sentences.append(Sentence(tuple(encoding.ids), tuple(ends)))
    return sentences


def pseudo_log_likelihoods(
    config: ConfigDict, model: load.Pretrained, sentences: Sequence[Sentence]
) -> dict[str, np.ndarray]:
    """Returns {method: sum of the tokens' log-probabilities, in nats, for each sentence, float64 [N]}.

    Equal sentences are scored once, so that they tie whatever the rounding.
    """
    index = {sentence: row for row, sentence in enumerate(sorted(set(sentences)))}
    spans_P = []  # (row, first and stop of the masked tokens, end of the word)
    for sentence, row in index.items():
        for place, end in enumerate(sentence.ends):
            # a token alone, and with the rest of its word
            spans_P += [(row, place, stop, end) for stop in {place + 1, end} if end]
    row_P, first_P, stop_P, end_P = np.array(spans_P).T
    mesh, padded = put_on_devices(config, model)
    nats_P, _ = spans.score(
        padded.module,
        padded.params,
        mesh,
        model,
        [list(sentence.ids) for sentence in index],
        (row_P, first_P, stop_P),
        mask_id=tokenizer.load(model.tokenizer).mask_token_id,
        batch=config.evaluate.batch,
        multiple=LENGTHS,
        first_alone=True,
    )
    row_N = [index[sentence] for sentence in sentences]
    counted = {"original": stop_P == first_P + 1, "within_word": stop_P == end_P}
    return {
        method: np.bincount(row_P, -nats_P * is_counted)[row_N]
        for method, is_counted in counted.items()
    }


def accuracies(pairs: Sequence[Pair], differences: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns {method: scores of all pairs, "phenomena": {name: {method: scores}}}, given good minus bad of each pair.

    Scores are accuracy, low and high (the 95% interval of Wilson, 1927), pairs and ties; a tie is
    half right.
    """
    names = np.array([pair.phenomenon for pair in pairs])

    def scores(chosen: Any) -> dict[str, Any]:
        return {
            method: _accuracy(difference_N[chosen]) for method, difference_N in differences.items()
        }

    return scores(...) | {
        "phenomena": {str(name): scores(names == name) for name in np.unique(names)}
    }


def _accuracy(difference_N: np.ndarray) -> dict[str, float]:
    count = len(difference_N)
    ties = int(np.sum(difference_N == 0))
    accuracy = (int(np.sum(difference_N > 0)) + ties / 2) / count
    scale = 1 + Z**2 / count
    center = (accuracy + Z**2 / (2 * count)) / scale
    half = Z * math.sqrt(accuracy * (1 - accuracy) / count + Z**2 / (4 * count**2)) / scale
    interval = {"low": center - half, "high": center + half}
    return {"accuracy": accuracy, **interval, "pairs": count, "ties": ties}


def _table(result: dict[str, Any]) -> Any:
    heads = ("phenomenon", ">pairs", ">original", "95%", ">ties", ">within words", "95%", ">ties")
    rows = []
    for name, by_method in (*result["phenomena"].items(), ("all", result)):
        row = [name, f"{by_method['original']['pairs']:,}"]
        for scores in (by_method[method] for method in METHODS):
            row += [
                f"{scores['accuracy']:.1%}",
                f"{scores['low']:.1%} to {scores['high']:.1%}",
                f"{scores['ties']:,}",
            ]
        rows.append(row)
    return table(*heads, rows=rows, indent=2)
