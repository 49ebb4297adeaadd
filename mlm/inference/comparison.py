"""Masked language models judged by the same words of a text, whatever their tokenizers: the command `compare`.

Which words are asked, and where documents are cut into windows, is the same for all models: see
words.py. Special tokens in a text are text.

A word is asked alone: its tokens, with that of the space before it, are masked, all else in its
window is seen. Its score is the sum of their log probabilities in this one forward pass, in
float32: the pseudo-log-likelihood (Salazar et al., 2020) under whole-word masking (Kauf and
Ivanova, 2023, mask the rest of the word). It is no probability of the word, since the masks tell a
model how many tokens its word has. A match is exact if all have the largest logits.

Scored are the words that all models can spell. To one that can't, a word is "unknown", if the
unknown token is among its tokens or a character has none, or "joined", if they hold characters
beyond it. "As they are" are all words with tokens in each model, such tokens predicted like any
other. "Changed" words, which a tokenizer reads in lower case or without accents, are easier; they
are scored, and shown apart. Nats are per word, bits per byte of its UTF-8. Intervals are of 95%:
normal, of a ratio of sums, clustered by document, and for differences paired; they are rough for
few words.

Dimensions: M models, W words, N rows, L tokens in a row, D documents.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from mlm.data import tokenizer
from mlm.entry import Entry
from mlm.errors import InputError
from mlm.inference import spans, words
from mlm.inference.forward import put_on_devices
from mlm.inference.results import Z
from mlm.pretrained import load
from mlm.tasks.changed_model import with_class
from mlm.text import say

LENGTHS = 64  # tokens: windows are padded to a multiple of it
# where bands begin: times in the text
FREQUENCIES = {
    "1": 1,
    "2-9": 2,
    "10-99": 10,
    "100-999": 100,
    "1,000+": 1000,
}
CHARACTERS = {"1-3": 1, "4-6": 4, "7-9": 7, "10+": 10}
FORMS = {"as written": 0, "changed": 1}


class Opened(NamedTuple):
    """A model whose parameters are not yet read."""

    model: load.Pretrained
    unk_id: int | None
    mask_id: int
    reader: Tokenizer  # as it reads a corpus


def open_models(names: Sequence[str], entry: Entry) -> dict[str, Opened]:
    """Returns the models by name; raises InputError for one that can't be compared."""
    models: dict[str, Opened] = {}
    for name in names:
        model = load.load(name, head=load.LM_HEAD, flag="--models=", headers=True)
        model = with_class(model, entry, command="compare")
        tok = tokenizer.load(model.tokenizer)
        reader = tokenizer.reader_of(tok)
        models[name] = Opened(model, tok.unk_token_id, tok.mask_token_id, reader)
    return models


def compare(
    config: ConfigDict,
    models: dict[str, Opened],
    texts: Sequence[str],
    *,
    count: int,
    size: int,
    seed: int,
) -> dict[str, Any]:
    """Returns the scores of models on `count` words of the texts, in windows of at most `size` characters."""
    drawn, counts = words.draw(texts, count, seed)
    if not drawn:
        raise InputError(
            f"--source: its {len(texts):,} documents hold no word; name a text with letters in it."
        )
    readers = [(opened.reader.encode_batch, opened.model.longest_row) for opened in models.values()]
    windows, refused = words.cut(texts, drawn, size, readers)
    asked = [word for inside in windows.values() for word in inside]
    strings = [texts[word.document][word.start : word.stop] for word in asked]
    readings = {
        name: words.encode_windows(opened.reader, opened.unk_id, texts, windows)
        for name, opened in models.items()
    }
    spellings_MxW = np.array([spellings_W for _, spellings_W in readings.values()])
    spelled_W = ~(spellings_MxW["unknown"] | spellings_MxW["joined"]).any(axis=0)
    if not spelled_W.any():
        raise InputError(
            f"--models: of {len(drawn):,} words, {len(asked):,} fit into --window={size}, and there is none that all "
            "can spell; raise it, or leave out one of them."
        )
    scores = {
        name: _score(config, name, models[name], *reading) for name, reading in readings.items()
    }
    pairs = itertools.combinations(models, 2)
    scores |= {f"{first} - {second}": scores[first] - scores[second] for first, second in pairs}
    groups = {
        "words": {"that all can spell": spelled_W, "as they are": spellings_MxW["stop"].all(axis=0)}
    }
    for group, starts, values in (
        ("frequency", FREQUENCIES, [counts[string] for string in strings]),
        ("length", CHARACTERS, [len(string) for string in strings]),
        ("form", FORMS, spellings_MxW["changed"].any(axis=0)),
    ):
        band_W = np.digitize(values, [*starts.values()])
        groups[group] = {
            band: spelled_W & (band_W == number) for number, band in enumerate(starts, 1)
        }
    bytes_W = np.array([len(string.encode()) for string in strings])
    documents_W = np.array([word.document for word in asked])
    shorter = {w.document for w in windows if w.stop - w.start < len(texts[w.document])}
    of_models = {}
    for name, s in zip(models, spellings_MxW, strict=True):
        of_models[name] = {"tokens_per_word": float((s["stop"] - s["first"])[spelled_W].mean())}
        of_models[name] |= {
            fault: int(s[fault].sum()) for fault in ("unknown", "joined", "changed")
        }
    return {
        "seed": seed,
        "window": size,
        "documents": len(texts),
        "words": counts.total(),
        "asked": len(drawn),
        "documents_cut": len(shorter),
        "windows_cut_for_positions": refused,
        "in_no_window": len(drawn) - len(asked),
        "models": of_models,
        "groups": {
            group: {
                band: _estimates(scores, bytes_W, documents_W, chosen_W)
                for band, chosen_W in bands.items()
                if chosen_W.any()
            }
            for group, bands in groups.items()
        },
    }


def _score(
    config: ConfigDict,
    name: str,
    opened: Opened,
    rows: Sequence[list[int]],
    spellings_W: np.ndarray,
) -> np.ndarray:
    """Returns minus the log probability of each word, in nats, and 1 where the match is exact, [2, W]."""
    say(f"compare: {name} predicts {len(rows):,} words")
    model = load.load(name, head=load.LM_HEAD, flag="--models=")
    model = dataclasses.replace(model, changed_module=opened.model.changed_module)
    mesh, padded = put_on_devices(config, model)
    scores = spans.score(
        padded.module,
        padded.params,
        mesh,
        model,
        rows,
        (np.arange(len(rows)), spellings_W["first"], spellings_W["stop"]),
        mask_id=opened.mask_id,
        batch=config.evaluate.batch,
        multiple=LENGTHS,
    )
    return np.array(scores)


def _estimates(
    scores: dict[str, np.ndarray],
    bytes_W: np.ndarray,
    documents_W: np.ndarray,
    chosen_W: np.ndarray,
) -> dict[str, Any]:
    """Returns {"words", "scores": {model or difference: {metric: mean, low, high}}}, no interval of one document."""
    documents, cluster_W = np.unique(documents_W[chosen_W], return_inverse=True)
    count = len(documents)
    ones_W = np.ones(len(chosen_W))

    def mean_of_ratio(sum_W: np.ndarray, weight_W: np.ndarray) -> dict[str, float]:
        sum_D, weight_D = (np.bincount(cluster_W, x_W[chosen_W]) for x_W in (sum_W, weight_W))
        mean = float(sum_D.sum() / weight_D.sum())
        if count == 1:
            return {"mean": mean}
        # of each document on the mean; their sum is 0
        influence_D = (sum_D - mean * weight_D) / weight_D.sum()
        half = Z * math.sqrt(count / (count - 1) * float(np.sum(influence_D**2)))
        return {"mean": mean, "low": mean - half, "high": mean + half}

    estimates = {
        name: {
            "nats_per_word": mean_of_ratio(nats_W, ones_W),
            "bits_per_byte": mean_of_ratio(nats_W / math.log(2), bytes_W),
            "exact_match": mean_of_ratio(exact_W, ones_W),
        }
        for name, (nats_W, exact_W) in scores.items()
    }
    return {"words": int(chosen_W.sum()), "scores": estimates}
