"""What a tokenizer must do to feed a masked language model. It is tried out, as its files may say something else."""

import itertools
from collections.abc import Iterable, Mapping

from tokenizers import Tokenizer

from mlm.errors import InputError
from mlm.text import is_text, printable

ROLES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
# of which no tokenizer knows all by heart
LETTERS = "ÿжกअ文한\N{SLIGHTLY SMILING FACE}"
LARGEST_VOCABULARY = 2**24
SAMPLE_CHARACTERS = 1_000_000  # of the texts that `unknown_share` and `long_piece_share` read
UNKNOWN = 0.01  # of the tokens: worth a warning above it
UNKNOWN_FIX = "use a unigram or bpe tokenizer (tokenizer.kind) that was trained on such text"


def vocabulary_size(fast: Tokenizer) -> int:
    """Returns the largest id plus one: more than there are entries if some ids are unused."""
    return max(fast.get_vocab().values(), default=-1) + 1


def unused_ids(fast: Tokenizer) -> set[int]:
    """Returns the ids below `vocabulary_size` that no entry has."""
    return set(range(vocabulary_size(fast))).difference(fast.get_vocab().values())


def special_ids(fast: Tokenizer, tokens: Mapping[str, object], where: str) -> dict[str, int]:
    """Returns the ids of the special `tokens` by role; raises InputError, which names `where`, if it can't be used.

    A tokenizer that knows every character, or works on bytes, needs no unk token; all other ROLES are required.
    """
    ids = {role: fast.token_to_id(token) for role, token in tokens.items() if is_text(token)}
    ids = {role: ids[role] for role in ROLES if ids.get(role) is not None}
    if missing := [role for role in ROLES if role not in ids and role != "unk"]:
        raise InputError(
            f"{where}: the tokenizer has no {missing[0]} token; a masked language model needs one."
        )
    if (size := vocabulary_size(fast)) > LARGEST_VOCABULARY:
        gaps = f"ids up to {size - 1:,}, and the model needs a row for each"
        raise InputError(
            f"{where}: the tokenizer has {gaps}; number its entries without such gaps."
        )
    has_fallback = "unk" in ids or getattr(fast.model, "byte_fallback", False)
    if not is_byte_level(fast) and not (has_fallback and _reads_letters(fast)):
        fix = "add one to its model (unk_id of Unigram, else unk_token), and name it in tokenizer_config.json"
        raise InputError(
            f"{where}: the tokenizer has no unk token for the characters that it doesn't know; {fix}."
        )
    for role, other in itertools.product(("pad", "mask"), ids):
        if role != other and ids[role] == ids[other]:
            call = f"tokenizer.add_special_tokens({{'{role}_token': '{ROLES[role]}'}})"
            token = f"the {role} token of the tokenizer, {printable(str(tokens[role]))}"
            raise InputError(
                f"{where}: {token}, is its {other} token too; give it another one ({call}), and save it."
            )
    _check_added(fast, tokens, ids, where)
    return ids


def _reads_letters(fast: Tokenizer) -> bool:
    """Returns whether each of LETTERS gets tokens, unless the normalizer removes it."""
    try:
        return all(
            fast.encode(letter, add_special_tokens=False).ids
            or not any(piece for piece, _ in split_pieces(fast, letter))
            for letter in LETTERS
        )
    except Exception:  # tokenizers raises plain Exception where a model has no unknown token
        return False


def _check_added(
    fast: Tokenizer, tokens: Mapping[str, object], ids: Mapping[str, int], where: str
) -> None:
    """Raises InputError unless cls and sep enclose a text, and the mask token in a text is read as such."""
    cls, sep, mask = (printable(str(tokens[role])) for role in ("cls", "sep", "mask"))
    empty = fast.encode("").ids
    if empty[:1] != [ids["cls"]] or empty[1:][-1:] != [ids["sep"]]:
        raise InputError(
            f"{where}: the tokenizer doesn't put its special tokens {cls} and {sep} around a text (it has no "
            "post-processor), so that documents run into one another; set tokenizer.backend_tokenizer.post_processor = "
            f"tokenizers.processors.TemplateProcessing(single='{cls} $A {sep}', pair='{cls} $A {sep} {sep} $B {sep}', "
            f"special_tokens=[('{cls}', {ids['cls']}), ('{sep}', {ids['sep']})]), and save it."
        )
    if fast.encode(f"a {tokens['mask']} a").ids.count(ids["mask"]) != 1:
        fix = f"add it as tokenizers.AddedToken('{mask}', normalized=False, special=True), and save it"
        raise InputError(
            f"{where}: the tokenizer doesn't read {mask} in a text as its mask token; {fix}."
        )
    text = " ".join(f"international measurements of temperatures {number}" for number in range(20))
    if len({tuple(fast.encode(text).ids) for _ in range(3)}) > 1:
        fix = "turn off its sampling (dropout, alpha, nbest_size), and save it"
        raise InputError(
            f"{where}: the tokenizer gives the same text other tokens each time; {fix}."
        )


def check_pairs(fast: Tokenizer, *, sep_id: int, where: str) -> None:
    """Raises InputError unless the tokenizer puts a sep between two texts, and one at their end."""
    ids = fast.encode("a", "a").ids
    if ids[-1:] != [sep_id] or ids.count(sep_id) < 2:
        sep = printable(str(fast.id_to_token(sep_id)))
        fix = "give its post-processor a template for pairs (tokenizers.processors.TemplateProcessing), and save it"
        raise InputError(
            f"{where}: the tokenizer doesn't separate the two texts of a pair by {sep}; {fix}."
        )


def marks_second_text(fast: Tokenizer, sep_id: int) -> bool:
    """Returns whether the second text of a pair has type 1, with the sep behind it, and all before it type 0."""
    encoding = fast.encode("a", "a")
    behind = encoding.ids.index(sep_id) + 1
    return encoding.type_ids == [0] * behind + [1] * (len(encoding.ids) - behind)


def split_pieces(fast: Tokenizer, text: str) -> list[tuple[str, tuple[int, int]]]:
    """Returns the pieces that a model gets of a text, and where they are in it once it is normalized."""
    text = fast.normalizer.normalize_str(text) if fast.normalizer else text
    return (
        fast.pre_tokenizer.pre_tokenize_str(text)
        if fast.pre_tokenizer
        else [(text.strip(), (0, len(text)))]
    )


def is_byte_level(fast: Tokenizer) -> bool:
    """Returns whether its entries are made of bytes. Unless trained with all of them, it leaves the others out."""
    return "ByteLevel(" in f"{fast.pre_tokenizer} {fast.normalizer}"


def left_out_share(fast: Tokenizer, texts: Iterable[str]) -> float:
    """Returns the share of the bytes of the first `texts` that a byte-level tokenizer without unk token leaves out."""
    if not is_byte_level(fast) or getattr(fast.model, "unk_token", None) is not None:
        return 0.0
    total = kept = 0
    for text in first_texts(texts):
        total += sum(len(piece) for piece, _ in split_pieces(fast, text))
        kept += sum(map(len, fast.encode(text, add_special_tokens=False).tokens))
    return 1 - kept / total if total else 0.0


def unknown_share(fast: Tokenizer, texts: Iterable[str], unk_id: int | None) -> float:
    """Returns the share of unknown tokens in the first `texts`; the ids are those of a corpus."""
    if unk_id is None:
        return 0.0
    encodings = fast.encode_batch_fast(list(first_texts(texts)), add_special_tokens=False)
    total = sum(len(encoding.ids) for encoding in encodings)
    return sum(encoding.ids.count(unk_id) for encoding in encodings) / max(total, 1)


def long_piece_share(fast: Tokenizer, texts: Iterable[str], longest: int) -> float:
    """Returns the share of characters in pieces, as training gets them, of more than `longest` characters."""
    total = long = 0
    for text in first_texts(texts):
        for _, (start, stop) in split_pieces(fast, text):
            total += stop - start
            long += stop - start if stop - start > longest else 0
    return long / max(total, 1)


def first_texts(texts: Iterable[str]) -> Iterable[str]:
    """Yields the first SAMPLE_CHARACTERS of the texts."""
    left = SAMPLE_CHARACTERS
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
