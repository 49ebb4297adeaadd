"""The config.json of a model, checked, and what it is in the keys of our config."""

from typing import Any

from transformers import PretrainedConfig

from mlm import logs
from mlm.config_rules import ABOVE_ZERO, FROM_ZERO, Rule, whole
from mlm.config_rules import MODERNBERT as MODERNBERT_KEYS
from mlm.errors import InputError
from mlm.model import layers
from mlm.model.families import FAMILIES, MODERNBERT, family_of, find, first_position, name_of
from mlm.model.modernbert import as_transformers_4
from mlm.paths import UPath
from mlm.text import printable

ACTIVATION: Rule = (
    lambda v: isinstance(v, str) and v in layers.ACTIVATIONS,
    f"one of {', '.join(layers.ACTIVATIONS)}",
)
FALSE: Rule = (lambda v: v is False, "false")
POSITIVE = whole(1, 2**31)
SHARED: dict[str, Rule] = {  # of config.json
    "vocab_size": POSITIVE,
    "hidden_size": POSITIVE,
    "num_hidden_layers": POSITIVE,
    "num_attention_heads": POSITIVE,
    "intermediate_size": POSITIVE,
    "max_position_embeddings": whole(2, 2**31),
    "pad_token_id": whole(0, 2**31),
}
ROBERTA_RULES: dict[str, Rule] = {
    "type_vocab_size": POSITIVE,
    "layer_norm_eps": FROM_ZERO,
    "is_decoder": FALSE,
    "position_embedding_type": (lambda v: v == "absolute", "absolute"),
    "hidden_act": ACTIVATION,
}
MODERNBERT_RULES: dict[str, Rule] = {
    "norm_eps": FROM_ZERO,
    "global_rope_theta": ABOVE_ZERO,
    "local_rope_theta": ABOVE_ZERO,
    "global_attn_every_n_layers": POSITIVE,
    "local_attention": (lambda v: type(v) is int and v > 1 and v % 2 == 0, "an even number"),
    "norm_bias": FALSE,
    "attention_bias": FALSE,
    "mlp_bias": FALSE,
    "classifier_bias": FALSE,
    "decoder_bias": (lambda v: v is True, "true"),
    "hidden_activation": ACTIVATION,
    "classifier_activation": ACTIVATION,
}


def config_of(content: dict[str, Any]) -> PretrainedConfig:
    """Returns transformers' config from the JSON of a checkpoint or a folder, which transformers 5 may have written."""
    return as_transformers_4(find(content["model_type"]).config_class.from_dict(content))


def read_config(folder: UPath, where: str) -> PretrainedConfig:
    """Returns the config of a local folder, from config.json alone; errors call the folder `where`."""
    try:
        content = logs.read_object(folder / "config.json")
        name = printable(str(content.get("model_type")))[:80]
        config = config_of(content) if name in FAMILIES else None
    except Exception as error:  # whatever transformers raises at values of another type
        reason = printable(f"{type(error).__name__}: {error}")[:200]
        raise InputError(
            f"{where}: its config.json can't be read ({reason}); use another copy or model."
        ) from None
    if config is None:
        kinds = " or ".join(FAMILIES)
        raise InputError(f"{where}: its config.json has model_type = {name}; it must be {kinds}.")
    is_modernbert = family_of(config) is MODERNBERT
    rules = SHARED | (MODERNBERT_RULES if is_modernbert else ROBERTA_RULES)
    for key, (check, allowed) in rules.items():
        value = getattr(config, key)
        if not check(value):
            raise InputError(
                f"{where}: its config.json has {key} = {value!r:.80}; it must be {allowed}."
            )
    size, rest = divmod(config.hidden_size, config.num_attention_heads)
    if rest or (is_modernbert and size % 2) or config.pad_token_id >= config.vocab_size:
        raise InputError(
            f"{where}: its config.json has attention heads that don't divide hidden_size or are of an odd size, or a "
            "pad_token_id outside the vocabulary; use another copy or model."
        )
    return config


def keys_of(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the keys of the config's group `model` that describe a model: {"model.layers": 12, ...}."""
    keys = {
        f"model.{key}": type(value)(getattr(config, key, value))
        for key, value in MODERNBERT_KEYS.items()
    }
    keys |= {
        f"model.{key}": getattr(config, name)
        for key, name in family_of(config).architecture.items()
    }
    return keys | {"model.family": name_of(config), "model.positions": longest_row(config)}


def longest_row(config: PretrainedConfig) -> int:
    """Returns how many tokens a model reads, special ones included."""
    return config.max_position_embeddings - first_position(config)
