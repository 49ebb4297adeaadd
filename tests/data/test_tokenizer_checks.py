"""Tokenizers made elsewhere: what they do is tried when they are loaded, and works, is refused, or is said."""

import json
import pathlib
import random
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mlm.commands import tokenizer as tokenizer_command
from mlm.data import tokenizer, tokenizer_checks
from mlm.data.manifest import load_manifest
from mlm.doctor import checks
from mlm.errors import InputError
from mlm.workdir import Workdir
from tests.support.corpora import shard_rows, train_tokenizer, write_shards
from tests.support.doctored import case_of
from tests.support.tiny import tiny_config


def same(content: dict) -> None:
    """Changes nothing."""


def edited(folder: str, target: pathlib.Path, change: Callable, **settings) -> str:
    """A copy whose tokenizer.json is changed; `settings` of tokenizer_config.json."""
    shutil.copytree(folder, target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((target / name).read_text())
        if name == "tokenizer.json":
            change(content)
        else:
            content |= settings
        (target / name).write_text(json.dumps(content))
    return str(target)


def add_far_above(content: dict) -> None:
    content["model"]["vocab"]["<extra>"] = 10_000


def test_ids_with_holes_work(tokenizers, texts, tmp_path, capsys):
    """An id without an entry counts as a special token, so that it is never drawn; `tokenizer` says how many."""
    folder = edited(tokenizers["bpe"], tmp_path / "holes", add_far_above)
    fields = tokenizer.manifest_fields(folder)
    unused = set(range(10_001)) - set(tokenizer.load(folder).get_vocab().values())
    assert fields["vocab_size"] == 10_001
    assert len(unused) > 9000 and unused < set(fields["all_special_ids"])
    assert len(tokenizer.word_starts(folder, key="x")) == 10_001
    manifest = write_shards(texts[:100], tmp_path / "shards", folder)
    assert load_manifest(manifest.folder).vocab_size == 10_001
    workdir = Workdir(str(tmp_path / "run"))
    tokenizer_command.make_tokenizer(tiny_config(f"tokenizer.path={folder}"), workdir)
    words = f"{folder}: {len(unused):,} of its ids, such as {min(unused)}, have no entry"
    assert words in capsys.readouterr().err


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


def ascii_alone(content: dict) -> None:
    """A normalizer that removes all other characters."""
    pattern = {"Regex": r"[^\x00-\x7f]"}
    content["normalizer"] = {"type": "Replace", "pattern": pattern, "content": ""}


def bytes_as_fallback(content: dict) -> None:
    """An entry for each byte, and no unk token."""
    content["pre_tokenizer"] = content["decoder"] = None
    content["model"] |= {"byte_fallback": True, "unk_token": None}
    content["model"]["vocab"] |= {f"<0x{byte:02X}>": 20_000 + byte for byte in range(256)}


def fewer_bytes(content: dict) -> None:
    bytes_as_fallback(content)
    del content["model"]["vocab"]["<0xF0>"]


FAULTS = {
    "no post-processor": ("bpe", no_processor, {}, ["<s>", "</s>", "post_processor"]),
    "no end": ("wordpiece", no_end, {}, ["</s>", "post_processor"]),
    "pad is eos": ("bpe", same, {"pad_token": "</s>"}, ["pad token", "sep token", "</s>"]),
    "no unk": ("wordpiece", same, {"unk_token": None}, ["no unk token", "unk_token"]),
    "no unk id": ("unigram", no_unk_in_model, {}, ["no unk token", "unk_id"]),
    "a byte is missing": ("bpe", fewer_bytes, {"unk_token": None}, ["no unk token"]),
    "id of a billion": ("bpe", far_above, {}, ["1,073,741,824", "gaps"]),
    "mask not found": ("bpe", lowered_mask, {"mask_token": "<MASK>"}, ["<MASK>", "normalized"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tokenizer_that_cannot_feed_a_model_is_refused(tokenizers, tmp_path, fault):
    kind, change, settings, words = FAULTS[fault]
    folder = edited(tokenizers[kind], tmp_path / "tokenizer", change, **settings)
    # transformers adds the mask token itself
    reads = [tokenizer.load] if fault != "mask not found" else []
    for read in (tokenizer.manifest_fields, *reads):
        with pytest.raises(InputError) as error:
            read(folder)
        assert all(word in str(error.value) for word in [folder, *words])


@pytest.mark.parametrize(
    ("kind", "change"), [("wordpiece", ascii_alone), ("bpe", bytes_as_fallback)]
)
def test_characters_that_are_removed_or_read_as_bytes_need_no_entry(
    tokenizers, tmp_path, kind, change
):
    unk_token = "<unk>" if kind == "wordpiece" else None
    folder = edited(tokenizers[kind], tmp_path / "tokenizer", change, unk_token=unk_token)
    tokenizer.manifest_fields(folder)


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


def test_unknown_tokens_are_said_with_their_share(texts, tmp_path, capsys):
    """By the sample and by the shards, for doctor: of DNA under WordPiece, not of prose."""
    rng = random.Random(1)
    dna = ["".join(rng.choices("ACGT", k=rng.randint(20, 400))) for _ in range(300)]
    run = tmp_path / "run"
    sample = [*dna, *texts[:300]]
    folder = train_tokenizer(sample, run / "tokenizer", "wordpiece", vocab_size=400)
    for name, documents, is_unknown in (("dna", dna, True), ("prose", texts[:200], False)):
        tokenizer_command.warn_of_unknown_tokens(documents, Workdir(str(run)))
        assert ("% of the tokens are unknown" in capsys.readouterr().err) == is_unknown
        manifest = write_shards(documents, tmp_path / name, folder)
        ids = np.concatenate(shard_rows(manifest, "train"))
        split = manifest.splits["train"]
        unknown = np.sum(ids == manifest.special_ids["unk"])
        assert 0 <= split.unknown_tokens - unknown <= split.dropped_tokens
        findings = checks.run(checks.ids, case_of(manifest, run))
        assert [finding.check for finding in findings].count("unknown") == is_unknown


TEXT = "Returns the <mask> of <url> and of all unobtainable measurements."


def drop_out(content: dict) -> None:
    content["model"]["dropout"] = 0.5


def cut_and_pad(content: dict) -> None:
    """As a tokenizer has them after a call."""
    fast = Tokenizer.from_str(json.dumps(content))
    fast.enable_truncation(5)
    fast.enable_padding(length=99)
    content |= json.loads(fast.to_str())


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (drop_out, {}, "dropout of its BPE, 0.5, is off"),
        (cut_and_pad, {}, ""),
        (same, {"split_special_tokens": True}, ""),
    ],
)
def test_what_the_last_user_of_a_tokenizer_had_set_is_off(
    tokenizers, tmp_path, capsys, change, settings, said
):
    original = tokenizers["bpe"]
    folder = edited(original, tmp_path / "copy", change, **settings)
    for load in (tokenizer.load_fast, tokenizer.load_for_corpus):
        found = {tuple(load(folder).encode(TEXT).ids) for _ in range(9)}
        assert found == {tuple(load(original).encode(TEXT).ids)}
    loaded = tokenizer.load(folder)
    assert loaded.mask_token_id in loaded(TEXT)["input_ids"]
    assert loaded(TEXT)["input_ids"] == tokenizer.load(original)(TEXT)["input_ids"]
    assert tokenizer.fingerprint(folder) == tokenizer.fingerprint(original)
    assert capsys.readouterr().err.count(said) == 1 or not said
    loaded.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    assert saved["model"]["dropout"] is None


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
    documents = [f"[user]: {text} at <url>" for text in texts[:150]]
    manifest = write_shards(documents, tmp_path / "shards", folder)
    rows = np.concatenate(shard_rows(manifest, "train"))
    assert np.sum(rows == url) == pytest.approx(np.sum(rows == user), abs=9) and url in rows
    assert {url, user} <= set(manifest.all_special_ids), "which no mask takes or draws"


def test_bytes_that_a_byte_level_tokenizer_leaves_out_are_counted(texts):
    """One that was trained without all bytes, and has no unk token in its model: prose is whole, Chinese is not."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400))
    for documents, left_out in ((texts[:50], 0), (["ab文" * 50], 0.6), (["文" * 50], 1)):
        assert tokenizer_checks.left_out_share(fast, documents) == pytest.approx(left_out, abs=1e-9)


def test_a_tokenizer_that_reads_a_text_in_several_ways_is_refused(tokenizers):
    fast = tokenizer.load_fast(tokenizers["bpe"])
    fast.model.dropout = 0.5
    with pytest.raises(InputError, match=r"x: .* gives the same text other tokens each time"):
        tokenizer_checks.special_ids(fast, tokenizer_checks.ROLES, "x")
