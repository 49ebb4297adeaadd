"""The export of models with tokenizers of every kind: proven by PyTorch; one that is another model's is refused."""

import dataclasses
import json
import shutil

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mlm.data import tokenizer
from mlm.errors import DamageError, InputError
from mlm.export import export
from mlm.paths import UPath
from tests.support.corpora import stdlib_docstrings
from tests.support.pytorch import run_torch
from tests.support.tokenizers import make_bert_tokenizer, random_model
from tests.support.trained_model import train_tokenizer

pytestmark = pytest.mark.standard


def make_tokenizer_with_pad_3(folder) -> str:
    """A byte-level BPE with other special tokens, at other ids, than ours."""
    special = ["[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]"]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens = [AddedToken(token, special=True, normalized=False, lstrip=token == "[MASK]") for token in special]
    tok.train_from_iterator(stdlib_docstrings(), trainers.BpeTrainer(vocab_size=700, special_tokens=tokens))
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    names = dict(zip(("cls_token", "sep_token", "unk_token", "pad_token", "mask_token"), special, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, model_input_names=["input_ids", "attention_mask"], **names)
    fast.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_every_tokenizer_is_proven(tmp_path):
    folders = []
    others = {"pad id 3": make_tokenizer_with_pad_3, "bert": make_bert_tokenizer}
    for kind in ("bpe", "wordpiece", *others):
        folder = tmp_path / kind
        model = random_model(others[kind](folder) if kind in others else train_tokenizer(folder, kind))
        if kind == "pad id 3":
            assert (model.config.pad_token_id, model.config.max_position_embeddings) == (3, 44)
        folders.append(tmp_path / f"export {kind}")
        export.export(model, UPath(folders[-1]), scores=None, name=kind)
    for line in run_torch(5, "tests/pytorch/verify.py", *folders).splitlines():
        result = json.loads(line)
        assert result["code"] == 0, result["printed"]


def test_the_tokenizer_gives_what_the_model_takes_alone(tmp_path, monkeypatch):
    """BERT's tokenizer beside a RoBERTa without a row for its second type: its export gives no token_type_ids."""
    model, texts = random_model(make_bert_tokenizer(tmp_path / "bert")), ("the name of the file", "the list")
    assert model.config.type_vocab_size == 1
    assert max(AutoTokenizer.from_pretrained(model.tokenizer)(*texts)["token_type_ids"]) == 1
    export.export(model, UPath(tmp_path / "export"), scores=None, name="x")
    encoded = AutoTokenizer.from_pretrained(str(tmp_path / "export"))(*texts)
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert encoded["input_ids"] == tokenizer.load(model.tokenizer)(*texts)["input_ids"]

    def copy_as_it_is(model, folder):
        shutil.copytree(model.tokenizer, folder, dirs_exist_ok=True)

    monkeypatch.setattr(export, "_write_tokenizer", copy_as_it_is)
    with pytest.raises(DamageError, match="token_type_ids"):
        export.export(model, UPath(tmp_path / "other"), scores=None, name="x")
    assert not (tmp_path / "other").exists()


def test_a_tokenizer_that_does_not_fit_is_refused(model, tmp_path):
    other = dataclasses.replace(model, tokenizer=train_tokenizer(tmp_path / "tokenizer", vocab_size=600))
    with pytest.raises(InputError, match=r"has 1000 vocabulary entries, its tokenizer .* has 600"):
        export.export(other, UPath(tmp_path / "new"), scores=None, name="x")
