"""Loading of tokenizers, whoever made them, so that a text has the same tokens each time and everywhere."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from mlm import logs
from mlm.data import tokenizer_checks
from mlm.data.tokenizer_checks import ROLES
from mlm.errors import InputError
from mlm.paths import HUB_NAME, UPath, local_folder, of_a_command
from mlm.text import printable, say

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast


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
        # transformers 5's, whose default is without types
        if settings.get("tokenizer_class") == "TokenizersBackend":
            names = settings.get("model_input_names", ["input_ids", "attention_mask"])
            load_from = functools.partial(
                PreTrainedTokenizerFast.from_pretrained, model_input_names=names
            )
        # as 5 saves them
        if isinstance(special_tokens := settings.get("extra_special_tokens"), list):
            load_from = functools.partial(
                load_from, extra_special_tokens={}, additional_special_tokens=special_tokens
            )
        tokenizer = load_from(folder, trust_remote_code=False)
    except Exception as error:  # whatever transformers, tokenizers or the Hub's client raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "name a folder that save_pretrained of a fast tokenizer has written, or a tokenizer of the Hub"
        raise InputError(
            f"{path}: no tokenizer can be loaded from there ({printable(reason):.200}); {fix}."
        ) from error
    if not tokenizer.is_fast:
        raise InputError(
            f"{path}: has no fast tokenizer (tokenizer.json); convert it with transformers first."
        )
    # with it, the next call would read <mask> in a text as text
    tokenizer.split_special_tokens = False
    tokenizer.init_kwargs.pop("split_special_tokens", None)  # which are saved
    fast = tokenizer.backend_tokenizer
    _settle(fast, path)
    tokenizer_checks.special_ids(
        fast, {role: getattr(tokenizer, f"{role}_token") for role in ROLES}, path
    )
    return tokenizer


def load_fast(folder: str) -> Tokenizer:
    """Returns the tokenizer of a folder, local or gs://, without transformers and in a fraction of its time."""
    file = UPath(folder) / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            f"{file}: there is no such file; train a tokenizer first, or set tokenizer.path."
        )
    try:
        fast = Tokenizer.from_file(f"{local_folder(folder)}/tokenizer.json")
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"{file}: can't be read ({str(error).splitlines()[0]}).") from error
    _settle(fast, folder)
    return fast


def _settle(fast: Tokenizer, where: str) -> None:
    """Turns off what gives a text other tokens than it has: settings that its training, or a last call, left behind."""
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = False  # "<mask>" in a text is a mask token
    # of BPE, for training a model on several readings of a word
    if dropout := getattr(fast.model, "dropout", None):
        fast.model.dropout = None
        _say_once(f"tokenizer: {printable(where)}: the dropout of its BPE, {dropout:g}, is off")


@of_a_command
@functools.cache
def _say_once(text: str) -> None:
    say(text)


def load_for_corpus(folder: str) -> Tokenizer:
    """Returns the tokenizer of a folder as it reads a corpus, see `for_corpus`."""
    return for_corpus(load_fast(folder), (ROLES | _role_tokens(folder)).values())


def reader_of(tok: PreTrainedTokenizerFast) -> Tokenizer:
    """Returns a loaded tokenizer as it reads a corpus, see `for_corpus`."""
    roles = {
        name: token
        for name, token in tok.special_tokens_map.items()
        if name != "additional_special_tokens"
    }
    return for_corpus(tok.backend_tokenizer, roles.values())


def for_corpus(fast: Tokenizer, roles: Collection[object]) -> Tokenizer:
    """Returns a tokenizer that reads the tokens of the `roles` in a text as text, as WikiText's <unk>.

    Special tokens beside them, such as a corpus's own <url>, are tokens, as everywhere. Models that have an entry for
    <s>, such as XLM-R's Unigram, would still find it: before these, the first character of a role's token is cut off.
    """
    content = json.loads(fast.to_str())
    # encode_special_tokens reads all special tokens as text: so those of the roles alone are left special.
    for token in content["added_tokens"]:
        token["special"] = token["content"] in roles
    reader = Tokenizer.from_str(json.dumps(content))
    reader.encode_special_tokens = True  # as text
    ids = {token: reader.token_to_id(token) for token in roles if isinstance(token, str)}
    readable = [
        text for text in ids if ids[text] in reader.encode(text, add_special_tokens=False).ids
    ]
    if readable:
        pattern = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in readable)
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        before = [] if reader.pre_tokenizer is None else [reader.pre_tokenizer]
        reader.pre_tokenizer = pre_tokenizers.Sequence([*before, cut])
    return reader


def _role_tokens(folder: str) -> dict[str, object]:
    """Returns the special tokens of a folder by role, as its settings name them."""
    settings: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= logs.read_object(UPath(local_folder(folder)) / file)
    tokens = {role: settings.get(f"{role}_token") for role in (*ROLES, "bos", "eos")}
    texts = {
        role: token.get("content") if isinstance(token, dict) else token
        for role, token in tokens.items()
    }
    return {role: text for role, text in texts.items() if text is not None}


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
    fast = load_fast(folder)
    tokens = _role_tokens(folder)
    ids = tokenizer_checks.special_ids(fast, {role: tokens.get(role) for role in ROLES}, folder)
    added = {number for number, token in fast.get_added_tokens_decoder().items() if token.special}
    unused = tokenizer_checks.unused_ids(fast)  # never predicted nor drawn, as special tokens
    return {
        "vocab_size": tokenizer_checks.vocabulary_size(fast),
        "special_ids": ids,
        "all_special_ids": tuple(sorted(added | set(ids.values()) | unused)),
        "tokenizer_fingerprint": content_hash(fast),
    }


def word_starts(folder: str, *, key: str, fix: str = "set masking.kind to token") -> np.ndarray:
    """Returns which entries of the vocabulary start a word, bool [V]; `key` is the setting that asks for it."""
    import numpy as np  # the commands import this module, to answer a mistake at once

    fast = load_fast(folder)
    text_of = surface(fast)
    vocabulary = fast.get_vocab()
    starts_V = np.zeros(tokenizer_checks.vocabulary_size(fast), bool)
    if text_of is not None:
        for piece, number in vocabulary.items():
            starts_V[number] = text_of(piece)[:1].isspace()
    if not starts_V.any():
        where = f"{key}: the vocabulary and decoder of {folder} ({type(fast.model).__name__})"
        raise InputError(
            f"{where} do not show which tokens start a word; {fix}, or use another tokenizer."
        )
    starts_V[list(fast.get_added_tokens_decoder())] = True
    return starts_V


def counted_words(folder: str, *, key: str) -> np.ndarray:
    """Returns how many more words of a text cut at white space each entry of the vocabulary makes, about, int64 [V].

    White space alone makes one, of the word after it: the indentation of a line counts as a word or two.
    """
    starts_V = word_starts(folder, key=key, fix="name steps")
    fast = load_fast(folder)
    if isinstance(fast.decoder, decoders.WordPiece):  # its punctuation marks stand alone
        starts_V[
            [
                number
                for piece, number in fast.get_vocab().items()
                if not any(map(str.isalnum, piece))
            ]
        ] = False
    counts_V = starts_V.astype("int64")
    text_of = surface(fast)
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
