"""Training of tokenizers: a folder that `AutoTokenizer` reads, in transformers 4 and 5.

The special tokens are RoBERTa's, in RoBERTa's order: <s> 0, <pad> 1, </s> 2, <unk> 3, <mask> 4.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from mlm.data import tokenizer_checks
from mlm.data.tokenizer_checks import ROLES
from mlm.errors import InputError
from mlm.text import can_draw

# it takes the space before it
MASK = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
LONGEST_PIECE = 16  # characters of an entry of Unigram
# Where more than UNSPACED of the text is in longer pieces (Chinese, Thai, DNA), hardly a piece occurs twice. Training
# then takes the longer for each megabyte the more there are, unless pieces are cut and candidate entries are few.
UNSPACED = 0.1
CUT_PIECE = 64  # characters
SEED_ENTRIES = 6  # candidates for each entry of the vocabulary
SHRINKING = 0.5  # of the candidates stay in a round
TRIES = 3  # to find a size that works in place of one that doesn't


def train(
    texts: Iterable[str], *, kind: str, vocab_size: int, lowercase: bool, length: int, folder: str
) -> None:
    """Trains a tokenizer and writes it to a new local folder; its model reads `length` tokens.

    Unigram (Kudo, 2018) round-trips NFC text of the sample's characters except for a space at its start, byte-level BPE
    every text. Only BPE training is deterministic: the other trainers break ties by the order of a hash table.
    """
    texts = list(texts)
    tokenizer, size = _fit(texts, kind, vocab_size, lowercase)
    if size != vocab_size:
        raise InputError(_reason(texts, kind, vocab_size, lowercase, size))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": "<s>",
        "eos_token": "</s>",
        **{f"{role}_token": token for role, token in ROLES.items()},
        "mask_token": {"__type": "AddedToken", "content": "<mask>", **MASK, "special": True},
    }
    root = Path(folder)
    root.mkdir(parents=True)
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _fit(texts: list[str], kind: str, vocab_size: int, lowercase: bool) -> tuple[Tokenizer, int]:
    """Returns a tokenizer and its number of entries, which is not `vocab_size` if the texts can't make that."""
    tokenizer = _untrained(kind, lowercase)
    pre_tokenizer = tokenizer.pre_tokenizer
    trainer = stock = _trainer(kind, vocab_size)
    if tokenizer_checks.long_piece_share(tokenizer, texts, LONGEST_PIECE) > UNSPACED:
        cut = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{CUT_PIECE}}}"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, cut])
        if kind == "unigram":
            candidates = SEED_ENTRIES * vocab_size
            trainer = _trainer(kind, vocab_size, seed_size=candidates, shrinking_factor=SHRINKING)
    size = _train(tokenizer, texts, trainer)
    if trainer is not stock and size < vocab_size:
        size = _train(tokenizer, texts, stock)
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer, size


def _train(tokenizer: Tokenizer, texts: list[str], trainer: trainers.Trainer) -> int:
    """Trains on the texts; returns the number of entries or, of Unigram with too few, how many its characters take."""
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:  # tokenizers raises plain Exception
        if "not large enough" not in str(error):
            raise
        pieces = (
            piece for text in texts for piece, _ in tokenizer_checks.split_pieces(tokenizer, text)
        )
        return len(set().union(*pieces)) + len(ROLES)
    return tokenizer.get_vocab_size()


def _reason(texts: list[str], kind: str, vocab_size: int, lowercase: bool, size: int) -> str:
    """Returns the sentence for a vocabulary that the texts don't make, with a size that they do make."""
    key = f"config.tokenizer.vocab_size = {vocab_size}"
    if size < vocab_size:
        # a little less than they made, which may be another number each time
        number = size - size // 100
        return f"{key}: the text yields fewer entries; set it to {number}, or raise tokenizer.sample_megabytes."
    number = size
    for _ in range(TRIES):
        size = _fit(texts, kind, number, lowercase)[1]
        if size == number:
            break
        number = size
    return f"{key}: the distinct characters of the text take more than that; set it to {number}, or more."


def _trainer(kind: str, vocab_size: int, **settings: Any) -> trainers.Trainer:
    """Returns a trainer; a bar shows on a terminal how far it is."""
    tokens = [
        AddedToken(token, lstrip=token == "<mask>", normalized=False, special=True)
        for token in ROLES.values()
    ]
    settings |= {
        "vocab_size": vocab_size,
        "special_tokens": tokens,
        "show_progress": can_draw(sys.stderr),
    }
    if kind == "unigram":
        return trainers.UnigramTrainer(
            unk_token="<unk>", max_piece_length=LONGEST_PIECE, **settings
        )
    if kind == "bpe":
        return trainers.BpeTrainer(
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=2, **settings
        )
    return trainers.WordPieceTrainer(**settings)


def _untrained(kind: str, lowercase: bool) -> Tokenizer:
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\n+"), "isolated"),
                pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
                pre_tokenizers.Split(
                    Regex(r"▁+(?=▁)|▁?[^\W\d_]+|▁?\d+|▁?[^\w▁]+|▁+|_+"), "isolated"
                ),
            ]
        )
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    elif kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    if lowercase:
        steps = [normalizers.NFKC(), normalizers.Lowercase(), tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([step for step in steps if step is not None])
    return tokenizer
