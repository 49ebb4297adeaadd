"""ModernBERT as transformers' Flax classes are, which transformers itself has in PyTorch only."""

import copy
from typing import Any

from transformers import ModernBertConfig, PretrainedConfig
from transformers.models.bert.modeling_flax_bert import FlaxBertPreTrainedModel


class FlaxModernBertPreTrainedModel(FlaxBertPreTrainedModel):
    """A ModernBERT, made and called as transformers' Flax BERT is; it does not read token types."""

    config_class = ModernBertConfig
    base_model_prefix = "model"

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(as_transformers_4(config), *args, **kwargs)


def as_transformers_4(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a config, perhaps from a file of transformers 5, with a ModernBERT's layers and bases as 4 has them.

    Raises ValueError for those that it can't say.
    """
    if getattr(config, "rope_scaling", None):
        raise ValueError("rope_scaling, which is not supported")
    config = copy.copy(config)
    if hasattr(config, "rope_parameters"):
        rope, types = config.rope_parameters, config.layer_types
        del config.rope_parameters, config.layer_types
        for kind, name in (("full_attention", "global"), ("sliding_attention", "local")):
            if rope[kind].get("rope_type", "default") != "default":
                raise ValueError(f"rope_type {rope[kind]['rope_type']}, only default")
            setattr(config, f"{name}_rope_theta", rope[kind]["rope_theta"])
        every = next((i for i, kind in enumerate(types) if i and kind == "full_attention"), len(types))
        in_config = config.global_attn_every_n_layers  # may be more than there are layers
        if type(in_config) is int and in_config > len(types) == every:
            every = in_config
        if types != ["sliding_attention" if i % every else "full_attention" for i in range(len(types))]:
            raise ValueError("layer_types are not one global layer in every so many")
        config.global_attn_every_n_layers = every
    if getattr(config, "local_rope_theta", 0) is None:
        config.local_rope_theta = config.global_rope_theta
    return config
