"""The export of models with tokenizers of every kind: proven by PyTorch; one that is another model's is refused."""

import dataclasses
import json

import jax
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.export import export
from mlm.model.roberta import Roberta
from mlm.paths import UPath
from mlm.pretrained import load
from tests.torch_environments import run_torch
from tests.trained_model import docstrings, train_tokenizer


def make_tokenizer_with_pad_3(folder) -> str:
    """A byte-level BPE with other special tokens, at other ids, than ours."""
    special = ["[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]"]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens = [AddedToken(token, special=True, normalized=False, lstrip=token == "[MASK]") for token in special]
    tok.train_from_iterator(docstrings(), trainers.BpeTrainer(vocab_size=700, special_tokens=tokens))
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    names = dict(zip(("cls_token", "sep_token", "unk_token", "pad_token", "mask_token"), special, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, model_input_names=["input_ids", "attention_mask"], **names)
    fast.save_pretrained(folder)
    return str(folder)


def random_model(folder: str, positions: int = 40) -> load.Pretrained:
    tok = tokenizer.load(folder)
    sizes = {
        "hidden_size": 32,
        "layers": 2,
        "heads": 2,
        "intermediate_size": 64,
        "positions": positions,
        "activation": "gelu",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "layer_norm_eps": 1e-5,
        "init_stddev": 0.3,
        "vocab_multiple": 1,
    }
    special_ids = {role: getattr(tok, f"{role}_token_id") for role in ("pad", "cls", "sep")}
    config = Roberta.make_config(sizes, len(tok), special_ids)
    params = jax.device_get(jax.jit(lambda key: Roberta.init_params(config, key))(jax.random.key(0)))
    return load.Pretrained(config, params, folder, None, {}, "random")


@pytest.mark.slow
def test_every_tokenizer_is_proven(tmp_path):
    folders = []
    for kind in ("bpe", "wordpiece", "pad id 3"):
        folder = tmp_path / kind
        other = kind == "pad id 3"
        model = random_model(make_tokenizer_with_pad_3(folder) if other else train_tokenizer(folder, kind))
        if other:
            assert (model.config.pad_token_id, model.config.max_position_embeddings) == (3, 44)
        folders.append(tmp_path / f"export {kind}")
        export.export(model, UPath(folders[-1]), scores=None, name=kind)
    for line in run_torch(5, "tests/torch_verify.py", *folders).splitlines():
        result = json.loads(line)
        assert result["code"] == 0, result["printed"]


def test_a_tokenizer_that_does_not_fit_is_refused(model, tmp_path):
    other = dataclasses.replace(model, tokenizer=train_tokenizer(tmp_path / "tokenizer", vocab_size=600))
    with pytest.raises(InputError, match=r"has 1000 vocabulary entries, its tokenizer .* has 600"):
        export.export(other, UPath(tmp_path / "new"), scores=None, name="x")
