"""ModernBERT as transformers' Flax classes are, which transformers itself has in PyTorch only."""

from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import safetensors.flax
from flax.traverse_util import flatten_dict, unflatten_dict
from transformers import ModernBertConfig
from transformers.models.bert.modeling_flax_bert import FlaxBertPreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME, cached_file

from mlm.model import weights


class FlaxModernBertPreTrainedModel(FlaxBertPreTrainedModel):
    """A ModernBERT, made and called as transformers' Flax BERT is; it does not read token types."""

    config_class = ModernBertConfig
    base_model_prefix = "model"

    @classmethod
    def from_pretrained(cls, name: str, *, dtype: Any = jnp.float32, **kwargs: Any) -> Self:
        """Returns the model of a folder or a repository on the Hub, from PyTorch's safetensors or Flax's weights.

        Parameters that it lacks are drawn, as a new head is; those that the class does not have are ignored.
        """
        file = cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
        if file is None:
            return super().from_pretrained(name, dtype=dtype, **kwargs)
        config = kwargs.pop("config", None) or cls.config_class.from_pretrained(name)
        model, read = cls(config, dtype=dtype, **kwargs), weights.from_torch(safetensors.flax.load_file(Path(file)))
        body = cls.base_model_prefix
        drawn, loaded = flatten_dict(model.params), flatten_dict(read if body in read else {body: read})
        if missing := sorted("/".join(path) for path in drawn if path[0] == body and path not in loaded):
            raise ValueError(f"{file}: has no {missing[0]}; name a folder with the weights of a ModernBERT.")
        model.params = unflatten_dict({path: loaded.get(path, value) for path, value in drawn.items()})
        return model
