"""Tokenizers made elsewhere."""

import jax
from ml_collections import ConfigDict
from transformers import BertTokenizerFast

from mlm.data import tokenizer
from mlm.data.tokenizer_checks import vocabulary_size
from mlm.model.families import ROBERTA
from mlm.pretrained import load
from tests.support.corpora import stdlib_docstrings


def make_bert_tokenizer(folder) -> str:
    """BERT's, which gives the second text of a pair other token_type_ids."""
    folder.mkdir()
    special = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
    words = sorted({word.lower() for text in stdlib_docstrings()[:200] for word in text.split() if word.isalpha()})
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,;:`()"]
    pieces = [*special, *letters, *(f"##{each}" for each in letters), *(word for word in words if len(word) > 1)]
    (folder / "vocab.txt").write_text("\n".join(list(dict.fromkeys(pieces))[:800]) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(str(folder))
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
    config = ROBERTA.make_config(ConfigDict(sizes), vocabulary_size(tok.backend_tokenizer), special_ids)
    params = jax.device_get(jax.jit(lambda key: ROBERTA.make_module(config).init_params(key))(jax.random.key(0)))
    return load.Pretrained(config, params, folder, None, {}, "random")
