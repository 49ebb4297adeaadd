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
from transformers import PreTrainedTokenizerFast

from mlm.data import tokenizer
from mlm.entry import Entry
from mlm.errors import InputError
from mlm.inference import pseudo_perplexity, words
from mlm.inference.forward import check_vocabulary, pad
from mlm.inference.minimal_pairs import Z
from mlm.paths import canonical
from mlm.pretrained import load
from mlm.tasks.changed_model import with_class
from mlm.text import say

# tokens: rows are padded to a multiple of it, and predictions to a power of 4: few programs are compiled
LENGTHS = 64
# where bands begin: times in the text
FREQUENCIES = {
    "1": 1,
    "2-9": 2,
    "10-99": 10,
    "100-999": 100,
    "1,000+": 1000,
}
CHARACTERS = {"1-3": 1, "4-6": 4, "7-9": 7, "10+": 10}


class Opened(NamedTuple):
    """A model whose parameters are not yet read."""

    model: load.Pretrained
    tok: PreTrainedTokenizerFast
    reader: Tokenizer  # the same, as it reads a corpus


def open_models(names: Sequence[str], entry: Entry) -> dict[str, Opened]:
    """Returns the models by name; raises InputError for one that can't be compared."""
    models: dict[str, Opened] = {}
    for name in names:
        if canonical(name) in map(canonical, models):
            raise InputError(f"--models: {name} is named twice; name each model once.")
        model = load.load(name, head=load.LM_HEAD, flag="--models=", headers=True)
        model = with_class(model, entry, command="compare")
        tok = tokenizer.load(model.tokenizer)
        check_vocabulary(model, tok)
        models[name] = Opened(model, tok, tokenizer.reader_of(tok))
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
    if not asked:
        raise InputError(
            f"--window={size}: no word fits into it and all models; raise it, or take another text."
        )
    strings = [texts[word.document][word.start : word.stop] for word in asked]
    readings = {}
    for name, opened in models.items():
        readings[name] = words.encode_windows(
            opened.reader, opened.tok.unk_token_id, texts, windows
        )
    spellings_MxW = np.array([spellings_W for _, spellings_W in readings.values()])
    changed_W = spellings_MxW["changed"].any(axis=0)
    spelled_W = ~(spellings_MxW["unknown"] | spellings_MxW["joined"]).any(axis=0)
    if not spelled_W.any():
        raise InputError(
            f"--models: there is none of {len(drawn):,} words that all can spell; leave out one of them."
        )
    groups = {
        "words": {"that all can spell": spelled_W, "as they are": spellings_MxW["stop"].all(axis=0)}
    }
    for group, starts, values in (
        ("frequency", FREQUENCIES, [counts[string] for string in strings]),
        ("length", CHARACTERS, [len(string) for string in strings]),
        ("form", {"as written": 0, "changed": 1}, changed_W),
    ):
        band_W = np.digitize(values, [*starts.values()])
        groups[group] = {
            band: spelled_W & (band_W == number) for number, band in enumerate(starts, 1)
        }
    scores = {
        name: _score(config, name, models[name], *reading) for name, reading in readings.items()
    }
    pairs = itertools.combinations(models, 2)
    scores |= {f"{first} - {second}": scores[first] - scores[second] for first, second in pairs}
    columns = (
        np.array([len(string.encode()) for string in strings]),
        np.array([word.document for word in asked]),
    )
    return {
        "seed": seed,
        "window": size,
        "documents": len(texts),
        "words": counts.total(),
        "asked": len(drawn),
        "documents_cut": len(
            {w.document for w in windows if w.stop - w.start < len(texts[w.document])}
        ),
        "windows_cut_for_positions": refused,
        "in_no_window": len(drawn) - len(asked),
        "models": {
            name: {"tokens_per_word": float((s["stop"] - s["first"])[spelled_W].mean())}
            | {fault: int(s[fault].sum()) for fault in ("unknown", "joined", "changed")}
            for name, s in zip(models, spellings_MxW, strict=True)
        },
        "groups": {
            group: {
                band: _estimates(scores, *columns, chosen_W)
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
    score_copies = pseudo_perplexity.make_scorer(config, model, opened.tok.mask_token_id)
    batch = config.evaluate.batch
    first_W = spellings_W["first"]
    stop_W = spellings_W["stop"]
    room_W = 4 ** np.ceil(np.log2(np.maximum(stop_W - first_W, 1)) / 2).astype(int)
    order_W = np.lexsort(([len(ids) for ids in rows], room_W))
    scores_2xW = np.empty((2, len(rows)))
    for word_N in np.split(order_W, range(batch, len(rows), batch)):
        copies = np.arange(len(word_N)), first_W[word_N], stop_W[word_N]
        rows_NxL = pad([rows[word] for word in word_N], model, LENGTHS)
        scores_2xW[:, word_N] = score_copies(
            rows_NxL, *copies, predictions=int(room_W[word_N].max())
        )
    return scores_2xW


def _estimates(
    scores: dict[str, np.ndarray],
    bytes_W: np.ndarray,
    documents_W: np.ndarray,
    chosen_W: np.ndarray,
) -> dict[str, Any]:
    """Returns {"words", "scores": {model or difference: {metric: mean, low, high}}}, no interval of one document."""
    documents, clusters_W = np.unique(documents_W[chosen_W], return_inverse=True)
    count = len(documents)
    ones_W = np.ones(len(chosen_W))
    estimates = {}
    for name, (nats_W, exact_W) in scores.items():
        bits = "bits_per_byte", nats_W / math.log(2), bytes_W
        for metric, *ratio in (
            ("nats_per_word", nats_W, ones_W),
            bits,
            ("exact_match", exact_W, ones_W),
        ):
            sum_D, weight_D = (np.bincount(clusters_W, column_W[chosen_W]) for column_W in ratio)
            mean = float(sum_D.sum() / weight_D.sum())
            # of each document on the mean; their sum is 0
            influence_D = (sum_D - mean * weight_D) / weight_D.sum()
            half = Z * math.sqrt(count / max(count - 1, 1) * float(np.sum(influence_D**2)))
            interval = {"low": mean - half, "high": mean + half} if count > 1 else {}
            estimates.setdefault(name, {})[metric] = {"mean": mean, **interval}
    return {"words": int(chosen_W.sum()), "scores": estimates}
