"""ModernBERT as transformers' Flax classes are, which transformers itself has in PyTorch only."""

import copy
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import safetensors.flax
from flax.traverse_util import flatten_dict, unflatten_dict
from transformers import ModernBertConfig, PretrainedConfig
from transformers.models.bert.modeling_flax_bert import FlaxBertPreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME, cached_file

from mlm.model import weights


class FlaxModernBertPreTrainedModel(FlaxBertPreTrainedModel):
    """A ModernBERT, made and called as transformers' Flax BERT is; it does not read token types."""

    config_class = ModernBertConfig
    base_model_prefix = "model"

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(as_transformers_4(config), *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        dtype: Any = jnp.float32,
        *,
        config: PretrainedConfig | None = None,
        _do_init: bool = True,
        ignore_mismatched_sizes: bool = False,
        **kwargs: Any,
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Returns the model of a folder or a repository on the Hub, from PyTorch's safetensors or Flax's weights.

        Parameters that it lacks are drawn, as a new head is; those that the class does not have are ignored. `kwargs`
        are transformers' own: where the files are (`revision` and so on), and values of the config.
        """
        name = pretrained_model_name_or_path
        file = cached_file(
            name,
            SAFE_WEIGHTS_NAME,
            cache_dir=kwargs.get("cache_dir"),
            token=kwargs.get("token"),
            revision=kwargs.get("revision"),
            subfolder=kwargs.get("subfolder", ""),
            local_files_only=kwargs.get("local_files_only", False),
            _raise_exceptions_for_missing_entries=False,
        )
        if file is None:
            kwargs |= {"_do_init": _do_init, "ignore_mismatched_sizes": ignore_mismatched_sizes}
            return super().from_pretrained(name, dtype, config=config, **kwargs)
        if config is None:
            all_kwargs = kwargs
            config, kwargs = cls.config_class.from_pretrained(name, return_unused_kwargs=True, **all_kwargs)
            config = as_transformers_4(config)
            config.update({key: value for key, value in all_kwargs.items() if hasattr(config, key)})
        model = cls(config, seed=kwargs.get("seed", 0), dtype=dtype, _do_init=_do_init)
        read, body = weights.from_torch(safetensors.flax.load_file(Path(file))), cls.base_model_prefix
        loaded = flatten_dict(read if body in read else {body: read})
        params = flatten_dict(model.params) if _do_init else {}
        for path, drawn in flatten_dict(model.params_shape_tree).items():
            parameter, value = "/".join(path), loaded.get(path)
            if value is None and path[0] == body:
                raise ValueError(f"{file}: has no {parameter}; name a folder with the weights of a ModernBERT.")
            if value is not None and value.shape == drawn.shape:
                params[path] = value
            elif value is not None and not ignore_mismatched_sizes:
                raise ValueError(f"{file}: {parameter} is {value.shape} where the config asks for {drawn.shape}.")
        if not _do_init:
            return model, unflatten_dict(params)
        model.params = unflatten_dict(params)
        return model


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
