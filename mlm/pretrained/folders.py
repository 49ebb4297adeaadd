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

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SIZES += ("max_position_embeddings", "type_vocab_size", "pad_token_id")
LEAST = {"max_position_embeddings": 2, "pad_token_id": 0}  # of a size; 1 for the others
RATES = ("layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


def read_config(folder: UPath, where: str) -> RobertaConfig:
    """Returns the config of a folder, from config.json alone; every value that the model is built from is checked.

    Args:
      folder: on this machine.
      where: what to call it in an error.

    Raises:
      InputError: config.json can't be read, or is not that of a RoBERTa.
    """
    try:
        content = logs.read_object(folder / "config.json")
    except DamageError:
        raise InputError(f"{where}: its config.json can't be read (not a JSON object); take a good copy.") from None
    architecture = content.get("model_type")
    if architecture != "roberta":
        name = printable(str(architecture))[:80]
        raise InputError(f"{where}: is a {name}, by its config.json; a RoBERTa is needed.")
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
            least = LEAST.get(key, 1)
            good, allowed = type(value) is int and least <= value < 2**31, f"a whole number from {least} up"
        elif key in RATES:
            good, allowed = type(value) in (int, float) and 0 <= value < 1, "a number from 0 up, and below 1"
        else:
            good, allowed = isinstance(value, str) and value in ACT2FN, "an activation that transformers knows"
        if not good:
            raise InputError(f"{where}: its config.json has {key} = {value!r:.80}; it must be {allowed}.")
    if config.hidden_size % config.num_attention_heads or config.pad_token_id >= config.vocab_size:
        raise InputError(f"{where}: the heads or the padding id of its config.json don't fit it; take a good copy.")


def read_weights(folder: UPath, where: str) -> Params:
    """Returns all parameters of a folder, float32, by Flax's names; a model without a head has shorter ones on disk.

    Raises:
      InputError: there are neither safetensors, in one file or several, nor flax_model.msgpack, or they can't be read.
    """
    if not any((folder / file).is_file() for file in (INDEX, SAFETENSORS, MSGPACK)):
        text = f"has neither {SAFETENSORS} nor {MSGPACK}; load it in PyTorch and save it with save_pretrained."
        raise InputError(f"{where}: {text}")
    try:
        flat = flatten_dict(_read(folder))
        params = unflatten_dict({path: np.asarray(value, np.float32) for path, value in flat.items()})
        if not all(isinstance(part, str) for path in flat for part in path):
            raise ValueError("a parameter has a name that is not text")
    except Exception as error:  # whatever the libraries raise at a file that is not what its name says
        raise InputError(f"{where}: its weights can't be read ({printable(str(error))[:300]}).") from None
    return params if "roberta" in params else {"roberta": params}


def _read(folder: UPath) -> Params:
    files = [folder / SAFETENSORS]
    if (folder / INDEX).is_file():
        names = sorted(set(logs.read_object(folder / INDEX)["weight_map"].values()))
        files = [inside(folder, file, links=True) for file in names]
    elif not files[0].is_file():
        return flax.serialization.msgpack_restore((folder / MSGPACK).read_bytes())
    parts = [safetensors.flax.load_file(str(file)) for file in files]  # numpy's loader knows no bfloat16
    tensors = {key: value for part in parts for key, value in part.items()}
    if "lm_head.decoder.bias" in tensors:  # tied to the other
        tensors.setdefault("lm_head.bias", tensors["lm_head.decoder.bias"])
    return weights.from_torch(tensors)
