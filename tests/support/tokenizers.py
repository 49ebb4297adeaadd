"""Tokenizers made elsewhere."""

import jax
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from mlm.data import tokenizer
from mlm.data.tokenizer_checks import vocabulary_size
from mlm.model import families
from mlm.pretrained import load
from tests.support.corpora import real_texts
from tests.support.tiny import tiny_config
from tests.support.trained_model import random_params, special_ids_of


def make_bert_tokenizer(folder) -> str:
    """BERT's, which gives the second text of a pair other token_type_ids."""
    folder.mkdir()
    special = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
    words = {word.lower() for text in real_texts()[:200] for word in text.split()}
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,;:`()"]
    parts = [f"##{letter}" for letter in letters]
    whole = sorted(word for word in words if word.isalpha() and len(word) > 1)
    pieces = [*special, *letters, *parts, *whole]
    (folder / "vocab.txt").write_text("\n".join(list(dict.fromkeys(pieces))[:800]) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(str(folder))
    return str(folder)


def make_tokenizer_with_pad_3(folder) -> str:
    """A byte-level BPE with other special tokens, at other ids, than ours."""
    special = ["[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]"]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tokens = [
        AddedToken(token, special=True, normalized=False, lstrip=token == "[MASK]")
        for token in special
    ]
    tok.train_from_iterator(
        real_texts(), trainers.BpeTrainer(vocab_size=700, special_tokens=tokens)
    )
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        model_input_names=["input_ids", "attention_mask"],
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        pad_token="[PAD]",
        mask_token="[MASK]",
    )
    fast.save_pretrained(folder)
    return str(folder)


def random_model(folder: str, *overrides: str) -> load.Pretrained:
    """A model of the sizes of `trained_model`'s for a tokenizer."""
    sizes = ("model.positions=32", "model.layers=2", "model.hidden_size=64")
    settings = tiny_config(*sizes, *overrides).model
    tok = tokenizer.load(folder)
    family = families.find(settings.family)
    size = vocabulary_size(tok.backend_tokenizer)
    config = family.make_config(settings, size, special_ids_of(tok))
    config.vocab_size = size
    shapes = jax.eval_shape(family.make_module(config).init_params, jax.random.key(0))
    return load.Pretrained(config, random_params(shapes), folder, None, {}, "random")
