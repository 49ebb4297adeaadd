"""Tokenizers made elsewhere: what they do is tried when they are loaded, and works, is refused, or is said."""

import json
import pathlib
import random
import shutil
import types
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mlm.commands import tokenizer as tokenizer_command
from mlm.data import tokenizer, tokenizer_checks
from mlm.data import train_tokenizer as train_tokenizer_module
from mlm.data.manifest import load_manifest
from mlm.doctor import checks
from mlm.errors import InputError
from mlm.workdir import Workdir
from tests.support.corpora import shard_rows, train_tokenizer, write_shards
from tests.support.doctored import case_of
from tests.support.tiny import tiny_config


def edited(folder: str, target: pathlib.Path, change: Callable[[dict], None], **settings) -> str:
    """A copy whose tokenizer.json is changed; `settings` of tokenizer_config.json, None to remove one."""
    shutil.copytree(folder, target)
    for name, edit in (
        ("tokenizer.json", change),
        ("tokenizer_config.json", lambda content: content.update(settings)),
    ):
        content = json.loads((target / name).read_text())
        edit(content)
        content = {
            key: value
            for key, value in content.items()
            if value is not None or name == "tokenizer.json"
        }
        (target / name).write_text(json.dumps(content))
    return str(target)


def add_far_above(content: dict) -> None:
    content["model"]["vocab"]["<extra>"] = 10_000
    extra = {"id": 10_000, "content": "<extra>", "special": False, "normalized": False}
    content["added_tokens"].append(
        extra | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    )


def test_ids_with_holes_work(tokenizers, texts, tmp_path, capsys):
    """An id without an entry counts as a special token, so that it is never drawn; `tokenizer` says how many."""
    folder = edited(tokenizers["bpe"], tmp_path / "holes", add_far_above)
    size = 10_001
    fields = tokenizer.manifest_fields(folder)
    unused = set(range(size)) - set(tokenizer.load(folder).get_vocab().values())
    assert (
        fields["vocab_size"] == size
        and len(unused) > 9000
        and unused < set(fields["all_special_ids"])
    )
    assert len(tokenizer.word_starts(folder, key="x")) == size
    manifest = write_shards(texts[:100], tmp_path / "shards", folder)
    assert load_manifest(manifest.folder).vocab_size == size
    assert not unused & set(np.unique(np.concatenate(shard_rows(manifest, "train"))).tolist())
    for path, is_said in ((folder, True), (tokenizers["bpe"], False)):
        workdir = Workdir(str(tmp_path / f"run {is_said}"))
        tokenizer_command.make_tokenizer(tiny_config(f"tokenizer.path={path}"), workdir)
        printed = capsys.readouterr().err
        assert (
            f"{path}: {len(unused):,} of its ids, such as {min(unused)}, have no entry" in printed
        ) == is_said


def no_processor(content: dict) -> None:
    content["post_processor"] = None


def no_end(content: dict) -> None:
    del content["post_processor"]["single"][-1]


def lowered_mask(content: dict) -> None:
    """A mask that the normalizer changes before it is looked for."""
    content["normalizer"] = {"type": "Lowercase"}
    (mask,) = (token for token in content["added_tokens"] if token["content"] == "<mask>")
    mask |= {"content": "<MASK>", "normalized": True}
    content["model"]["vocab"]["<MASK>"] = content["model"]["vocab"].pop("<mask>")
    content["added_tokens"].remove(mask)


def far_above(content: dict) -> None:
    content["model"]["vocab"]["zzz"] = 2**30


def no_unk_in_model(content: dict) -> None:
    """What is named as unk token is not what the model gives for a character that it doesn't know."""
    content["model"]["unk_id"] = None


FAULTS = {
    "no post-processor": ("bpe", no_processor, {}, ["<s>", "</s>", "post_processor"]),
    "no end": ("wordpiece", no_end, {}, ["</s>", "post_processor"]),
    "pad is eos": (
        "bpe",
        lambda _: None,
        {"pad_token": "</s>"},
        ["pad token", "sep token", "</s>"],
    ),
    "mask is unk": (
        "unigram",
        lambda _: None,
        {"mask_token": "<unk>"},
        ["mask token", "unk token", "<unk>"],
    ),
    "no unk": ("wordpiece", lambda _: None, {"unk_token": None}, ["no unk token", "unk_token"]),
    "no unk id": ("unigram", no_unk_in_model, {}, ["no unk token", "unk_id"]),
    "id of a billion": ("bpe", far_above, {}, ["1,073,741,824", "gaps"]),
    "a mask that is not found": (
        "bpe",
        lowered_mask,
        {"mask_token": "<MASK>"},
        ["<MASK>", "normalized=False"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tokenizer_that_cannot_feed_a_model_is_refused(tokenizers, tmp_path, fault):
    kind, change, settings, words = FAULTS[fault]
    folder = edited(tokenizers[kind], tmp_path / "tokenizer", change, **settings)
    with pytest.raises(InputError) as error:
        tokenizer.manifest_fields(folder)
    message = str(error.value)
    assert (
        message.startswith(f"{folder}: ")
        and "\n" not in message
        and all(word in message for word in words)
    )
    if "not found" not in fault:  # transformers adds the mask token itself
        with pytest.raises(InputError) as error:
            tokenizer.load(folder)
        assert str(error.value) == message


def test_pairs_need_a_template(tokenizers, tmp_path):
    def no_pair(content: dict) -> None:
        template = content["post_processor"]["pair"]
        content["post_processor"]["pair"] = [template[0], template[1], template[4]]  # <s> $A $B

    fast = tokenizer.load_fast(tokenizers["bpe"])
    tokenizer_checks.check_pairs(fast, sep_id=2, where="x")
    folder = edited(tokenizers["bpe"], tmp_path / "tokenizer", no_pair)
    tokenizer.load(folder)  # good for single texts
    with pytest.raises(InputError, match=rf"{folder}: .*pair.*</s>"):
        tokenizer_checks.check_pairs(tokenizer.load_fast(folder), sep_id=2, where=folder)


def test_a_byte_level_tokenizer_needs_no_unknown_token(tokenizers, texts, tmp_path):
    def remove_unk(content: dict) -> None:
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["content"] != "<unk>"
        ]
        del content["model"]["vocab"]["<unk>"]

    folder = edited(tokenizers["bpe"], tmp_path / "tokenizer", remove_unk, unk_token=None)
    assert tokenizer.load(folder).unk_token is None
    assert set(tokenizer.manifest_fields(folder)["special_ids"]) == {"cls", "pad", "sep", "mask"}
    manifest = write_shards(texts[:150], tmp_path / "shards", folder)
    assert load_manifest(manifest.folder) == manifest
    case = case_of(manifest, tmp_path / "run", f"tokenizer.path={folder}")
    for check in (checks.tokenizer, checks.ids):
        assert not [finding for finding in checks.run(check, case) if finding.level == "error"]


def test_a_truncation_that_was_saved_is_not_applied(tokenizers, tmp_path):
    fast = tokenizer.load_fast(tokenizers["bpe"])
    text = "Returns the array of all elements of it."
    ids = fast.encode(text).ids
    shutil.copytree(tokenizers["bpe"], tmp_path / "cut")
    fast.enable_truncation(5)
    fast.enable_padding(pad_id=1, pad_token="<pad>", length=9)
    fast.save(str(tmp_path / "cut" / "tokenizer.json"))
    assert len(ids) > 9 and tokenizer.load_fast(str(tmp_path / "cut")).encode(text).ids == ids
    assert tokenizer.load(str(tmp_path / "cut")).backend_tokenizer.encode(text).ids == ids


def dna(count: int) -> list[str]:
    rng = random.Random(1)
    return ["".join(rng.choices("ACGT", k=rng.randint(20, 400))) for _ in range(count)]


def test_unknown_tokens_are_said_with_their_share(texts, tmp_path, capsys):
    """By the sample, the shards and doctor: of DNA under WordPiece, not of prose."""
    folder = train_tokenizer(
        [*dna(200), *texts[:300]], tmp_path / "run" / "tokenizer", "wordpiece", vocab_size=400
    )
    fast = tokenizer.load_fast(folder)
    unk = tokenizer.manifest_fields(folder)["special_ids"]["unk"]
    for name, documents, is_unknown in (("dna", dna(400), True), ("prose", texts[:200], False)):
        share = tokenizer_checks.unknown_share(fast, documents, unk)
        assert (share > 0.01) == is_unknown
        tokenizer_command.warn_of_unknown_tokens(documents, Workdir(str(tmp_path / "run")))
        assert (f"{share:.0%} of the tokens are unknown" in capsys.readouterr().err) == is_unknown
        manifest = write_shards(documents, tmp_path / name, folder)
        ids = np.concatenate(shard_rows(manifest, "train"))
        split = manifest.splits["train"]
        assert 0 <= split.unknown_tokens - np.sum(ids == unk) <= split.dropped_tokens
        findings = checks.run(checks.ids, case_of(manifest, tmp_path / "run"))
        found = [finding for finding in findings if finding.check == "unknown"]
        expected = np.mean(ids == unk) / np.mean(
            (ids == unk) | ~np.isin(ids, manifest.all_special_ids)
        )
        assert bool(found) == is_unknown
        assert all(
            f"{expected:.0%} of" in finding.what and finding.level == "warning" for finding in found
        )


def test_text_without_spaces_is_said_to_take_minutes(texts, tmp_path, monkeypatch, capsys):
    """With what is faster, also where stderr is no terminal; and not of as much English."""
    rng = random.Random(2)
    monkeypatch.setattr(train_tokenizer_module, "CHARACTERS_PER_MINUTE", 1e3)
    train_tokenizer(texts[:100], tmp_path / "english", vocab_size=200)
    assert not capsys.readouterr().err
    syllables = [a + b for a in "กขคงจชซดตถทนบปผพมยรลวสห" for b in ("า", "ี", "ู", "ะ", "ัน", "ิง")]
    lines = ["".join(rng.choices(syllables[:40], k=90)) for _ in range(300)]
    fast = tokenizer.load_fast(train_tokenizer(lines, tmp_path / "thai", vocab_size=500))
    (line,) = capsys.readouterr().err.splitlines()
    assert all(
        words in line for words in (" min", "tokenizer.sample_megabytes", "tokenizer.kind=bpe")
    )
    assert len(fast.encode(lines[0]).ids) < 0.6 * len(lines[0]), "pieces of several characters"


TEXT = "Returns the <mask> of <url> and of all unobtainable measurements."


def test_the_dropout_of_a_bpe_is_off_and_said(tokenizers, tmp_path, capsys):
    folder = edited(
        tokenizers["bpe"], tmp_path / "copy", lambda content: content["model"].update(dropout=0.5)
    )
    for load in (
        tokenizer.load_fast,
        tokenizer.load_for_corpus,
        lambda path: tokenizer.load(path).backend_tokenizer,
    ):
        assert {tuple(load(folder).encode(TEXT).ids) for _ in range(9)} == {
            tuple(load(tokenizers["bpe"]).encode(TEXT).ids)
        }
    assert tokenizer.fingerprint(folder) == tokenizer.fingerprint(tokenizers["bpe"])
    assert capsys.readouterr().err.count("dropout of its BPE, 0.5, is off") == 1
    tokenizer.load(folder).save_pretrained(tmp_path / "saved")
    assert (
        json.loads((tmp_path / "saved" / "tokenizer.json").read_text())["model"]["dropout"] is None
    )


def test_a_tokenizer_that_reads_a_text_in_several_ways_is_refused(tokenizers):
    class Sampling:
        def encode(self, text: str):
            return types.SimpleNamespace(ids=[random.randrange(2**30)])

    tokenizer_checks.check_repeats(tokenizer.load_fast(tokenizers["unigram"]), "x")
    with pytest.raises(
        InputError, match="x: the tokenizer gives the same text other tokens each time"
    ):
        tokenizer_checks.check_repeats(Sampling(), "x")


def test_a_mask_token_is_one_whatever_the_last_user_of_the_tokenizer_had_set(
    tokenizers, tmp_path, capsys
):
    """split_special_tokens, which transformers saves and applies at each call."""
    folder = edited(
        tokenizers["unigram"], tmp_path / "copy", lambda _: None, split_special_tokens=True
    )
    assert (
        tokenizer.load(folder)(TEXT)["input_ids"]
        == tokenizer.load(tokenizers["unigram"])(TEXT)["input_ids"]
    )
    assert "split_special_tokens is off" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece"])
def test_special_tokens_of_a_corpus_are_the_same_tokens_everywhere(
    tokenizers, texts, tmp_path, kind
):
    """The roles' stay text: <url> is one token in the shards, in predict and in compare, <mask> in predict alone."""
    tok = tokenizer.load(tokenizers[kind])
    tok.add_special_tokens({"additional_special_tokens": ["<url>", "[user]"]})
    tok.save_pretrained(tmp_path / "tokenizer")
    folder = str(tmp_path / "tokenizer")
    url, user = tok.convert_tokens_to_ids(["<url>", "[user]"])
    text = f"{TEXT} [user]"
    read = tokenizer.load_for_corpus(folder).encode(text).ids
    assert read.count(url) == read.count(user) == 1 and tok.mask_token_id not in read
    assert tokenizer.reader_of(tokenizer.load(folder)).encode(text).ids == read
    called = tokenizer.load(folder)(text)["input_ids"]
    assert called.count(url) == called.count(user) == called.count(tok.mask_token_id) == 1
    manifest = write_shards(
        [f"[user]: {text} at <url>" for text in texts[:150]], tmp_path / "shards", folder
    )
    rows = np.concatenate(shard_rows(manifest, "train"))
    assert (
        np.sum(rows == url) == pytest.approx(np.sum(rows == user), abs=9)
        and np.sum(rows == url) > 50
    )
    assert {url, user} <= set(manifest.all_special_ids), "which no mask takes or draws"


def test_bytes_that_a_byte_level_tokenizer_leaves_out_are_counted(texts):
    """One that was trained without all bytes, and has no unk token in its model: prose is whole, Chinese is not."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400))
    assert fast.encode("文", add_special_tokens=False).ids == []
    for documents, left_out in ((texts[:50], 0), (["ab文" * 50], 0.6), (["文" * 50], 1), ([], 0)):
        assert tokenizer_checks.left_out_share(fast, documents) == pytest.approx(left_out, abs=1e-9)
