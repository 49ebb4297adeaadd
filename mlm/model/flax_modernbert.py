"""ModernBERT as transformers' Flax classes are, which transformers itself has in PyTorch only."""

from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import safetensors.flax
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from transformers import FlaxPreTrainedModel, ModernBertConfig
from transformers.utils import SAFE_WEIGHTS_NAME, cached_file

from mlm.model import weights


class FlaxModernBertPreTrainedModel(FlaxPreTrainedModel):
    """A ModernBERT as transformers' Flax classes are."""

    config_class = ModernBertConfig
    base_model_prefix = "model"

    def __init__(
        self,
        config: ModernBertConfig,
        input_shape: tuple[int, int] = (1, 1),
        seed: int = 0,
        dtype: Any = jnp.float32,
        _do_init: bool = True,
        gradient_checkpointing: bool = False,
        **kwargs: Any,
    ):
        module = self.module_class(config=config, dtype=dtype, gradient_checkpointing=gradient_checkpointing, **kwargs)
        super().__init__(config, module, input_shape=input_shape, seed=seed, dtype=dtype, _do_init=_do_init)

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

    def init_weights(self, rng: Array, input_shape: tuple[int, int], params: dict | None = None) -> dict:
        """Returns drawn parameters, or `params` with those that it lacks."""
        return unflatten_dict(flatten_dict(self.module.init_params(rng)) | flatten_dict(unfreeze(params or {})))

    def __call__(
        self,
        input_ids: Array,
        attention_mask: Array | None = None,
        position_ids: Array | None = None,
        params: dict | None = None,
        dropout_rng: Array | None = None,
        train: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Returns transformers' output, given int32 arrays [B, L]; see `Model.__call__`."""
        config, input_ids = self.config, jnp.asarray(input_ids, jnp.int32)
        return self.module.apply(
            {"params": params or self.params},
            input_ids,
            jnp.ones_like(input_ids) if attention_mask is None else jnp.asarray(attention_mask, jnp.int32),
            position_ids=position_ids,
            deterministic=not train,
            output_hidden_states=config.output_hidden_states if output_hidden_states is None else output_hidden_states,
            return_dict=config.return_dict if return_dict is None else return_dict,
            rngs={} if dropout_rng is None else {"dropout": dropout_rng},
        )
