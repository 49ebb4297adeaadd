"""ModernBERT as transformers' Flax classes are, which transformers itself has in PyTorch only."""

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
            config, kwargs = cls.config_class.from_pretrained(name, return_unused_kwargs=True, **kwargs)
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
