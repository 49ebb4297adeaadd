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
from mlm.model import bert, modernbert, roberta
from mlm.model.module import MASKED_LM, Compute, Model, Params
from mlm.model.partition_rules import REPLICATED
from mlm.model.reference import TransformersModel

DEFAULT = Compute()
SMALL_VOCABULARY = 77  # of a model whose parameters are looked at: a size that no other axis has
Path = tuple[str, ...]  # of a parameter, or of a part of the tree
# Keys of the config's group `model` that decide parameters in all families, and what transformers calls them.
SIZES = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """The models of one architecture."""

    name: str  # in transformers' classes: NAMEForMaskedLM
    config_class: type[PretrainedConfig]
    module: type[Model] | None  # None if transformers' own class alone computes it
    body: str  # what all heads share
    lm_head: Path  # the parts of the language-model head
    stack: Path  # holds the layers, "0", "1", ...
    embedding: Path  # [V, H], the decoder's kernel too
    decoder_bias: Path  # [V]
    architecture: Mapping[str, str]  # SIZES, and further keys that decide what a model computes
    counts_from_pad: bool = False  # whether positions start at the padding id + 1, as in RoBERTa

    def make_config(self, model: ConfigDict, vocab_size: int, special_ids: Mapping[str, int]) -> PretrainedConfig:
        """Returns transformers' config for the config group `model`, the vocabulary padded to a multiple."""
        config = self.config_class(
            architectures=[f"{self.name}For{MASKED_LM}"],
            vocab_size=-(-vocab_size // model.vocab_multiple) * model.vocab_multiple,
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
        elif self.counts_from_pad:
            config.max_position_embeddings += special_ids["pad"] + 1
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

    def make_module(
        self, config: PretrainedConfig, head: str = MASKED_LM, dtype: str = "float32", compute: Compute = DEFAULT
    ) -> Model | TransformersModel:
        """Returns the model with a head."""
        if self.module is None:
            return self.transformers_model(config, dtype, recompute_layers=compute.recompute_layers)
        return self.module(config, dtype, head_name=head, compute=compute)

    def transformers_model(self, config: PretrainedConfig, dtype: str, *, recompute_layers: bool) -> TransformersModel:
        """Returns transformers' own masked language model."""
        rules = REPLICATED if self.module is None else self.module(config).partition_rules()
        return TransformersModel(self.name, config, dtype, first_position(config), rules, recompute_layers)

    def resize_vocabulary(self, params: Params, size: int) -> Params:
        """Returns the parameters with `size` rows in word embedding and decoder's bias: cut off, or zeros added."""
        flat = flatten_dict(params)
        for path in {self.embedding, self.decoder_bias} & flat.keys():
            value = np.asarray(flat[path])[:size]
            flat[path] = np.pad(value, [(0, size - len(value))] + [(0, 0)] * (value.ndim - 1))
        return unflatten_dict(flat)


ROBERTA_KEYS = SIZES | {"activation": "hidden_act", "layer_norm_eps": "layer_norm_eps"}
ROBERTA = Family(
    name="Roberta",
    config_class=RobertaConfig,
    module=roberta.RobertaModule,
    body="roberta",
    lm_head=("lm_head",),
    stack=("roberta", "encoder", "layer"),
    embedding=("roberta", "embeddings", "word_embeddings", "embedding"),
    decoder_bias=("lm_head", "bias"),
    architecture=ROBERTA_KEYS,
    counts_from_pad=True,
)
XLM_ROBERTA = dataclasses.replace(ROBERTA, name="XLMRoberta", config_class=XLMRobertaConfig)  # other languages, no more
CAMEMBERT = dataclasses.replace(ROBERTA, name="Camembert", config_class=CamembertConfig)
PRE_NORM = Family(
    name="RobertaPreLayerNorm",
    config_class=RobertaPreLayerNormConfig,
    module=roberta.PreNormModule,
    body="roberta_prelayernorm",
    lm_head=("lm_head",),
    stack=("roberta_prelayernorm", "encoder", "layer"),
    embedding=("roberta_prelayernorm", "embeddings", "word_embeddings", "embedding"),
    decoder_bias=("lm_head", "bias"),
    architecture=ROBERTA_KEYS,
    counts_from_pad=True,
)
BERT = Family(
    name="Bert",
    config_class=BertConfig,
    module=bert.BertModule,
    body="bert",
    lm_head=("cls",),
    stack=("bert", "encoder", "layer"),
    embedding=("bert", "embeddings", "word_embeddings", "embedding"),
    decoder_bias=("cls", "predictions", "bias"),
    architecture=ROBERTA_KEYS,
)
MODERNBERT = Family(
    name="ModernBert",
    config_class=ModernBertConfig,
    module=modernbert.ModernBertModule,
    body="model",
    lm_head=("head", "decoder"),
    stack=("model", "layers"),
    embedding=("model", "embeddings", "tok_embeddings", "embedding"),
    decoder_bias=("decoder", "bias"),
    architecture=SIZES
    | {
        "activation": "hidden_activation",
        "layer_norm_eps": "norm_eps",
        "local_attention": "local_attention",
        "global_every": "global_attn_every_n_layers",
    },
)
FAMILIES = {
    family.config_class.model_type: family for family in (ROBERTA, XLM_ROBERTA, CAMEMBERT, PRE_NORM, BERT, MODERNBERT)
}


@functools.cache
def find(model_type: str) -> Family:
    """Returns the family of a model_type of transformers; one that it has in Flax alone is read off a small model.

    Raises InputError if there is none, and for those of encoder and decoder.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    class_name = FLAX_MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type, "")
    if not class_name.endswith("ForMaskedLM"):
        known = {key for key, name in FLAX_MODEL_FOR_MASKED_LM_MAPPING_NAMES.items() if name.endswith("ForMaskedLM")}
        names = ", ".join(sorted(FAMILIES.keys() | known))
        raise InputError(f"transformers has no masked language model {model_type!r:.80} in Flax; name one of {names}.")
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(num_hidden_layers=1, vocab_size=SMALL_VOCABULARY)
    config.attention_type = "original_full"  # of BigBird
    own_names = {
        "intermediate_size": ("intermediate_size", "hidden_dim"),
        "activation": ("hidden_act", "activation"),
        "layer_norm_eps": ("layer_norm_eps",),
    }
    names = {key: next((name for name in known if hasattr(config, name)), "") for key, known in own_names.items()}
    model = TransformersModel(class_name[4 : -len("ForMaskedLM")], config, "float32", 0, REPLICATED)
    shapes = flatten_dict(jax.eval_shape(lambda: model.init_params(jax.random.key(0))))
    body = getattr(transformers, class_name).base_model_prefix
    return Family(
        name=model.name,
        config_class=config_class,
        module=None,
        body=body,
        lm_head=tuple(dict.fromkeys(path[0] for path in shapes if path[0] != body)),
        stack=next(path[: path.index("0")] for path in shapes if "0" in path),
        embedding=next(path for path in shapes if path[-2:] == ("word_embeddings", "embedding")),
        decoder_bias=next(path for path, leaf in shapes.items() if leaf.shape == (SMALL_VOCABULARY,)),
        architecture=SIZES | {key: name for key, name in names.items() if name},
    )


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
    return config.pad_token_id + 1 if family_of(config).counts_from_pad else 0


def at_path(params: Params, path: Path) -> Any:
    """Returns a parameter, or a part of the tree."""
    return functools.reduce(lambda tree, name: tree[name], path, params)


def make_module(
    model: ConfigDict, info: DatasetInfo, *, isolated: bool = False, module_class: type[Model] | None = None
) -> Model | TransformersModel:
    """Returns the language model of the config's group `model`, with the attention that runs on any device.

    `module_class` is a subclass of the family's own module, in its place.
    """
    if info.length > model.positions:
        key = f"config.model.positions = {model.positions}"
        raise InputError(f"{key}: the shards have rows of {info.length} tokens; raise it to at least that.")
    family = named(model.family)
    config = family.make_config(model, info.vocab_size, info.special_ids)
    if model.implementation == "transformers":
        if family.flax_class(MASKED_LM) is None:
            what = f"transformers has no Flax{family.name}ForMaskedLM"
            raise InputError(f"config.model.family = {model.family}: {what}; set model.implementation to mlm.")
        return family.transformers_model(config, model.dtype, recompute_layers=model.remat)
    compute = Compute(
        cls_id=info.special_ids["cls"] if isolated else None,
        recompute_layers=model.remat,
        recomputed_feed_forwards=model.remat_feed_forward,
    )
    return (module_class or family.module)(config, model.dtype, compute=compute)
