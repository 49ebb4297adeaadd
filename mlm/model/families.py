"""The model families: transformers' classes, what they call their parts, and the keys of our config that describe them.

To add one, write its modules as in roberta.py, list it in FAMILIES, and give it priming, checks of its config.json
(mlm/pretrained/model_config.py) and a rule (mlm/config_rules.py).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict
from transformers import (
    CONFIG_MAPPING,
    BertConfig,
    CamembertConfig,
    FlaxPreTrainedModel,
    ModernBertConfig,
    PretrainedConfig,
    RobertaConfig,
    RobertaPreLayerNormConfig,
    XLMRobertaConfig,
)
from transformers.models.auto.modeling_flax_auto import FLAX_MODEL_FOR_MASKED_LM_MAPPING_NAMES

from mlm.data.manifest import DatasetInfo
from mlm.errors import InputError
from mlm.model import bert, modernbert, roberta, roberta_prelayernorm
from mlm.model.base import MASKED_LM
from mlm.model.flax_classes import FlaxModel, FlaxModernBertPreTrainedModel
from mlm.model.keys import make_key
from mlm.model.module import Compute, Model, Params
from mlm.model.partition_rules import REPLICATED
from mlm.model.reference import TransformersModel

VOCAB_MULTIPLE = 128  # of the rows of the embedding table, so that a mesh can split it
SMALL_VOCABULARY = 77  # of a model whose parameters are looked at: a size that no other axis has
Path = tuple[str, ...]  # of a parameter, or of a part of the tree
SIZES = ("hidden_size", "layers", "heads", "intermediate_size")  # which tell a small model from a large one
# Keys of the config's group `model` that decide what a model computes, and what transformers' configs call them.
NAMES = {
    "hidden_size": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "intermediate_size": ("intermediate_size", "hidden_dim"),
    "activation": ("hidden_act", "hidden_activation", "activation"),
    "layer_norm_eps": ("layer_norm_eps", "norm_eps"),
    "local_attention": ("local_attention",),
    "global_every": ("global_attn_every_n_layers",),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """The models of one architecture; what their parameters are called is read off a small one."""

    name: str  # in transformers' classes: NAMEForMaskedLM
    config_class: type[PretrainedConfig]
    module: type[Model] | None  # None if transformers' own class alone computes it

    @functools.cached_property
    def _small_config(self) -> PretrainedConfig:
        config = self.config_class(num_hidden_layers=1, vocab_size=SMALL_VOCABULARY)
        config.attention_type = "original_full"  # of BigBird
        return config

    @functools.cached_property
    def _shapes(self) -> dict[Path, tuple[int, ...]]:
        if self.module is None:
            model = TransformersModel(self._small_config, flax_name=self.name)
        else:
            model = self.module(self._small_config)
        leaves = flatten_dict(jax.eval_shape(lambda: model.init_params(make_key(0))))
        return {path: leaf.shape for path, leaf in leaves.items()}

    @property
    def architecture(self) -> dict[str, str]:
        """Those of NAMES that the family has, by our key."""
        names = {key: [name for name in known if hasattr(self._small_config, name)] for key, known in NAMES.items()}
        return {key: known[0] for key, known in names.items() if known}

    @property
    def body(self) -> str:
        """The part that all heads share."""
        return self.embedding[0]

    @property
    def lm_head(self) -> tuple[str, ...]:
        """The parts of the language-model head."""
        return tuple(dict.fromkeys(path[0] for path in self._shapes if path[0] != self.body))

    @property
    def stack(self) -> Path:
        """The part that holds the layers, "0", "1", ..."""
        return next(path[: path.index("0")] for path in self._shapes if "0" in path)

    @property
    def embedding(self) -> Path:
        """The word embedding [V, H], which is the decoder's kernel too."""
        return next(path for path, shape in self._shapes.items() if len(shape) == 2 and shape[0] == SMALL_VOCABULARY)

    @property
    def decoder_bias(self) -> Path:
        """The bias of the decoder [V]."""
        return next(path for path, shape in self._shapes.items() if shape == (SMALL_VOCABULARY,))

    def make_config(self, model: ConfigDict, vocab_size: int, special_ids: Mapping[str, int]) -> PretrainedConfig:
        """Returns transformers' config for the config group `model`, the vocabulary padded to a multiple."""
        config = self.config_class(
            architectures=[f"{self.name}For{MASKED_LM}"],
            vocab_size=-(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            initializer_range=model.init_stddev,
            max_position_embeddings=model.positions,
            pad_token_id=special_ids["pad"],
            bos_token_id=special_ids["cls"],
            eos_token_id=special_ids["sep"],
        )
        for key, name in self.architecture.items():
            setattr(config, name, model[key])
        if self is MODERNBERT:
            config.classifier_activation = model.activation
            config.global_rope_theta, config.local_rope_theta = model.global_rope_theta, model.local_rope_theta
            config.cls_token_id, config.sep_token_id = special_ids["cls"], special_ids["sep"]
        elif first := first_position(config):  # RoBERTa
            config.max_position_embeddings += first
            config.type_vocab_size = 1
        if hasattr(config, "attention_type"):  # BigBird's other one takes rows of whole blocks alone
            config.attention_type = "original_full"
        if hasattr(config, "embedding_size"):  # ELECTRA, ALBERT
            config.embedding_size = min(config.embedding_size or model.hidden_size, model.hidden_size)
        set_dropout(config, model)
        return config

    def flax_class(self, head: str) -> type[FlaxPreTrainedModel] | None:
        """Returns transformers' own Flax class with a head; None of a family that it has in PyTorch only."""
        return getattr(transformers, f"Flax{self.name}For{head}", None)

    def make_module(self, config: PretrainedConfig, head: str = MASKED_LM, dtype: str = "float32") -> Model:
        """Returns the model with a head."""
        if self.module is None:
            return self.transformers_model(config, dtype)
        module = self.module(config, dtype, head_name=head)
        module.check_config()
        return module

    def transformers_model(self, config: PretrainedConfig, dtype: str, *, remat: bool = False) -> TransformersModel:
        """Returns transformers' own masked language model."""
        return TransformersModel(
            config,
            dtype,
            gradient_checkpointing=remat,
            flax_name=self.name,
            first_position=first_position(config),
            rules=REPLICATED if self.module is None else self.module(config).partition_rules(),
        )

    def resize_vocabulary(self, params: Params, size: int) -> Params:
        """Returns the parameters with `size` rows in word embedding and decoder's bias: cut off, or zeros added."""
        flat = flatten_dict(params)
        for path in {self.embedding, self.decoder_bias} & flat.keys():
            value = np.asarray(flat[path])[:size]
            flat[path] = np.pad(value, [(0, size - len(value))] + [(0, 0)] * (value.ndim - 1))
        return unflatten_dict(flat)


ROBERTA = Family("Roberta", RobertaConfig, roberta.RobertaModule)
XLM_ROBERTA = Family("XLMRoberta", XLMRobertaConfig, roberta.RobertaModule)
CAMEMBERT = Family("Camembert", CamembertConfig, roberta.RobertaModule)
PRE_NORM = Family("RobertaPreLayerNorm", RobertaPreLayerNormConfig, roberta_prelayernorm.PreNormModule)
BERT = Family("Bert", BertConfig, bert.BertModule)
MODERNBERT = Family("ModernBert", ModernBertConfig, modernbert.ModernBertModule)
FAMILIES = {
    family.config_class.model_type: family for family in (ROBERTA, XLM_ROBERTA, CAMEMBERT, PRE_NORM, BERT, MODERNBERT)
}


@functools.cache
def find(model_type: str) -> Family:
    """Returns the family of a model_type of transformers, which may have it in Flax alone.

    Raises InputError if there is none, and for those of encoder and decoder.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if not is_known(model_type):
        names = ", ".join(sorted(filter(is_known, FAMILIES.keys() | FLAX_MODEL_FOR_MASKED_LM_MAPPING_NAMES)))
        raise InputError(f"transformers has no masked language model {model_type!r:.80} in Flax; name one of {names}.")
    class_name = FLAX_MODEL_FOR_MASKED_LM_MAPPING_NAMES[model_type]
    return Family(class_name[len("Flax") : -len("ForMaskedLM")], CONFIG_MAPPING[model_type], None)


@functools.cache
def model_class(name: str, head: str) -> type[FlaxPreTrainedModel] | None:
    """Returns transformers' class "Flax{name}For{head}" with our module in it; None of a family that is not ours."""
    for family in FAMILIES.values():
        if family.name == name:
            # From Python 3.14 on, a partial function is a method, and 3.13 warns of that.
            module_class = staticmethod(functools.partial(family.module, head_name=head))
            bases = {CAMEMBERT: ROBERTA.flax_class(head), MODERNBERT: FlaxModernBertPreTrainedModel}
            base = family.flax_class(head) or bases[family]
            names = {"module_class": module_class, "config_class": family.config_class, "__module__": "mlm.model"}
            return type(f"Flax{name}For{head}", (FlaxModel, base), names)
    return None


def is_known(model_type: str) -> bool:
    """Returns whether `find` returns the family of a model_type."""
    return model_type in FAMILIES or FLAX_MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type, "").endswith("ForMaskedLM")


def family_of(config: PretrainedConfig) -> Family:
    """Returns the family of a model."""
    return find(config.model_type)


def name_of(config: PretrainedConfig) -> str:
    """Returns the config.model.family of a model, which spells transformers' model_type with underscores."""
    return config.model_type.replace("-", "_")


def named(name: str) -> Family:
    """Returns the family of config.model.family; raises InputError as `find` does."""
    try:
        return find(name if is_known(name) else name.replace("_", "-"))
    except InputError as error:
        raise InputError(f"config.model.family = {name}: {error}") from None


def set_dropout(config: PretrainedConfig, model: ConfigDict) -> None:
    """Sets the dropout rates to those of the config's group `model`, of the classification head too."""
    if config.model_type == MODERNBERT.config_class.model_type:
        config.attention_dropout = model.attention_dropout
        config.embedding_dropout = config.mlp_dropout = config.classifier_dropout = model.hidden_dropout
    elif hasattr(config, "hidden_dropout_prob"):
        config.attention_probs_dropout_prob = model.attention_dropout
        config.hidden_dropout_prob = model.hidden_dropout
        config.classifier_dropout = None  # as in the layers
    else:  # DistilBERT
        config.attention_dropout, config.dropout = model.attention_dropout, model.hidden_dropout


def first_position(config: PretrainedConfig) -> int:
    """Returns the first entry of the position table that a token reads: RoBERTa counts from pad id + 1."""
    module = family_of(config).module
    return module(config).first_position if module else 0


def at_path(params: Params, path: Path) -> Any:
    """Returns a parameter, or a part of the tree."""
    return functools.reduce(lambda tree, name: tree[name], path, params)


def make_module(model: ConfigDict, info: DatasetInfo, *, module_class: type[Model] | None = None) -> Model:
    """Returns the language model of the config's group `model`, with the attention that runs on any device.

    `module_class` is a subclass of the family's own module, in its place.
    """
    if info.length > model.positions:
        key = f"config.model.positions = {model.positions}"
        raise InputError(f"{key}: the shards have rows of {info.length} tokens; raise it to at least that.")
    family = named(model.family)
    config = family.make_config(model, info.vocab_size, info.special_ids)
    if model.implementation == "transformers":
        if module_class:
            what = f"{module_class.__name__} would take the place of a module of mlm"
            raise InputError(f"config.model.implementation = transformers: {what}; set it to mlm.")
        if family.flax_class(MASKED_LM) is None:
            what = f"transformers has no Flax{family.name}ForMaskedLM"
            raise InputError(f"config.model.family = {model.family}: {what}; set model.implementation to mlm.")
        return family.transformers_model(config, model.dtype, remat=model.remat)
    module = (module_class or family.module)(config, model.dtype)
    return recomputed(module, model)


def recomputed(module: Model, model: ConfigDict) -> Model:
    """Returns a module that recomputes what the config's group `model` says."""
    compute = Compute(recomputed_feed_forwards=0 if model.remat else model.remat_feed_forward)
    return module.clone(compute=compute, gradient_checkpointing=model.remat)
