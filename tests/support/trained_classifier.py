"""A small classifier with a tokenizer, of random values large enough that its logits depend on the text."""

import pathlib

import jax

from mlm import config as configs
from mlm.data import tokenizer
from mlm.model import classifier, families
from mlm.pretrained.load import Pretrained
from tests.support import labelled_texts
from tests.support.tokenizers import make_bert_tokenizer
from tests.support.trained_model import random_params, special_ids_of, train_tokenizer


def make(
    folder: pathlib.Path,
    *,
    labels: tuple[str, ...] = labelled_texts.LABELS,
    pair: bool = False,
    of_tokens: bool = False,
    family: str = "roberta",
    is_bert: bool = False,
) -> Pretrained:
    """`is_bert`: with BERT's tokenizer, which gives token_type_ids."""
    made = (
        make_bert_tokenizer(folder / "tokenizer")
        if is_bert
        else train_tokenizer(folder / "tokenizer", vocab_size=600)
    )
    tok = tokenizer.load(made)
    columns = "('first', 'second')" if pair else "('text',)"
    sizes = ("model.positions=32", "model.layers=2", "model.hidden_size=64")
    overrides = (*labelled_texts.SETTINGS, *sizes, f"classify.text={columns}")
    config = configs.load("configs/base.py", [*overrides, f"model.family={family}"])
    body = families.find(family).make_config(config.model, len(tok), special_ids_of(tok))
    body.vocab_size = len(tok)  # as an export has it, without padding
    if family == "bert":
        classifier.set_pairs(body, tok)
    model_config = classifier.make_config(body, labels, of_tokens=of_tokens)
    params = random_params(
        jax.eval_shape(classifier.make_module(model_config).init_params, jax.random.key(0))
    )
    meta = {"config": config, "class": {}}
    return Pretrained(model_config, params, str(folder / "tokenizer"), 5, meta, str(folder))
