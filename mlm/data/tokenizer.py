"""Training and loading of tokenizers: a folder that `AutoTokenizer` reads, in transformers 4 and 5.

The special tokens are RoBERTa's, in RoBERTa's order: <s> 0, <pad> 1, </s> 2, <unk> 3, <mask> 4.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mlm import logs
from mlm.data import tokenizer_checks
from mlm.data.tokenizer_checks import ROLES
from mlm.errors import DamageError, InputError
from mlm.paths import HUB_NAME, UPath, local_folder
from mlm.text import printable, say

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

MASK = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False}  # it takes the space before it
LONGEST_PIECE = 16  # characters of an entry of Unigram
# Where more than UNSPACED of the text is in longer pieces (Chinese, Thai, DNA), hardly a piece occurs twice. Training
# then takes the longer for each megabyte the more there are, unless pieces are cut and candidate entries are few.
UNSPACED = 0.1
CUT_PIECE = 64  # characters
SEED_ENTRIES = 6  # candidates for each entry of the vocabulary
SHRINKING = 0.5  # of the candidates stay in a round
SECONDS = 0.6  # of training for a million characters on a core, about
UNSPACED_SECONDS = {"unigram": 40.0, "bpe": 3.0, "wordpiece": 4.0}  # the same in longer pieces


def train(texts: Iterable[str], *, kind: str, vocab_size: int, lowercase: bool, length: int, folder: str) -> None:
    """Trains a tokenizer and writes it to a new local folder; its model reads `length` tokens.

    Unigram (Kudo, 2018) round-trips NFC text of the sample's characters except for a space at its start, byte-level BPE
    every text. Only BPE training is deterministic: the other trainers break ties by the order of a hash table.
    """
    texts = list(texts)
    tokenizer, trainer = _untrained(kind, lowercase), _trainer(kind, vocab_size)
    pre_tokenizer, first_trainer = tokenizer.pre_tokenizer, trainer
    unspaced = tokenizer_checks.long_piece_share(tokenizer, texts, LONGEST_PIECE)
    _say_duration(kind, sum(map(len, texts)) / 1e6, unspaced)
    if unspaced > UNSPACED:
        cut = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{CUT_PIECE}}}"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, cut])
        if kind == "unigram":
            seeds = SEED_ENTRIES * vocab_size
            first_trainer = _trainer(kind, vocab_size, seed_size=seeds, shrinking_factor=SHRINKING)
    size = _fit(tokenizer, texts, first_trainer, vocab_size)
    if size < vocab_size and first_trainer is not trainer:
        size = _fit(tokenizer, texts, trainer, vocab_size)
    tokenizer.pre_tokenizer = pre_tokenizer
    key = f"config.tokenizer.vocab_size = {vocab_size}"
    if size < vocab_size:
        raise InputError(f"{key}: the text yields only {size} entries; lower it, or raise tokenizer.sample_megabytes.")
    if size > vocab_size:
        raise InputError(f"{key}: the text has more distinct characters than that; raise it.")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
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


def _fit(tokenizer: Tokenizer, texts: list[str], trainer: trainers.Trainer, vocab_size: int) -> int:
    """Trains on the texts; returns the number of entries, `vocab_size` + 1 where they don't suffice."""
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:  # tokenizers raises plain Exception
        if "not large enough" not in str(error):
            raise
        return vocab_size + 1
    return tokenizer.get_vocab_size()


def _say_duration(kind: str, millions: float, unspaced: float) -> None:
    """Says how long training takes on so many millions of characters if that is minutes, and what is faster."""
    minutes = millions * (unspaced * UNSPACED_SECONDS[kind] + (1 - unspaced) * SECONDS) / 60
    if minutes > 1:
        spaces = f", {unspaced:.0%} of them in text without spaces," if unspaced > UNSPACED else ""
        bpe = " or tokenizer.kind=bpe" if kind == "unigram" and unspaced > UNSPACED else ""
        text = f"{millions:,.1f} million characters{spaces}"
        fix = f"a smaller tokenizer.sample_megabytes{bpe} is faster"
        say(f"tokenizer: training on {text} takes about {minutes:,.0f} min on a core; {fix}")


def _trainer(kind: str, vocab_size: int, **settings: Any) -> trainers.Trainer:
    """Returns a trainer; a bar shows on a terminal how far it is."""
    special = [AddedToken(token, lstrip=token == "<mask>", normalized=False, special=True) for token in ROLES.values()]
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    trainer_of = {
        "unigram": functools.partial(trainers.UnigramTrainer, unk_token="<unk>", max_piece_length=LONGEST_PIECE),
        "bpe": functools.partial(trainers.BpeTrainer, initial_alphabet=bytes_, min_frequency=2),
        "wordpiece": trainers.WordPieceTrainer,
    }[kind]
    return trainer_of(vocab_size=vocab_size, special_tokens=special, show_progress=sys.stderr.isatty(), **settings)


def _untrained(kind: str, lowercase: bool) -> Tokenizer:
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\n+"), "isolated"),
                pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
                pre_tokenizers.Split(Regex(r"▁+(?=▁)|▁?[^\W\d_]+|▁?\d+|▁?[^\w▁]+|▁+|_+"), "isolated"),
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


def load(path: str) -> PreTrainedTokenizerFast:
    """Returns the fast tokenizer of a folder or of a name on the Hugging Face Hub, see `tokenizer_checks`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    if not re.fullmatch(HUB_NAME, path) and not UPath(path).is_dir():
        fix = "name a tokenizer's folder, or one on the Hub, or copy there the tokenizer that made the run's shards"
        raise InputError(f"{path}: there is no such folder; {fix}.")
    try:
        folder = local_folder(path)
        settings = get_tokenizer_config(folder)
        load_from = AutoTokenizer.from_pretrained
        if settings.get("tokenizer_class") == "TokenizersBackend":  # transformers 5's, whose default is without types
            names = settings.get("model_input_names", ["input_ids", "attention_mask"])
            load_from = functools.partial(PreTrainedTokenizerFast.from_pretrained, model_input_names=names)
        if isinstance(special_tokens := settings.get("extra_special_tokens"), list):  # as 5 saves them
            load_from = functools.partial(load_from, extra_special_tokens={}, additional_special_tokens=special_tokens)
        tokenizer = load_from(folder, trust_remote_code=False)
    except Exception as error:  # whatever transformers, tokenizers or the Hub's client raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        of_none = isinstance(error, TypeError | AttributeError)  # a path that is None
        if of_none and not (UPath(path) / "tokenizer.json").is_file():
            reason = "it holds neither tokenizer.json nor the files of a vocabulary"
        fix = "name a folder that save_pretrained of a fast tokenizer has written, or a tokenizer of the Hub"
        raise InputError(f"{path}: no tokenizer can be loaded from there ({printable(reason):.200}); {fix}.") from error
    if not tokenizer.is_fast:
        raise InputError(f"{path}: has no fast tokenizer (tokenizer.json); convert it with transformers first.")
    fast = tokenizer.backend_tokenizer
    _read_whole_texts(fast)
    tokenizer_checks.special_ids(fast, {role: getattr(tokenizer, f"{role}_token") for role in ROLES}, path)
    return tokenizer


def _read_whole_texts(fast: Tokenizer) -> None:
    """Turns off the truncation and padding that somebody's last call may have left in tokenizer.json."""
    fast.no_truncation()
    fast.no_padding()


def load_fast(folder: str) -> Tokenizer:
    """Returns the tokenizer of a folder, local or gs://, without transformers and in a fraction of its time."""
    file = UPath(folder) / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{file}: there is no such file; train a tokenizer first, or set tokenizer.path.")
    try:
        fast = Tokenizer.from_file(f"{local_folder(folder)}/tokenizer.json")
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"{file}: can't be read ({str(error).splitlines()[0]}).") from error
    _read_whole_texts(fast)
    return fast


def load_for_corpus(folder: str) -> Tokenizer:
    """Returns the tokenizer of a folder as it reads a corpus: special tokens in a text (WikiText's <unk>) are text."""
    fast = load_fast(folder)
    read_special_tokens_as_text(fast)
    return fast


def read_special_tokens_as_text(fast: Tokenizer) -> None:
    """Has special tokens in a text read as text, also by models that have an entry for them, such as XLM-R's Unigram.

    Before such a model, the first character of <s> or </s> in a text is cut off.
    """
    fast.encode_special_tokens = True
    special = {token.content: number for number, token in fast.get_added_tokens_decoder().items() if token.special}
    readable = [text for text in special if special[text] in fast.encode(text, add_special_tokens=False).ids]
    if readable:
        pattern = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in readable)
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        before = [] if fast.pre_tokenizer is None else [fast.pre_tokenizer]
        fast.pre_tokenizer = pre_tokenizers.Sequence([*before, cut])


def fingerprint(folder: str) -> str:
    """Returns the SHA-256 of what decides the ids: two copies of a tokenizer have the same."""
    return content_hash(load_fast(folder))


def content_hash(tokenizer: Tokenizer) -> str:
    """Returns the fingerprint of a loaded tokenizer."""
    content = json.loads(tokenizer.to_str())
    del content["truncation"], content["padding"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def manifest_fields(folder: str) -> dict[str, Any]:
    """Returns the fields of a manifest that describe the tokenizer; raises InputError if it is not fit for masks."""
    tokenizer = load_fast(folder)
    settings = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            settings |= logs.read_object(UPath(local_folder(folder)) / file)
        except DamageError:
            raise InputError(f"{folder}/{file}: is not a JSON object; put a good copy in its place.") from None
    tokens = {role: settings.get(f"{role}_token") for role in ROLES}
    tokens = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
    ids = tokenizer_checks.special_ids(tokenizer, tokens, folder)
    added = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    unused = tokenizer_checks.unused_ids(tokenizer)  # never predicted nor drawn, as special tokens
    return {
        "vocab_size": tokenizer_checks.vocabulary_size(tokenizer),
        "special_ids": ids,
        "all_special_ids": tuple(sorted(added | set(ids.values()) | unused)),
        "tokenizer_fingerprint": fingerprint(folder),
    }


def word_starts(folder: str, *, key: str, fix: str = "set masking.kind to token") -> np.ndarray:
    """Returns which entries of the vocabulary start a word, bool [V]; `key` is the setting that asks for it."""
    import numpy as np  # the commands import this module, to answer a mistake at once

    fast = load_fast(folder)
    text_of, vocabulary = surface(fast), fast.get_vocab()
    starts_V = np.zeros(tokenizer_checks.vocabulary_size(fast), bool)
    if text_of is not None:
        for piece, number in vocabulary.items():
            starts_V[number] = text_of(piece)[:1].isspace()
    if not starts_V.any():
        where = f"{key}: the vocabulary and decoder of {folder} ({type(fast.model).__name__})"
        raise InputError(f"{where} do not show which tokens start a word; {fix}, or use another tokenizer.")
    starts_V[list(fast.get_added_tokens_decoder())] = True
    return starts_V


def counted_words(folder: str, *, key: str) -> np.ndarray:
    """Returns how many more words of a text cut at white space each entry of the vocabulary makes, about, int64 [V].

    White space alone makes one, of the word after it: the indentation of a line counts as a word or two.
    """
    starts_V, fast = word_starts(folder, key=key, fix="name steps"), load_fast(folder)
    if isinstance(fast.decoder, decoders.WordPiece):  # its punctuation marks stand alone
        starts_V[[number for piece, number in fast.get_vocab().items() if not any(map(str.isalnum, piece))]] = False
    counts_V, text_of = starts_V.astype("int64"), surface(fast)
    for piece, number in fast.get_vocab().items():  # some tokenizers have entries of several words
        counts_V[number] += len(re.findall(r"\s+", text_of(piece).lstrip()))
    return counts_V


def surface(fast: Tokenizer) -> Callable[[str], str] | None:
    """Returns the function from a vocabulary entry to its text, after a space if it starts a word; None if unknown."""
    decoder = fast.decoder
    if decoder is None or json.loads(fast.to_str())["model"].get("end_of_word_suffix"):
        return None
    if isinstance(decoder, decoders.WordPiece):
        decoder = decoders.WordPiece(decoder.prefix, cleanup=False)
    return lambda piece: decoder.decode(["a", piece])[1:]
