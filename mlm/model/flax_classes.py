"""What our classes change in transformers' Flax classes, which they are made of; and a ModernBERT like those."""

import functools
import logging
from pathlib import Path
from typing import Any, Self

import flax.serialization
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
from mlm.model.modernbert import as_transformers_4
from mlm.paths import UPath, inside

# Arguments of from_pretrained that say where a file is, and all that are neither values of the config nor arguments of
# the class.
LOCATING = (
    "cache_dir",
    "force_download",
    "proxies",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
)
LOADING = (*LOCATING, "resume_download", "use_auth_token", "trust_remote_code", "adapter_kwargs")
LOADING += ("_commit_hash", "_from_auto", "_from_pipeline")
# a class may have another one
HEADS = {"lm_head", "cls", "head", "decoder", "classifier", "qa_outputs"}
OPTIONAL = {"pooler", "seq_relationship"}
logger = logging.getLogger(__name__)


class FlaxModel:
    """Stands before a class of transformers among the bases of one of ours."""

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        head_mask=None,
        *args,
        **kwargs,
    ):
        """Calls the model as transformers' classes, which hand their modules a mask of heads even without one."""
        if head_mask is not None:
            raise ValueError(
                "head_mask: attention kernels don't read it; use transformers' own class."
            )
        return super().__call__(
            input_ids, attention_mask, token_type_ids, position_ids, None, *args, **kwargs
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        dtype: Any = jnp.float32,
        *model_args: Any,
        config: PretrainedConfig | str | Path | None = None,
        ignore_mismatched_sizes: bool = False,
        strict: bool = True,
        from_pt: bool = False,
        _do_init: bool = True,
        **kwargs: Any,
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Returns the model of a folder or a repository on the Hub, from Flax's weights or PyTorch's safetensors.

        transformers' own classes read Flax's weights, and what else they can; of safetensors, they know neither a
        ModernBERT's nor several files. A head that the weights lack is drawn, and another head is left out. Weights of
        another architecture are refused; with `strict=False`, what they lack is drawn, and what the class does not have
        is left out. `kwargs` are transformers' own.
        """
        name = pretrained_model_name_or_path
        unused = {key: value for key, value in kwargs.items() if key not in LOADING}
        if not isinstance(config, PretrainedConfig):
            source = name if config is None else config
            config, unused = cls.config_class.from_pretrained(
                source, return_unused_kwargs=True, **kwargs
            )
            config = as_transformers_4(config)
            config.update({key: value for key, value in kwargs.items() if hasattr(config, key)})
        tree: dict[tuple[str, ...], Any] = {}
        files = _files(name, FLAX_WEIGHTS_NAME, FLAX_WEIGHTS_INDEX_NAME, kwargs)
        if files and not from_pt:
            for file in files:
                content = flax.serialization.msgpack_restore(Path(file).read_bytes())
                tree |= flatten_dict(content)
        elif files := _files(name, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, kwargs):
            tensors: dict[str, Any] = {}
            for file in files:
                tensors |= safetensors.flax.load_file(file)
            tree = flatten_dict(weights.from_torch(tensors))
        elif issubclass(cls, FlaxModernBertPreTrainedModel):
            kinds = f"neither {FLAX_WEIGHTS_NAME} nor {SAFE_WEIGHTS_NAME}"
            raise OSError(
                f"{name}: has {kinds}; load it in PyTorch and save it with save_pretrained."
            )
        else:
            kwargs = unused | {key: kwargs[key] for key in LOADING if key in kwargs}
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
        model = cls(config, *model_args, dtype=dtype, _do_init=_do_init, **unused)
        params = _fitting(tree, model.params_shape_tree, files[0], strict, ignore_mismatched_sizes)
        if not _do_init:  # as transformers has it: on the host, and completed by init_weights
            model._missing_keys = model.required_params - params.keys()
            host = jax.local_devices(backend="cpu")[0]
            return model, jax.device_put(unflatten_dict(params), host)
        arrays = jax.tree.map(jnp.asarray, params)
        model.params = unflatten_dict(flatten_dict(model.params) | arrays)
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
            raise ValueError(
                "push_to_hub: save_pretrained uploads no safetensors; call push_to_hub of the model."
            )
        kwargs["safe_serialization"] = safe_serialization
        super().save_pretrained(save_directory, params, push_to_hub, *args, **kwargs)
        file = Path(save_directory) / SAFE_WEIGHTS_NAME
        # not where max_shard_size asks for several files, which are Flax's
        if safe_serialization and file.is_file():
            tensors = weights.to_torch(jax.device_get(self.params if params is None else params))
            safetensors.numpy.save_file(tensors, str(file), metadata={"format": "pt"})


def _files(name: str | Path, whole: str, index: str, kwargs: dict[str, Any]) -> list[str]:
    """Returns the files of a model's weights on this machine: `whole`, or those that `index` lists; [] if it has none.

    As transformers does: an index may be left over from an earlier save.
    """
    find = functools.partial(
        cached_file, name, **{key: kwargs[key] for key in LOCATING if key in kwargs}
    )
    if file := find(whole, _raise_exceptions_for_missing_entries=False):
        return [file]
    index = find(index, _raise_exceptions_for_missing_entries=False)
    parts = set(logs.read_object(UPath(index))["weight_map"].values()) if index else ()
    for part in parts:
        inside(UPath(str(name)), part)  # raises
    return [find(part) for part in sorted(parts)]


def _fitting(
    loaded: dict[tuple[str, ...], Any],
    shapes: Any,
    file: str,
    strict: bool,
    ignore_mismatched_sizes: bool,
) -> dict[tuple[str, ...], Any]:
    """Returns the parameters of a file that the class has, too, whose `shapes` are given.

    Raises ValueError for one of another shape, unless that is to be ignored, and with `strict` where the body or the
    language-model head has other parameters. BERT's pooler and its head for next sentences may be there or not.
    """
    # XLM-RoBERTa's is no base_model_prefix
    body = next(name for name, part in shapes.items() if "embeddings" in part)
    expected = flatten_dict(shapes)
    if all(path[0] != body for path in loaded):
        loaded = {(body, *path): value for path, value in loaded.items()}
    missing = expected.keys() - loaded.keys()
    unused = loaded.keys() - expected.keys()
    shared = {path[0] for path in loaded} & {path[0] for path in expected} - {"classifier"}
    other_heads = HEADS - shared  # drawn, or left out
    wrong = {
        path for path in missing | unused if path[0] not in other_heads and not OPTIONAL & {*path}
    }
    if strict and wrong:
        raise ValueError(
            f"{file}: is of another architecture: it lacks {_names(missing & wrong)}, and this class has no place for "
            f"{_names(unused & wrong)}; pass strict=False to draw what it lacks, and to leave out the rest."
        )
    for path, drawn in expected.items():
        if path in loaded and loaded[path].shape != drawn.shape:
            if not ignore_mismatched_sizes:
                what = f"{'/'.join(path)} is {loaded[path].shape} where the config asks for {drawn.shape}"
                raise ValueError(
                    f"{file}: {what}; pass ignore_mismatched_sizes=True to draw it instead."
                )
            missing.add(path)
    if missing:
        message = "%s: has no %s of these shapes; they are drawn, and to be trained."
        logger.warning(message, file, _names(missing))
    if unused:
        logger.warning("%s: %s are not used.", file, _names(unused))
    return {path: loaded[path] for path in expected if path not in missing}


def _names(paths: set[tuple[str, ...]]) -> str:
    return ", ".join(sorted("/".join(path) for path in paths)) or "nothing"


class FlaxModernBertPreTrainedModel(FlaxBertPreTrainedModel):
    """A ModernBERT, made and called as transformers' Flax BERT is; it does not read token types."""

    config_class = ModernBertConfig
    base_model_prefix = "model"

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(as_transformers_4(config), *args, **kwargs)
