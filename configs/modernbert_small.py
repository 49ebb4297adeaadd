"""A small ModernBERT in minutes, on two CPU cores or a GPU: the quickstart's text, tokenizer and rows."""

from ml_collections import ConfigDict

from configs.quickstart import get_config as quickstart


def get_config() -> ConfigDict:
    """Returns the config."""
    config = quickstart()
    config.model.family = "modernbert"
    config.model.layers = 3
    config.model.intermediate_size = 192
    config.model.local_attention = 32
    config.model.init = "stock"
    return config
