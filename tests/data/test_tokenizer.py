import json
import re
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlm.data import tokenizer
from mlm.errors import InputError
from tests.support.corpora import train_tokenizer

KINDS = ("unigram", "bpe", "wordpiece")


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_robertas_and_a_mask_takes_the_space_before_it(tokenizers, kind):
    loaded = tokenizer.load(tokenizers[kind])
    assert len(loaded) == 600 and loaded.model_max_length == 64
    assert loaded.convert_ids_to_tokens(range(5)) == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    assert (loaded.bos_token_id, loaded.eos_token_id, set(loaded.all_special_ids)) == (
        0,
        2,
        set(range(5)),
    )
    fields = tokenizer.manifest_fields(tokenizers[kind])
    assert fields["special_ids"] == {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
    assert fields["all_special_ids"] == (0, 1, 2, 3, 4)
    text = "Returns the array."
    plain = loaded(text, add_special_tokens=False)["input_ids"]
    assert loaded(text)["input_ids"] == [0, *plain, 2]
    assert loaded(text, text)["input_ids"] == [0, *plain, 2, 2, *plain, 2]
    ids = loaded("Returns the <mask> of the array.", add_special_tokens=False)["input_ids"]
    head = loaded("Returns the", add_special_tokens=False)["input_ids"]
    tail = ids[len(head) + 1 :]
    assert ids == [*head, 4, *tail]
    assert (
        tail
        == loaded("Returns the array of the array.", add_special_tokens=False)["input_ids"][
            -len(tail) :
        ]
    )


@pytest.mark.parametrize(
    ("kind", "normal"),
    [
        ("unigram", lambda text: text),
        ("bpe", lambda text: text),
        ("wordpiece", lambda text: "".join(text.split())),
    ],
)
def test_text_comes_back(tokenizers, texts, kind, normal):
    """Unigram: every character that the sample had; byte-level BPE: every text; WordPiece: all but white space."""
    loaded = tokenizer.load(tokenizers[kind])
    some = [*texts[:150], "two  spaces\n\n    and lines \n", "x_y = 3.14  # (foo_bar)[0]"]
    if kind == "bpe":
        some += ["  spaces first", "a\tb", "日本語 ▁ \u200b 🙂", "\r\n\x00"]
    for text in some:
        back = loaded.decode(loaded(text)["input_ids"][1:-1], clean_up_tokenization_spaces=False)
        assert normal(back) == normal(text)


@pytest.mark.parametrize("kind", KINDS)
def test_words_start_where_the_tokenizer_says(tokenizers, texts, kind):
    """White space before a piece, by the offsets into the text; for WordPiece the words of its own pre-tokenizer."""
    starts_V = tokenizer.word_starts(tokenizers[kind], key="test")
    loaded = tokenizer.load(tokenizers[kind])
    assert starts_V.shape == (600,)
    inner = count = 0
    for text in [*texts[:400], "two  spaces\n\n    and\tlines \r\n(foo_bar)[0]"]:
        encoded = loaded(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        offsets = encoded["offset_mapping"]
        words = encoded.word_ids()
        for place in range(1, len(ids)):
            if ids[place] == loaded.unk_token_id:
                continue
            expected = (
                text[offsets[place][0]].isspace()
                if kind != "wordpiece"
                else words[place] != words[place - 1]
            )
            assert starts_V[ids[place]] == expected, (
                loaded.convert_ids_to_tokens(ids[place]),
                text,
            )
            inner = inner + (not expected)
            count = count + 1
    assert count > 20_000 and 0.1 < inner / count < 0.9


def test_words_that_cannot_be_told_are_refused(tmp_path):
    fast = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        InputError, match=rf"config\.masking\.kind = word: .*{tmp_path}.*masking\.kind to token"
    ):
        tokenizer.word_starts(str(tmp_path), key="config.masking.kind = word")


def test_entries_of_several_words_count_as_such(tmp_path):
    vocabulary = {"a": 0, "b": 1, "▁": 2, "a▁": 3, "a▁b": 4, "▁a": 5, "▁a▁b": 6}
    merges = [("a", "▁"), ("a▁", "b"), ("▁", "a"), ("▁", "a▁b")]
    fast = Tokenizer(models.BPE(vocabulary, merges))
    fast.decoder = decoders.Replace("▁", " ")
    fast.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.counted_words(str(tmp_path), key="test").tolist() == [0, 0, 1, 1, 1, 1, 2]


def test_fingerprint_is_of_the_ids_alone(tokenizers, tmp_path):
    shutil.copytree(tokenizers["unigram"], tmp_path / "copy")
    copy = json.loads((tmp_path / "copy" / "tokenizer.json").read_text())
    (tmp_path / "copy" / "tokenizer.json").write_text(json.dumps(copy))  # other white space
    tokenizer.load(tokenizers["unigram"]).save_pretrained(tmp_path / "saved")
    prints = {tokenizer.fingerprint(str(tmp_path / name)) for name in ("copy", "saved")}
    assert prints == {tokenizer.fingerprint(tokenizers["unigram"])}
    assert len({tokenizer.fingerprint(folder) for folder in tokenizers.values()}) == 3
    copy["model"]["vocab"][10], copy["model"]["vocab"][11] = (
        copy["model"]["vocab"][11],
        copy["model"]["vocab"][10],
    )
    (tmp_path / "copy" / "tokenizer.json").write_text(json.dumps(copy))
    assert tokenizer.fingerprint(str(tmp_path / "copy")) not in prints


@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_that_the_text_cannot_make_is_refused(texts, tmp_path, kind):
    """The size that the sentence names works."""
    for vocab_size in (30, 20_000):
        with pytest.raises(
            InputError, match=f"tokenizer.vocab_size = {vocab_size}: .* set it to [0-9]+"
        ) as error:
            train_tokenizer(texts[:100], tmp_path / "none", kind, vocab_size=vocab_size)
        assert not (tmp_path / "none").exists()
        size = int(re.search("set it to ([0-9]+)", str(error.value))[1])
        assert (size < vocab_size) == (vocab_size == 20_000)
        folder = train_tokenizer(texts[:100], tmp_path / f"{kind}{size}", kind, vocab_size=size)
        assert tokenizer.load_fast(folder).get_vocab_size() == size


NO_TOKENIZER = {
    "no json": ("tokenizer.json", b"{"),
    "no mask": ("tokenizer_config.json", b"{}"),
    "a mask that is a number": ("tokenizer_config.json", b'{"mask_token": 3}'),
    "an array": ("tokenizer_config.json", b"[]"),
}


@pytest.mark.parametrize("fault", ["gone", "slow", *NO_TOKENIZER])
def test_folders_that_are_no_tokenizer_are_refused(tokenizers, tmp_path, fault):
    folder = tmp_path / "tokenizer"
    if fault != "gone":
        shutil.copytree(tokenizers["bpe"], folder)
    if fault == "slow":
        (folder / "tokenizer.json").unlink()
    elif fault in NO_TOKENIZER:
        name, content = NO_TOKENIZER[fault]
        (folder / name).write_bytes(content)
    for function in (tokenizer.load, tokenizer.manifest_fields):
        with pytest.raises(InputError, match=str(folder)) as error:
            function(str(folder))
        assert "\n" not in str(error.value)


def test_an_empty_folder_is_no_tokenizer_whatever_model_its_name_makes_transformers_think_of(
    tmp_path,
):
    (tmp_path / "empty").mkdir()  # as in MPT
    with pytest.raises(InputError, match="holds neither tokenizer"):
        tokenizer.load(str(tmp_path / "empty"))


def test_a_folder_saved_by_transformers_5_gives_the_same_ids(tokenizers, tmp_path):
    shutil.copytree(tokenizers["unigram"], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    written = {
        "backend": "tokenizers",
        "is_local": True,
        "local_files_only": False,
        "mask_token": "<mask>",
    }
    written |= {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["the"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | written))
    loaded = tokenizer.load(str(tmp_path))
    text = "Returns  a <mask> of an array."
    assert loaded(text)["input_ids"] == tokenizer.load(tokenizers["unigram"])(text)["input_ids"]
    assert loaded.additional_special_tokens == ["the"]


@pytest.mark.parametrize("kind", ["unigram", "wordlevel"])
def test_special_tokens_in_a_text_are_text_to_models_that_have_an_entry_for_them(tmp_path, kind):
    """XLM-R's vocabulary has them, and its pre-tokenizer leaves them whole; <s> strikes text out in HTML."""
    pieces = [*tokenizer.ROLES.values(), *"▁oldnw<>/skma", "▁old"]
    fast = Tokenizer(
        models.Unigram(
            [(piece, -min(number, 6.0)) for number, piece in enumerate(pieces)], unk_id=3
        )
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    if kind == "wordlevel":
        fast = Tokenizer(
            models.WordLevel(
                {piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"
            )
        )
        fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(list(tokenizer.ROLES.values()))
    fast.save(str(tmp_path / "tokenizer.json"))
    as_text = tokenizer.load_for_corpus(str(tmp_path))
    ids = as_text.encode("<s>old</s> <mask> old <pad>", add_special_tokens=False).ids
    assert {number for number in ids if number < 5} <= {3}
    if kind == "unigram":
        assert "".join(map(as_text.id_to_token, ids)) == "▁<s>old</s>▁<mask>▁old▁<pad>".replace(
            "p", "<unk>"
        )
        assert as_text.encode("old old").tokens == ["▁old", "▁old"]
