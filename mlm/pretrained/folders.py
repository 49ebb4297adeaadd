"""The config and the weights of a RoBERTa folder, as transformers writes them. A folder may be hostile."""

from __future__ import annotations

from typing import Any

import flax.serialization
import numpy as np
import safetensors.flax
from flax.traverse_util import flatten_dict, unflatten_dict
from transformers import RobertaConfig
from transformers.modeling_flax_utils import ACT2FN

from mlm import logs
from mlm.errors import DamageError, InputError
from mlm.model import weights
from mlm.model.roberta import Params
from mlm.paths import UPath, inside
from mlm.pretrained.locate import INDEX, MSGPACK, SAFETENSORS
from mlm.text import printable

UNREADABLE = (  # what libraries raise at a file of parameters that is not one
    safetensors.SafetensorError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    RecursionError,
)
SIZES = {  # of config.json, and the least that each can be
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 2,
    "type_vocab_size": 1,
    "pad_token_id": 0,
}
RATES = ("layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


def read_config(folder: UPath, where: str) -> RobertaConfig:
    """Returns the config of a folder: of config.json alone, every value that the model is built from checked.

    Args:
      folder: on this machine.
      where: what to call it in an error.

    Raises:
      InputError: config.json can't be read, or is not that of a RoBERTa.
    """
    try:
        content = logs.read_object(folder / "config.json")
    except DamageError:
        raise InputError(f"{where}: its config.json can't be read (it is no JSON object); take a good copy.") from None
    kind = content.get("model_type")
    if kind != "roberta":
        raise InputError(f"{where}: is a {printable(str(kind))[:80]}, by its config.json; a RoBERTa is needed.")
    try:
        config = RobertaConfig.from_dict(content)
    except Exception as error:  # whatever transformers raises at values of another type
        reason = printable(f"{type(error).__name__}: {error}")[:200]
        raise InputError(f"{where}: its config.json can't be read ({reason}); take a good copy.") from None
    _check_values(config, where)
    return config


def _check_values(config: RobertaConfig, where: str) -> None:
    for key in (*SIZES, *RATES, "hidden_act"):
        value: Any = getattr(config, key)
        if key in SIZES:
            good, allowed = type(value) is int and SIZES[key] <= value < 2**31, f"a whole number from {SIZES[key]} up"
        elif key in RATES:
            good, allowed = type(value) in (int, float) and 0 <= value < 1, "a number from 0 up, and below 1"
        else:
            good, allowed = isinstance(value, str) and value in ACT2FN, "an activation that transformers knows"
        if not good:
            raise InputError(f"{where}: its config.json has {key} = {value!r:.80}; it must be {allowed}.")
    if config.hidden_size % config.num_attention_heads or config.pad_token_id >= config.vocab_size:
        raise InputError(f"{where}: the heads or the padding id of its config.json don't fit it; take a good copy.")


def read_weights(folder: UPath, where: str) -> Params:
    """Returns all parameters of a folder, float32, by Flax's names.

    They are those of safetensors in one file or several, or of flax_model.msgpack; of a model without a head too, whose
    names are shorter.

    Raises:
      InputError: there are none, or they can't be read.
    """
    try:
        if (folder / INDEX).is_file():
            names = sorted(set(logs.read_object(folder / INDEX)["weight_map"].values()))
            files = [inside(folder, file, links=True) for file in names]
        else:
            files = [folder / SAFETENSORS] if (folder / SAFETENSORS).is_file() else []
        if files:
            parts = [safetensors.flax.load_file(str(file)) for file in files]  # numpy's loader knows no bfloat16
            tensors = {key: value for part in parts for key, value in part.items()}
            if "lm_head.decoder.bias" in tensors:  # tied to the other
                tensors.setdefault("lm_head.bias", tensors["lm_head.decoder.bias"])
            params = weights.from_torch(tensors)
        elif (folder / MSGPACK).is_file():
            params = flax.serialization.msgpack_restore((folder / MSGPACK).read_bytes())
        else:
            raise InputError(
                f"{where}: has neither {SAFETENSORS} nor {MSGPACK}; load it in PyTorch and save it with "
                "save_pretrained."
            )
        params = {path: np.asarray(value, np.float32) for path, value in flatten_dict(params).items()}
        if not all(isinstance(part, str) for path in params for part in path):
            raise ValueError("a parameter whose name is no text")
        params = unflatten_dict(params)
    except UNREADABLE as error:
        raise InputError(f"{where}: its weights can't be read ({printable(str(error))[:300]}).") from None
    return params if "roberta" in params else {"roberta": params}
