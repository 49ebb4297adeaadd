"""What our classes change in transformers' Flax classes, which they are made of; and a ModernBERT like those."""

import copy
import logging
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import safetensors.flax
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from transformers import ModernBertConfig, PretrainedConfig
from transformers.modeling_flax_utils import FLAX_WEIGHTS_INDEX_NAME, FLAX_WEIGHTS_NAME
from transformers.models.bert.modeling_flax_bert import FlaxBertPreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from mlm import logs
from mlm.model import weights
from mlm.paths import UPath, inside

# Arguments of from_pretrained that say where a file is, and all that are neither values of the config nor arguments of
# the class.
LOCATING = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
LOADING = (*LOCATING, "resume_download", "use_auth_token", "trust_remote_code", "adapter_kwargs")
LOADING += ("_commit_hash", "_from_auto", "_from_pipeline")
logger = logging.getLogger(__name__)


class FlaxModel:
    """Stands before a class of transformers among the bases of one of ours."""

    def __call__(
        self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None, head_mask=None, *args, **kwargs
    ):
        """Calls the model as transformers' classes, which hand their modules a mask of heads even without one."""
        if head_mask is not None:
            raise ValueError("head_mask: attention kernels don't read it; use transformers' own class.")
        return super().__call__(input_ids, attention_mask, token_type_ids, position_ids, None, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        dtype: Any = jnp.float32,
        *model_args: Any,
        config: PretrainedConfig | str | Path | None = None,
        ignore_mismatched_sizes: bool = False,
        from_pt: bool = False,
        _do_init: bool = True,
        **kwargs: Any,
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Returns the model of a folder or a repository on the Hub, from Flax's weights or PyTorch's safetensors.

        transformers' own classes read Flax's weights, and what else they can; of safetensors, they know neither a
        ModernBERT's nor several files. Parameters that safetensors lack are drawn, as a new head is; those that the
        class does not have are ignored. `kwargs` are transformers' own.
        """
        name = pretrained_model_name_or_path
        unused = {key: value for key, value in kwargs.items() if key not in LOADING}
        if not isinstance(config, PretrainedConfig):
            source = name if config is None else config
            config, unused = cls.config_class.from_pretrained(source, return_unused_kwargs=True, **kwargs)
            config = as_transformers_4(config)
            config.update({key: value for key, value in kwargs.items() if hasattr(config, key)})
        has_flax = any(_find(name, file, kwargs) for file in (FLAX_WEIGHTS_NAME, FLAX_WEIGHTS_INDEX_NAME))
        files = [] if has_flax else _safetensors(name, kwargs)
        if not files and not has_flax and issubclass(cls, FlaxModernBertPreTrainedModel):
            kinds = f"neither {FLAX_WEIGHTS_NAME} nor {SAFE_WEIGHTS_NAME}"
            raise OSError(f"{name}: has {kinds}; load it in PyTorch and save it with save_pretrained.")
        if not files:
            kwargs = {key: kwargs[key] for key in LOADING if key in kwargs} | unused
            return super().from_pretrained(
                name,
                dtype,
                *model_args,
                config=config,
                ignore_mismatched_sizes=ignore_mismatched_sizes,
                from_pt=from_pt,
                _do_init=_do_init,
                **kwargs,
            )
        kwargs = unused
        model = cls(config, *model_args, dtype=dtype, _do_init=_do_init, **kwargs)
        params = _read(files, model.params_shape_tree, ignore_mismatched_sizes)
        if missing := model.required_params - params.keys():
            names = ", ".join(sorted("/".join(path) for path in missing))
            logger.warning("%s: has no %s of these shapes; they are drawn, and to be trained.", name, names)
        if not _do_init:  # as transformers has it: on the host, and completed by init_weights
            model._missing_keys = missing
            return model, jax.device_put(unflatten_dict(params), jax.local_devices(backend="cpu")[0])
        model.params = unflatten_dict(flatten_dict(model.params) | {path: jnp.asarray(params[path]) for path in params})
        return model

    def save_pretrained(
        self,
        save_directory: str | Path,
        params: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        *args: Any,
        safe_serialization: bool = False,
        **kwargs: Any,
    ) -> None:
        """Saves the model as transformers' Flax classes do, but safetensors under PyTorch's names.

        Under Flax's, as those write them, transformers 5 takes none for a parameter and draws the whole model.
        """
        if push_to_hub and safe_serialization:
            raise ValueError("push_to_hub: save_pretrained uploads no safetensors; call push_to_hub of the model.")
        kwargs["safe_serialization"] = safe_serialization
        super().save_pretrained(save_directory, params, push_to_hub, *args, **kwargs)
        file = Path(save_directory) / SAFE_WEIGHTS_NAME
        if safe_serialization and file.is_file():  # not where max_shard_size asks for several files, which are Flax's
            tensors = weights.to_torch(jax.device_get(self.params if params is None else params))
            safetensors.numpy.save_file(tensors, str(file), metadata={"format": "pt"})


def _find(name: str | Path, file: str, kwargs: dict[str, Any], *, must_exist: bool = False) -> str | None:
    """Returns where a file of a model is on this machine, None if the model has no such file."""
    locating = {key: kwargs[key] for key in LOCATING if key in kwargs}
    return cached_file(name, file, _raise_exceptions_for_missing_entries=must_exist, **locating)


def _safetensors(name: str | Path, kwargs: dict[str, Any]) -> list[str]:
    """Returns the files of a model's safetensors, [] if it has none."""
    if whole := _find(name, SAFE_WEIGHTS_NAME, kwargs):
        return [whole]
    index = _find(name, SAFE_WEIGHTS_INDEX_NAME, kwargs)
    parts = set(logs.read_object(UPath(index))["weight_map"].values()) if index else ()
    for part in parts:
        inside(UPath(str(name)), part)  # raises
    return [_find(name, part, kwargs, must_exist=True) for part in sorted(parts)]


def _read(files: list[str], shapes: Any, ignore_mismatched_sizes: bool) -> dict[tuple[str, ...], Any]:
    """Returns the parameters of safetensors that are in the tree `shapes`.

    Raises ValueError for one of another shape, unless it is to be ignored, and if the body lacks one: but for BERT's
    pooler, which language models don't have.
    """
    tensors = {key: value for file in files for key, value in safetensors.flax.load_file(file).items()}
    tree = weights.from_torch(weights.with_one_bias(tensors))
    body = next(name for name, part in shapes.items() if "embeddings" in part)  # XLM-RoBERTa's is no base_model_prefix
    loaded, params = flatten_dict(tree if body in tree else {body: tree}), {}
    for path, drawn in flatten_dict(shapes).items():
        value, where = loaded.get(path), f"{files[0]}: {'/'.join(path)}"
        if value is None and path[0] == body and "pooler" not in path:
            raise ValueError(f"{where} is missing; name a folder with the weights of such a model.")
        if value is not None and value.shape == drawn.shape:
            params[path] = value
        elif value is not None and not ignore_mismatched_sizes:
            how = "pass ignore_mismatched_sizes=True to draw it instead"
            raise ValueError(f"{where} is {value.shape} where the config asks for {drawn.shape}; {how}.")
    return params


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
