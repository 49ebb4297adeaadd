"""Training and loading of tokenizers: a folder that `AutoTokenizer` reads, in transformers 4 and 5.

The special tokens are RoBERTa's, in RoBERTa's order: <s> 0, <pad> 1, </s> 2, <unk> 3, <mask> 4.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mlm import logs
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, local_folder
from mlm.text import is_text, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
ROLES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
LONGEST_DOCUMENT = 100_000  # characters of a document that the training reads: a book must not be the whole sample


def train(
    texts: Iterable[str],
    *,
    kind: str,
    vocab_size: int,
    sample_megabytes: float,
    lowercase: bool,
    length: int,
    folder: str,
) -> None:
    """Trains a tokenizer on the first texts and writes its folder.

    Args:
      texts: documents, already in an order that mixes the sources; read until the sample is full.
      kind: "unigram" (Kudo, 2018; words start with the mark of SentencePiece, line breaks are kept), "bpe" (byte-level,
        as GPT-2 and RoBERTa; every text round-trips) or "wordpiece" (BERT's; white space is not kept). Unigram brings
        back NFC text of the sample's characters, but for a space at its very start. Only "bpe" comes out the same
        each time: the other two trainers of the tokenizers library break ties by the order of a hash table.
      vocab_size: entries, special tokens included.
      sample_megabytes: size of the sample in 10^6 bytes of UTF-8.
      lowercase: fold case, and NFKC.
      length: tokens that the model reads, for transformers' truncation.
      folder: to be made; local. The caller renames it when all is well.

    Raises:
      InputError: the sample has too little text for the vocabulary, or more characters than it has entries.
    """
    tokenizer, trainer = _untrained(kind, vocab_size, lowercase)
    few = InputError(f"config.tokenizer.vocab_size = {vocab_size}: the text has more characters than that; raise it.")
    try:
        tokenizer.train_from_iterator(_sample(texts, sample_megabytes), trainer)
    except Exception as error:  # tokenizers raises plain Exception
        raise few if "not large enough" in str(error) else error  # noqa: B904
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise few
    if size < vocab_size:
        raise InputError(
            f"config.tokenizer.vocab_size = {vocab_size}: the text is enough for {size} entries only; lower it, or "
            "raise tokenizer.sample_megabytes."
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    root = Path(folder)
    root.mkdir(parents=True)
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps(_transformers_config(length), indent=1))


def _untrained(kind: str, vocab_size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    special = [AddedToken(token, lstrip=token == "<mask>", normalized=False, special=True) for token in SPECIAL]
    common = {"vocab_size": vocab_size, "special_tokens": special, "show_progress": False}
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
        trainer = trainers.UnigramTrainer(unk_token="<unk>", max_piece_length=16, **common)
    elif kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=2, **common)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**common)
    if lowercase:
        folds = [normalizers.NFKC(), normalizers.Lowercase()]
        tokenizer.normalizer = normalizers.Sequence(folds + ([tokenizer.normalizer] if tokenizer.normalizer else []))
    return tokenizer, trainer


def _sample(texts: Iterable[str], megabytes: float) -> Iterator[str]:
    left = megabytes * 1e6
    for text in texts:
        text = text[:LONGEST_DOCUMENT]
        yield text
        left -= len(text.encode())
        if left <= 0:
            return


def _transformers_config(length: int) -> dict:
    mask = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": "<s>",
        "eos_token": "</s>",
        **{f"{role}_token": token for role, token in ROLES.items()},
        "mask_token": mask | {"single_word": False, "special": True},
    }


def load(path: str) -> PreTrainedTokenizerFast:
    """Returns the fast tokenizer of a folder or of a name on the hub.

    Raises:
      InputError: it can't be loaded, or it has no mask, pad, cls, sep or unk token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(local_folder(path), trust_remote_code=False)
    except Exception as error:  # whatever comes up in transformers, tokenizers or on the way to the hub
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{path}: no tokenizer can be loaded from there ({printable(words[0])}).") from error
    if not tokenizer.is_fast:
        raise InputError(f"{path}: has no fast tokenizer (tokenizer.json); convert it with transformers first.")
    for role in ROLES:
        if getattr(tokenizer, f"{role}_token") is None:
            raise InputError(f"{path}: the tokenizer has no {role} token; a masked language model needs one.")
    return tokenizer


def special_ids(folder: str) -> tuple[dict[str, int], tuple[int, ...]]:
    """Returns {"cls", "pad", "sep", "unk", "mask"} -> id, and all ids of special tokens, without transformers.

    Raises:
      InputError: a file of the folder is missing, or a token is.
    """
    tokenizer = load_fast(folder)
    named = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            named |= logs.read_object(UPath(local_folder(folder)) / file)
        except DamageError:
            raise InputError(f"{folder}/{file}: is not a JSON object; take a good copy of the tokenizer.") from None
    ids = {}
    for role in ROLES:
        token = named.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = tokenizer.token_to_id(token) if is_text(token) else None
        if number is None:
            raise InputError(f"{folder}: the tokenizer has no {role} token; a masked language model needs one.")
        ids[role] = number
    added = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return ids, tuple(sorted(added | set(ids.values())))


def load_fast(folder: str) -> Tokenizer:
    """Returns the tokenizer of a folder, local or gs://, without transformers and in a fraction of its time.

    Raises:
      InputError: there is no readable tokenizer.json.
    """
    file = UPath(folder) / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{file}: there is no such file; train a tokenizer first, or set tokenizer.path.")
    try:
        return Tokenizer.from_file(f"{local_folder(folder)}/tokenizer.json")
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"{file}: can't be read ({str(error).splitlines()[0]}).") from error


def word_starts(folder: str, *, key: str) -> np.ndarray:
    """Returns which entries of the vocabulary start a word, bool [V].

    Of a byte-level or Metaspace tokenizer those that begin with white space, so that a word is what stands between
    white space; of WordPiece those without its prefix. Added tokens are words by themselves where they stand.

    Args:
      folder: of the tokenizer, local or gs://.
      key: config key and value that ask for it, for the refusal.

    Raises:
      InputError: it can't be told, or there is no readable tokenizer.json.
    """
    fast = load_fast(folder)
    text_of = surface(fast)
    if text_of is None:
        model = json.loads(fast.to_str())["model"]["type"]
        raise InputError(
            f"{key}: which tokens of {folder} start a word can't be told from its vocabulary ({model} without "
            "Metaspace, byte level or a prefix of inner pieces); set masking.kind to token, or take another tokenizer."
        )
    vocabulary = fast.get_vocab()
    starts_V = np.zeros(max(vocabulary.values()) + 1, bool)
    for piece, number in vocabulary.items():
        starts_V[number] = text_of(piece)[:1].isspace()
    starts_V[list(fast.get_added_tokens_decoder())] = True
    return starts_V


def surface(fast: Tokenizer) -> Callable[[str], str] | None:
    """Returns the function from a piece of the vocabulary to its text, a space before it where it starts a word.

    None where it can't be told from the model, the pre-tokenizer and the decoder.
    """
    content = json.loads(fast.to_str())
    model, parts = content["model"], _parts(content["pre_tokenizer"]) + _parts(content["decoder"])
    prefix = model.get("continuing_subword_prefix")
    if prefix and model["type"] in ("WordPiece", "BPE"):
        return lambda piece: piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
    if model.get("end_of_word_suffix"):  # a piece then says that the next one starts a word
        return None
    if any(part["type"] == "ByteLevel" for part in parts):
        decoder = decoders.ByteLevel()
        return lambda piece: decoder.decode([piece])
    marks = {part["replacement"] for part in parts if part["type"] == "Metaspace"}
    if len(marks) != 1:
        return None
    mark = marks.pop()
    return lambda piece: piece.replace(mark, " ")


def _parts(component: dict | None) -> list[dict]:
    """Returns the pre-tokenizers or decoders that a component of tokenizer.json is made of."""
    if component is None:
        return []
    inner = component.get("pretokenizers") or component.get("decoders")
    return [part for each in inner for part in _parts(each)] if inner else [component]


def fingerprint(folder: str) -> str:
    """Returns the SHA-256 of what decides the ids: two copies of a tokenizer have the same."""
    content = json.loads(load_fast(folder).to_str())
    for key in ("truncation", "padding"):
        content.pop(key, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
