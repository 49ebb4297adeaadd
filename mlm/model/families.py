"""The model families, by transformers' model_type and by config.model.family, which spells it with underscores."""

from transformers import PretrainedConfig

from mlm.model.modernbert import ModernBert
from mlm.model.network import Network
from mlm.model.roberta import Roberta, RobertaPreLayerNorm

FAMILIES: dict[str, type[Network]] = {
    each.config_class.model_type: each for each in (Roberta, RobertaPreLayerNorm, ModernBert)
}


def family_of(config: PretrainedConfig) -> type[Network]:
    """Returns the family of a model."""
    return FAMILIES[config.model_type]


def name_of(config: PretrainedConfig) -> str:
    """Returns the config.model.family of a model."""
    return config.model_type.replace("-", "_")


def named(name: str) -> type[Network]:
    """Returns the family of config.model.family."""
    return FAMILIES[name.replace("_", "-")]
