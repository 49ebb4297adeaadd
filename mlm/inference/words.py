"""Words of a text, the same for all tokenizers: where they are, which are asked, in which windows, by which tokens."""

import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Regex, Tokenizer, pre_tokenizers

from mlm.data.corpus import text_hash

# whose characters are words
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
LETTERS = rf"[\p{{L}}\p{{M}}\p{{N}}&&[^{UNSPACED}]]+"
PATTERN = Regex(rf"[{UNSPACED}]\p{{M}}*|{LETTERS}(?:['\u2019]{LETTERS})*")
SPLIT = pre_tokenizers.Split(PATTERN, "removed", invert=True)
SPELLING = np.dtype(
    [("first", int), ("stop", int), ("unknown", bool), ("joined", bool), ("changed", bool)]
)


class Span(NamedTuple):
    """A word or a window: document[start:stop]."""

    document: int
    start: int
    stop: int


def find(text: str) -> list[tuple[int, int]]:
    """Returns [start, stop) of the words of a text."""
    return [place for _, place in SPLIT.pre_tokenize_str(text)]


def draw(texts: Sequence[str], count: int, seed: int) -> tuple[list[Span], Counter[str]]:
    """Returns the `count` words with the smallest hashes of seed, text and number, in order; and how often each is."""
    counts: Counter[str] = Counter()

    def hashed() -> Iterator[tuple[int, Span]]:
        for document, text in enumerate(texts):
            prefix = f"{seed} {text_hash(text)} "
            for number, (start, stop) in enumerate(find(text)):
                counts[text[start:stop]] += 1
                yield text_hash(f"{prefix}{number}"), Span(document, start, stop)

    return sorted(word for _, word in heapq.nsmallest(count, hashed())), counts


def cut(
    texts: Sequence[str], asked: Sequence[Span], size: int, readers: Sequence[tuple[Callable, int]]
) -> tuple[dict[Span, list[Span]], int]:
    """Returns the windows, with the words asked in each, and how many had to be cut for a model's positions.

    A document of more than `size` characters, or more tokens than one of the `readers` (encoder of
    texts, positions) can take, is cut before the white space (without any, before the word) nearest
    its middle, and so are its halves. Words in what can't be cut are in no window.
    """
    pending = defaultdict(list)
    windows = {}
    refused = 0
    for word in asked:
        pending[Span(word.document, 0, len(texts[word.document]))].append(word)
    while pending:
        short = [window for window in pending if window.stop - window.start <= size]
        spans = [texts[window.document][window.start : window.stop] for window in short]
        fit = np.all(
            [[len(row) <= longest for row in encode(spans)] for encode, longest in readers], axis=0
        )
        whole = {
            window: pending.pop(window) for window, fits in zip(short, fit, strict=True) if fits
        }
        windows = windows | whole
        refused = refused + len(short) - len(whole)
        halves = defaultdict(list)
        for (document, start, stop), inside in pending.items():
            middle = start + _middle(texts[document][start:stop])
            for word in inside if middle > start else ():
                half = (start, middle) if word.start < middle else (middle, stop)
                halves[Span(document, *half)].append(word)
        pending = halves
    return windows, refused


def _middle(text: str) -> int:
    """Returns where to cut a text, 0 for nowhere."""
    spaces = [match.start() for match in re.finditer(r"\s(?=\S)", text) if match.start()]
    places = spaces or [start for start, _ in find(text) if start]
    return min(places, key=lambda place: abs(2 * place - len(text)), default=0)


def encode_windows(
    fast: Tokenizer, unk_id: int | None, texts: Sequence[str], windows: dict[Span, list[Span]]
) -> tuple[list[list[int]], np.ndarray]:
    """Returns the ids of each word's window, and its SPELLING."""
    rows = []
    spellings = []
    spans = [texts[document][start:stop] for document, start, stop in windows]
    for window, text, encoding in zip(windows, spans, fast.encode_batch(spans), strict=True):
        for word in windows[window]:
            place = word.start - window.start, word.stop - window.start
            rows.append(encoding.ids)
            spellings.append(spell(fast, encoding, text, place, unk_id))
    return rows, np.array(spellings, SPELLING)


def spell(
    fast: Tokenizer, encoding: Encoding, text: str, place: tuple[int, int], unk_id: int | None
) -> tuple:
    """Returns the SPELLING of a word of an encoded text: its tokens, [first, stop), and what is wrong with them.

    They are those that touch it, and one of just the space before it. "unknown": the unknown token
    is among them, or a character has no token; "joined": they hold characters beyond it; "changed":
    they read as another text.
    """
    start, stop = place
    tokens = [
        token for token, (begin, end) in enumerate(encoding.offsets) if begin < stop and end > start
    ]
    if not tokens:
        return 0, 0, True, False, False
    first = tokens[0]
    last = tokens[-1] + 1
    offsets = encoding.offsets[first:last]
    begin = offsets[0][0]
    end = offsets[-1][1]
    covered = {at for span in offsets for at in range(*span)}
    before, behind = encoding.offsets[first - 1]
    if (
        begin >= start
        and behind == start
        and before >= start - 1
        and not encoding.special_tokens_mask[first - 1]
    ):
        first -= not text[before:behind].strip()  # "▁", where pieces of the word follow
    ids = encoding.ids[first:last]
    left_out = [at for at in range(start, stop) if at not in covered]
    # no accents
    unknown = unk_id in ids or any(unicodedata.category(text[at])[0] != "M" for at in left_out)
    joined = bool(text[begin:start].strip() or text[stop:end].strip())
    read = unicodedata.normalize(
        "NFC", "".join(fast.decode(ids, skip_special_tokens=False).split())
    )
    return first, last, unknown, joined, read != unicodedata.normalize("NFC", text[start:stop])
