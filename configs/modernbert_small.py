"""A small ModernBERT on the quickstart's text, tokenizer, rows and masks, in minutes.

Command:  python -m mlm run --config=configs/modernbert_small.py --workdir=runs/modernbert_small
Hardware: two CPU cores, or one GPU.
Expect:   measured on two cores: evaluation loss 3.595 nats; 3.918 for the quickstart after as many steps. Without
          priming (model.init=stock) 3.879.

The first of three layers sees the whole row, the others 16 tokens to each side.
"""

from ml_collections import ConfigDict

from configs.quickstart import get_config as quickstart


def get_config() -> ConfigDict:
    """Returns the config."""
    config = quickstart()
    config.model.family = "modernbert"
    config.model.layers = 3
    config.model.intermediate_size = 192
    config.model.local_attention = 32
    return config
