import json
import re
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mlm.data import tokenizer
from mlm.errors import InputError
from tests.support.corpora import train_tokenizer

KINDS = ("unigram", "bpe", "wordpiece")


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_robertas_and_a_mask_takes_the_space_before_it(tokenizers, kind):
    loaded = tokenizer.load(tokenizers[kind])
    assert len(loaded) == 600 and loaded.model_max_length == 64
    assert loaded.convert_ids_to_tokens(range(5)) == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    assert (loaded.bos_token_id, loaded.eos_token_id) == (0, 2)
    fields = tokenizer.manifest_fields(tokenizers[kind])
    assert fields["special_ids"] == {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
    assert fields["all_special_ids"] == (0, 1, 2, 3, 4)
    _, *plain, _ = loaded("Returns the")["input_ids"]
    assert loaded("Returns the", "Returns the")["input_ids"] == [0, *plain, 2, 2, *plain, 2]
    first, rest = np.split(loaded("Returns the <mask> of it")["input_ids"], [len(plain) + 2])
    assert first.tolist() == [0, *plain, 4] and loaded.decode(rest[:-1]).strip() == "of it"


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back(tokenizers, texts, kind):
    """Unigram: every character that the sample had; byte-level BPE: every text; WordPiece: all but white space."""
    loaded = tokenizer.load(tokenizers[kind])
    some = [*texts[:150], "two  spaces\n\n    and lines \n", "x_y = 3.14  # (foo_bar)[0]"]
    if kind == "bpe":
        some += ["  spaces first", "a\tb", "日本語 ▁ \u200b 🙂", "\r\n\x00"]
    for text in some:
        back = loaded.decode(loaded(text)["input_ids"][1:-1], clean_up_tokenization_spaces=False)
        if kind == "wordpiece":
            back, text = ("".join(each.split()) for each in (back, text))
        assert back == text


@pytest.mark.parametrize("kind", KINDS)
def test_words_start_where_the_tokenizer_says(tokenizers, texts, kind):
    """White space before a piece, by the offsets into the text; for WordPiece the words of its own pre-tokenizer."""
    starts_V = tokenizer.word_starts(tokenizers[kind], key="test")
    loaded = tokenizer.load(tokenizers[kind])
    inner = []
    for text in [*texts[:100], "two  spaces\n\n    and\tlines \r\n(foo_bar)[0]"]:
        encoded = loaded(text, add_special_tokens=False).encodings[0]
        for place in range(1, len(encoded.ids)):
            starts = text[encoded.offsets[place][0]].isspace()
            if kind == "wordpiece":
                starts = encoded.word_ids[place] != encoded.word_ids[place - 1]
            if encoded.tokens[place] != "<unk>":
                assert starts_V[encoded.ids[place]] == starts, (encoded.tokens[place], text)
                inner.append(not starts)
    assert len(inner) > 5000 and 0.1 < sum(inner) / len(inner) < 0.9


def test_words_that_cannot_be_told_are_refused(tmp_path):
    fast = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        InputError, match=rf"config\.masking\.kind = word: .*{tmp_path}.*masking\.kind to token"
    ):
        tokenizer.word_starts(str(tmp_path), key="config.masking.kind = word")


def test_fingerprint_is_of_the_ids_alone(tokenizers, tmp_path):
    expected = tokenizer.fingerprint(tokenizers["unigram"])
    assert tokenizer.fingerprint(tokenizers["bpe"]) != expected
    tokenizer.load(tokenizers["unigram"]).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content))  # other white space
    assert tokenizer.fingerprint(str(tmp_path)) == expected
    vocabulary = content["model"]["vocab"]
    vocabulary[10], vocabulary[11] = vocabulary[11], vocabulary[10]
    file.write_text(json.dumps(content))
    assert tokenizer.fingerprint(str(tmp_path)) != expected


@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_that_the_text_cannot_make_is_refused(texts, tmp_path, kind):
    """The size that the sentence names works."""
    for vocab_size in (30, 20_000):
        with pytest.raises(InputError, match=f"tokenizer.vocab_size = {vocab_size}: ") as error:
            train_tokenizer(texts[:100], tmp_path / "none", kind, vocab_size=vocab_size)
        assert not (tmp_path / "none").exists()
        size = int(re.search("set it to ([0-9]+)", str(error.value))[1])
        assert (size < vocab_size) == (vocab_size == 20_000)
        folder = train_tokenizer(texts[:100], tmp_path / str(size), kind, vocab_size=size)
        assert tokenizer.load_fast(folder).get_vocab_size() == size


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{}"),
        ("tokenizer_config.json", '{"mask_token": 3}'),
    ],
)
def test_folders_that_are_no_tokenizer_are_refused(tokenizers, tmp_path, name, content):
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizers["bpe"], folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    for function in (tokenizer.load, tokenizer.manifest_fields):
        with pytest.raises(InputError, match=str(folder)) as error:
            function(str(folder))
        assert "\n" not in str(error.value)


def test_a_folder_saved_by_transformers_5_gives_the_same_ids(tokenizers, tmp_path):
    shutil.copytree(tokenizers["unigram"], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    written = {
        "backend": "tokenizers",
        "is_local": True,
        "tokenizer_class": "TokenizersBackend",
        "extra_special_tokens": ["the"],
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | written))
    loaded = tokenizer.load(str(tmp_path))
    text = "Returns  a <mask> of an array."
    assert loaded(text)["input_ids"] == tokenizer.load(tokenizers["unigram"])(text)["input_ids"]
    assert loaded.additional_special_tokens == ["the"]


def test_special_tokens_in_a_text_are_text_to_models_that_have_an_entry_for_them(tmp_path):
    """XLM-R's vocabulary has them, and its pre-tokenizer leaves them whole; <s> strikes text out in HTML."""
    pieces = [*tokenizer.ROLES.values(), *"▁oldnw<>/skma", "▁old"]
    scores = [(piece, -min(number, 6.0)) for number, piece in enumerate(pieces)]
    fast = Tokenizer(models.Unigram(scores, unk_id=3))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.add_special_tokens(list(tokenizer.ROLES.values()))
    fast.save(str(tmp_path / "tokenizer.json"))
    as_text = tokenizer.load_for_corpus(str(tmp_path))
    ids = as_text.encode("<s>old</s> <mask> old", add_special_tokens=False).ids
    assert "".join(map(as_text.id_to_token, ids)) == "▁<s>old</s>▁<mask>▁old"
    assert as_text.encode("old old").tokens == ["▁old", "▁old"]
