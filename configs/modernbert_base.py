"""ModernBERT-base from scratch, first stage."""

from ml_collections import ConfigDict

from configs.roberta_base import get_config as roberta_base


def get_config() -> ConfigDict:
    """Returns the config."""
    config = roberta_base()
    config.tokenizer.vocab_size = 50_368
    config.shards.length = 1024
    config.data.global_batch = 4608
    config.masking.rate = 0.3
    config.model.family = "modernbert"
    config.model.layers = 22
    config.model.intermediate_size = 1152
    config.model.positions = 8192
    config.model.global_rope_theta = 10_000.0
    config.model.hidden_dropout = 0.0
    config.model.attention_dropout = 0.0
    config.model.remat_feed_forward = 0
    config.optimizer.learning_rate = 8e-4
    config.optimizer.weight_decay = 1e-5
    config.schedule.name = "wsd"
    config.train.accumulate = 1
    return config
