"""Words of a text: they depend on no tokenizer; which tokens are a word's, in odd texts."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mlm.inference import words

SPECIAL = ["[CLS]", "[SEP]", "[UNK]"]
AROUND = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
)


def uncased(*pieces: str) -> Tokenizer:
    vocab = {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}
    tok = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer()
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece()
    tok.post_processor = AROUND
    return tok


def byte_level(*merges: tuple[str, str], trims: bool) -> Tokenizer:
    pieces = [
        *SPECIAL,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(pair) for pair in merges),
    ]
    tok = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, list(merges))
    )
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trim = processors.ByteLevel(trim_offsets=trims)
    tok.post_processor = processors.Sequence([trim, AROUND])
    return tok


def unigram(*pieces: str) -> Tokenizer:
    scores = [(piece, -1.0 - number / 100) for number, piece in enumerate([*SPECIAL, *pieces])]
    tok = Tokenizer(models.Unigram(scores, unk_id=2))
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    tok.post_processor = AROUND
    return tok


def spelled(tok: Tokenizer, text: str) -> dict[str, tuple[list[str], set[str]]]:
    """The tokens of each word, and what is wrong with them."""
    encoding = tok.encode(text)
    results = {}
    for start, stop in words.find(text):
        first, last, *faults = words.spell(tok, encoding, text, (start, stop), 2)
        names = {
            name
            for name, fault in zip(("unknown", "joined", "changed"), faults, strict=True)
            if fault
        }
        results[text[start:stop]] = (encoding.tokens[first:last], names)
    return results


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop\u2014\u201cnow\u201d, O\u2019Neil's", "Don't stop now O\u2019Neil's"),
        ("'tis 3.14 a1b2 _foo_ half-time don''t", "tis 3 14 a1b2 foo half time don t"),
        ("cafe\u0301\u00a0na\u00efve\r\nx\ty", "cafe\u0301 na\u00efve x y"),
        (
            "\u6f22\u5b57\u3092abc\u5b57 \u0939\u093f\u0928\u094d\u0926\u0940",
            "\u6f22 \u5b57 \u3092 abc \u5b57 \u0939\u093f\u0928\u094d\u0926\u0940",
        ),
        ("\U0001f600\U0001f600 <unk> ... ", "unk"),
        ("", ""),
        ("\u2014 \U0001f600", ""),
    ],
)
def test_words_are_runs_of_letters_marks_and_digits(text, expected):
    assert [text[start:stop] for start, stop in words.find(text)] == expected.split()


def test_a_word_is_drawn_by_its_text_and_the_seed_alone():
    texts = [f"The function number {n} returns a list, or {n + 1} of them." for n in range(40)]
    few, counts = words.draw(texts, 20, 0)
    more, _ = words.draw(texts, 60, 0)
    assert len(few) == 20 and set(few) < set(more) and few == sorted(few)
    assert counts["The"] == 40 and counts["7"] == 2
    assert len(words.draw(texts, 999, 0)[0]) == counts.total()
    moved, _ = words.draw(texts[::-1], 20, 0)
    assert set(few) == {word._replace(document=39 - word.document) for word in moved}
    assert set(words.draw(texts, 20, 1)[0]) != set(few)


def test_documents_are_cut_before_white_space_at_the_same_characters():
    texts = [
        "one two three four five six seven eight",
        "",
        "short one",
        "\u6f22\u5b57\u6f22\u5b57\u6f22\u5b57",
    ]
    asked, _ = words.draw(texts, 99, 0)
    windows, refused = words.cut(
        texts, asked, 10, [(lambda spans: [span * ("five" in span) for span in spans], 8)]
    )
    cut = [texts[d][start:stop] for d, start, stop in sorted(windows)]
    assert cut == [
        "one two",
        " three",
        " four",
        " five",
        " six",
        " seven",
        " eight",
        "short one",
        texts[3],
    ], cut
    assert refused == 1
    for window, inside in windows.items():
        assert all(window.start <= word.start and word.stop <= window.stop for word in inside)
    assert sorted(word for inside in windows.values() for word in inside) == asked


def test_uncased_wordpiece():
    """Accents and case go, a marked character that it lacks makes the whole piece unknown, and [MASK] in it is text."""
    tok = uncased("cafe", "##s", "don", "'", "t", "the", "(", ")", "x", ",", "mask", "[", "]")
    assert spelled(
        tok, "Caf\u00e9s, don't (cafe\u0301) the\u00a0zq \u5b57x x\U0001f600 [MASK]\r\nThe"
    ) == {
        "Caf\u00e9s": (["cafe", "##s"], {"changed"}),
        "don't": (["don", "'", "t"], set()),
        "cafe\u0301": (["cafe"], {"changed"}),
        "the": (["the"], set()),
        "zq": (["[UNK]"], {"unknown", "changed"}),
        "\u5b57": (["[UNK]"], {"unknown", "changed"}),
        "x": (["[UNK]"], {"unknown", "joined", "changed"}),
        "MASK": (["mask"], {"changed"}),
        "The": (["the"], {"changed"}),
    }


@pytest.mark.parametrize("trims", [True, False])
def test_byte_level_pieces_with_their_space(trims):
    merges = (("\u0120", "a"), ("'", "s"), ("b", "c"))
    tok = byte_level(*merges, trims=trims)
    assert spelled(tok, "bc a  b\u00e9 (a) x") == {
        "bc": (["bc"], set()),
        "a": (["a"], set()),
        # behind two spaces: the second one is its own
        "b\u00e9": (["\u0120", "b", "\u00c3", "\u00a9"], set()),
        "x": (["\u0120", "x"], set()),
    }
    assert spelled(tok, "'she")["she"] == (["'s", "h", "e"], {"joined", "changed"})
    assert spelled(tok, "x a")["a"] == (["\u0120a"], set())
    assert spelled(tok, "a\u00a0b\r\nc\U0001f600d")["d"] == (["d"], set())


def test_unigram_pieces_with_their_space():
    tok = unigram("\u2581ab", "\u2581", "c", "d", "d-", "\u00e9", "(")
    assert spelled(tok, "cd (d-x) ce\u0301 z ab") == {
        "cd": (["\u2581", "c", "d"], set()),
        "d": (["d-"], {"joined", "changed"}),
        "x": (["x)"], {"unknown", "joined", "changed"}),
        "ce\u0301": (["\u2581", "c", "\u00e9"], set()),
        "z": (["\u2581", "z"], {"unknown", "changed"}),
        "ab": (["\u2581ab"], set()),
    }
