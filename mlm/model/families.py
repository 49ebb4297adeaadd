"""The model families: transformers' classes, what they call their parts, and the keys of our config that describe them.

To add one, write its modules as in roberta.py, list it in FAMILIES, and give it priming, checks of its config.json
(mlm/pretrained/model_config.py) and a rule (mlm/config_rules.py).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict
from transformers import (
    BertConfig,
    CamembertConfig,
    ModernBertConfig,
    PretrainedConfig,
    RobertaConfig,
    RobertaPreLayerNormConfig,
    XLMRobertaConfig,
)

from mlm.data.manifest import DatasetInfo
from mlm.errors import InputError
from mlm.model import bert, modernbert, roberta, roberta_prelayernorm
from mlm.model.module import MASKED_LM, Compute, Model, Params
from mlm.model.reference import TransformersModel

VOCAB_MULTIPLE = 128  # of the rows of the embedding table, so that a mesh can split it
Path = tuple[str, ...]  # of a parameter, or of a part of the tree
# which tell a small model from a large one
SIZES = ("hidden_size", "layers", "heads", "intermediate_size")
# Keys of the config's group `model` that decide what a model computes, and what transformers' configs call them.
BERT_KEYS = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "activation": "hidden_act",
    "layer_norm_eps": "layer_norm_eps",
}
MODERNBERT_KEYS = BERT_KEYS | {
    "activation": "hidden_activation",
    "layer_norm_eps": "norm_eps",
    "local_attention": "local_attention",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """The models of one architecture, and where its parameters are."""

    name: str  # in transformers' classes: NAMEForMaskedLM
    config_class: type[PretrainedConfig]
    module: type[Model]
    body: str  # the part that all heads share
    lm_head: tuple[str, ...] = ("lm_head",)  # the parts of the language-model head
    decoder_bias: Path = ("lm_head", "bias")  # [V]
    layers: Path = ("encoder", "layer")  # within the body
    words: str = "word_embeddings"  # within the embeddings
    # by our key
    architecture: Mapping[str, str] = dataclasses.field(default_factory=lambda: BERT_KEYS)

    @property
    def stack(self) -> Path:
        """The part that holds the layers, "0", "1", ..."""
        return (self.body, *self.layers)

    @property
    def embedding(self) -> Path:
        """The word embedding [V, H], which is the decoder's kernel too."""
        return (self.body, "embeddings", self.words, "embedding")

    def make_config(
        self, model: ConfigDict, vocab_size: int, special_ids: Mapping[str, int]
    ) -> PretrainedConfig:
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
            config.global_rope_theta = model.global_rope_theta
            config.local_rope_theta = model.local_rope_theta
            config.cls_token_id = special_ids["cls"]
            config.sep_token_id = special_ids["sep"]
        elif first := first_position(config):  # RoBERTa
            config.max_position_embeddings += first
            config.type_vocab_size = 1
        set_dropout(config, model)
        return config

    def flax_class(self, head: str) -> type | None:
        """Returns transformers' own Flax class with a head; None of a family that it has in PyTorch only."""
        return getattr(transformers, f"Flax{self.name}For{head}", None)

    def make_module(
        self, config: PretrainedConfig, head: str = MASKED_LM, dtype: str = "float32"
    ) -> Model:
        """Returns the model with a head."""
        module = self.module(config, dtype, head_name=head)
        module.check_config()
        return module

    def transformers_model(
        self, config: PretrainedConfig, dtype: str, *, remat: bool = False
    ) -> TransformersModel:
        """Returns transformers' own masked language model."""
        flax_class = self.flax_class(MASKED_LM).module_class
        ours = self.module(config)
        return TransformersModel(config, dtype, remat, flax_class=flax_class, ours=ours)

    def resize_vocabulary(self, params: Params, size: int) -> Params:
        """Returns the parameters with `size` rows in word embedding and decoder's bias: cut off, or zeros added."""
        flat = flatten_dict(params)
        for path in {self.embedding, self.decoder_bias} & flat.keys():
            value = np.asarray(flat[path])[:size]
            flat[path] = np.pad(value, [(0, size - len(value))] + [(0, 0)] * (value.ndim - 1))
        return unflatten_dict(flat)


ROBERTA = Family("Roberta", RobertaConfig, roberta.RobertaModule, "roberta")
XLM_ROBERTA = Family("XLMRoberta", XLMRobertaConfig, roberta.RobertaModule, "roberta")
CAMEMBERT = Family("Camembert", CamembertConfig, roberta.RobertaModule, "roberta")
PRE_NORM = Family(
    "RobertaPreLayerNorm",
    RobertaPreLayerNormConfig,
    roberta_prelayernorm.PreNormModule,
    "roberta_prelayernorm",
)
BERT = Family(
    "Bert",
    BertConfig,
    bert.BertModule,
    "bert",
    lm_head=("cls",),
    decoder_bias=("cls", "predictions", "bias"),
)
MODERNBERT = Family(
    "ModernBert",
    ModernBertConfig,
    modernbert.ModernBertModule,
    "model",
    lm_head=("head", "decoder"),
    decoder_bias=("decoder", "bias"),
    layers=("layers",),
    words="tok_embeddings",
    architecture=MODERNBERT_KEYS,
)
FAMILIES = {
    family.config_class.model_type: family
    for family in (ROBERTA, XLM_ROBERTA, CAMEMBERT, PRE_NORM, BERT, MODERNBERT)
}


def find(name: str) -> Family:
    """Returns the family of a model_type of transformers, or of config.model.family, which has underscores in it.

    Raises InputError if there is none.
    """
    if family := FAMILIES.get(name.replace("_", "-")):
        return family
    raise InputError(
        f"{name!r:.80} is no family of models here; name one of {', '.join(FAMILIES)}."
    )


@functools.cache
def model_class(name: str, head: str) -> type | None:
    """Returns transformers' class "Flax{name}For{head}" with our module in it; None of a family that is not ours."""
    family = next((family for family in FAMILIES.values() if family.name == name), None)
    if family is None:
        return None
    # takes half a second
    from mlm.model.flax_classes import FlaxModel, FlaxModernBertPreTrainedModel

    bases = {CAMEMBERT: ROBERTA.flax_class(head), MODERNBERT: FlaxModernBertPreTrainedModel}
    base = family.flax_class(head) or bases[family]
    names = {
        # From Python 3.14 on, a partial function is a method, and 3.13 warns of that.
        "module_class": staticmethod(functools.partial(family.module, head_name=head)),
        "config_class": family.config_class,
        "__module__": "mlm.model",
    }
    return type(f"Flax{name}For{head}", (FlaxModel, base), names)


def family_of(config: PretrainedConfig) -> Family:
    """Returns the family of a model."""
    return find(config.model_type)


def name_of(config: PretrainedConfig) -> str:
    """Returns the config.model.family of a model, which spells transformers' model_type with underscores."""
    return config.model_type.replace("-", "_")


def set_dropout(config: PretrainedConfig, model: ConfigDict) -> None:
    """Sets the dropout rates to those of the config's group `model`, of the classification head too."""
    if family_of(config) is MODERNBERT:
        config.attention_dropout = model.attention_dropout
        config.embedding_dropout = config.mlp_dropout = config.classifier_dropout = (
            model.hidden_dropout
        )
    else:
        config.attention_probs_dropout_prob = model.attention_dropout
        config.hidden_dropout_prob = model.hidden_dropout
        config.classifier_dropout = None  # as in the layers


def first_position(config: PretrainedConfig) -> int:
    """Returns the first entry of the position table that a token reads: RoBERTa counts from pad id + 1."""
    return family_of(config).module(config).first_position


def at_path(params: Params, path: Path) -> Any:
    """Returns a parameter, or a part of the tree."""
    return functools.reduce(lambda tree, name: tree[name], path, params)


def make_module(
    model: ConfigDict, info: DatasetInfo, *, module_class: type[Model] | None = None
) -> Model:
    """Returns the language model of the config's group `model`, with the attention that runs on any device.

    `module_class` is a subclass of the family's own module, in its place.
    """
    if info.length > model.positions:
        raise InputError(
            f"config.model.positions = {model.positions}: the shards have rows of {info.length} tokens; "
            "raise it to at least that."
        )
    family = find(model.family)
    config = family.make_config(model, info.vocab_size, info.special_ids)
    if model.implementation == "transformers":
        if module_class:
            what = f"{module_class.__name__} would take the place of a module of mlm"
            raise InputError(f"config.model.implementation = transformers: {what}; set it to mlm.")
        return family.transformers_model(config, model.dtype, remat=model.remat)
    module = (module_class or family.module)(config, model.dtype)
    return recomputed(module, model)


def recomputed(module: Model, model: ConfigDict) -> Model:
    """Returns a module that recomputes what the config's group `model` says."""
    compute = Compute(recomputed_feed_forwards=0 if model.remat else model.remat_feed_forward)
    return module.clone(compute=compute, gradient_checkpointing=model.remat)
