"""Loads models. A folder may be hostile: it is only ever read as data, and every value is checked."""

import dataclasses
from typing import Any, Self

import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors.flax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding
from transformers import PretrainedConfig

from mlm import logs
from mlm.config_rules import ABOVE_ZERO, BELOW_ONE, FROM_ZERO, Rule, whole
from mlm.errors import DamageError, InputError
from mlm.model import classifier, layers, weights
from mlm.model.families import FAMILIES, family_of
from mlm.model.network import Network, Params
from mlm.paths import UPath, inside
from mlm.pretrained import checkpoint_files, locate
from mlm.pretrained.locate import INDEX, MSGPACK, SAFETENSORS
from mlm.text import printable
from mlm.workdir import Workdir

LM_HEAD, CLASSIFIER = "lm_head", "classifier"
HEAD_NAMES = {LM_HEAD: "language-model head", CLASSIFIER: "classification head"}
INIT_FROM = "config.train.init_from = "
ACTIVATION: Rule = (lambda v: isinstance(v, str) and v in layers.ACTIVATIONS, f"one of {', '.join(layers.ACTIVATIONS)}")
FALSE: Rule = (lambda v: v is False, "false")
SHARED: dict[Rule, str] = {  # of config.json
    FROM_ZERO: "initializer_range",
    whole(1, 2**31): "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size",
    whole(2, 2**31): "max_position_embeddings",
    whole(0, 2**31): "pad_token_id",
}
ROBERTA: dict[Rule, str] = {
    whole(1, 2**31): "type_vocab_size",
    BELOW_ONE: "hidden_dropout_prob attention_probs_dropout_prob",
    FROM_ZERO: "layer_norm_eps",
    FALSE: "is_decoder",
    (lambda v: v == "absolute", "absolute"): "position_embedding_type",
    ACTIVATION: "hidden_act",
}
MODERNBERT: dict[Rule, str] = {
    BELOW_ONE: "embedding_dropout mlp_dropout classifier_dropout attention_dropout",
    FROM_ZERO: "norm_eps",
    ABOVE_ZERO: "global_rope_theta local_rope_theta initializer_cutoff_factor",
    whole(1, 2**31): "global_attn_every_n_layers",
    (lambda v: type(v) is int and 2 <= v < 2**31 and v % 2 == 0, "an even number from 2 up"): "local_attention",
    FALSE: "norm_bias attention_bias mlp_bias classifier_bias",
    (lambda v: v is True, "true"): "decoder_bias",
    ACTIVATION: "hidden_activation classifier_activation",
}


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model with its parameters on the host."""

    config: PretrainedConfig  # its vocabulary is the tokenizer's, without the padding of training
    params: Params  # numpy float32
    tokenizer: str  # its folder, which may be missing if only parameters are needed
    step: int | None  # of the checkpoint; None for a folder
    meta: dict[str, Any]  # of the checkpoint, see `checkpoint_files.read_meta`; empty for a folder
    source: str  # where it was read from, for messages

    @property
    def run_config(self) -> dict[str, Any] | None:
        """The config of the run, flattened; None for a folder."""
        return self.meta.get("config")

    @property
    def family(self) -> type[Network]:
        """What kind of model it is."""
        return family_of(self.config)

    @property
    def network(self) -> Network:
        """The forward pass, in float32."""
        return self.family(self.config)

    @property
    def longest_row(self) -> int:
        """How many tokens the model can read, special ones included."""
        return locate.longest_row(self.config.to_dict())

    @property
    def leaves(self) -> dict[str, np.ndarray]:
        """The parameters by name: {"roberta/embeddings/...": float32}."""
        return dict(sorted(flatten_dict(self.params, sep="/").items()))

    @property
    def encoder(self) -> Params:
        """What language models and classifiers share: the body, and of ModernBERT's heads all but the last layer."""
        body = {name: own for name, own in self.params[self.family.body].items() if name != "pooler"}
        shared = {"head"} & self.params.keys() & set(self.family.lm_head)
        return {self.family.body: body} | {name: self.params[name] for name in shared}

    def with_vocabulary(self, size: int) -> Self:
        """Returns the model with a vocabulary of `size` entries, cut off or padded by `weights.resize_vocabulary`."""
        config = type(self.config).from_dict(self.config.to_dict())
        config.vocab_size = size
        return dataclasses.replace(self, config=config, params=weights.resize_vocabulary(self.params, size))

    def padded(self, multiple: int) -> Self:
        """Returns the model with its vocabulary padded up to a multiple, as a mesh may need it."""
        return self.with_vocabulary(-(-self.config.vocab_size // multiple) * multiple)


def load(model: str | Workdir, *, head: str | None, flag: str = "--model=") -> Pretrained:
    """Returns the model of a run, or the one that a person named with `flag`.

    Args:
      model: a workdir, WORKDIR@STEP, a folder with config.json and safetensors or flax_model.msgpack, or a Hub name.
      head: that it must have, LM_HEAD or CLASSIFIER, with no parameters beyond the config's; None for any or none.
    """
    if isinstance(model, Workdir):
        return from_workdir(model, head=head)
    where = f"{flag}{model}"
    if locate.is_workdir(model):
        folder, step = locate.split_step(model)
        found = from_workdir(Workdir(folder, create=False), head=head, step=step, where=where)
        return dataclasses.replace(found, source=model)
    folder = locate.local_copy(model, flag)
    config = read_config(folder, where)
    if head == CLASSIFIER and config.problem_type == "multi_label_classification":
        raise InputError(f"{where}: is a multi-label classifier; one with a label or number per row is needed.")
    if head == CLASSIFIER and classifier.kind(config) == "regression" and config.num_labels > 1:
        raise InputError(f"{where}: predicts {config.num_labels} numbers per row; one that predicts one is needed.")
    if head == CLASSIFIER and sorted(config.id2label) != list(range(config.num_labels)):
        fix = f"it must name the labels 0 to {config.num_labels - 1}"
        raise InputError(f"{where}: its config.json has id2label = {config.id2label!r:.80}; {fix}.")
    if head != CLASSIFIER and not config.tie_word_embeddings:
        raise InputError(f"{where}: its embeddings are not tied; a model with tied embeddings is needed.")
    reads_rows = head == CLASSIFIER and classifier.kind(config) != "tokens"
    if reads_rows and getattr(config, "classifier_pooling", "cls") != "cls":
        raise InputError(f"{where}: its head reads the mean of a row's tokens; one that reads the first is needed.")
    params, body = _read_weights(folder, family_of(config), where), family_of(config).body
    if head and isinstance(params[body], dict):
        params[body].pop("pooler", None)
    found = Pretrained(config, params, str(folder), None, {}, model)
    _check_params(found, head, where)
    return found


def from_workdir(workdir: Workdir, *, head: str | None, step: int | None = None, where: str = "") -> Pretrained:
    """Returns the model of a step (None: the newest, a classifier's best), averaged if the run keeps an average."""
    where = where or str(workdir.checkpoints)
    if step is not None:
        checkpoint_files.check_step(workdir.checkpoints, step, where)
    else:
        step = checkpoint_files.choose(workdir.checkpoints, on_damage="stop", best=locate.is_classifier(workdir))
    if step is None:
        raise InputError(f"{where}: there is no complete checkpoint; train first.")
    meta = checkpoint_files.read_meta(workdir.checkpoints, step)
    dataset = meta["dataset"]
    own, kind = (CLASSIFIER, "classifier") if "labels" in dataset else (LM_HEAD, "masked language model")
    if head not in (None, own):
        raise InputError(f"{where}: holds a {kind}, which has no {HEAD_NAMES[head]}.")
    config, params = restore(workdir, step, meta)
    found = Pretrained(config, params, str(workdir.tokenizer), step, meta, str(workdir.checkpoints / str(step)))
    return found.with_vocabulary(dataset["vocab_size"])


def part_of(meta: dict[str, Any]) -> str:
    """Returns which part of a checkpoint's state is evaluated: "ema" if the run keeps an average, else "params"."""
    return "ema" if meta["config"]["optimizer.ema_decay"] > 0 else "params"


def restore(workdir: Workdir, step: int, meta: dict[str, Any]) -> tuple[PretrainedConfig, Params]:
    """Returns the config and the parameters of a checkpoint, on the host, the vocabulary padded as in training."""
    config, part = config_of(meta["dataset"]["model"]), part_of(meta)
    head = CLASSIFIER if "labels" in meta["dataset"] else LM_HEAD
    device = SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device), _shapes(config, head))
    item = {part: shapes}
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(str(workdir.checkpoints / str(step) / "state"), args=args)
    return config, jax.device_get(restored[part])


def config_of(content: dict[str, Any]) -> PretrainedConfig:
    """Returns transformers' config from the JSON of a checkpoint or a folder, which transformers 5 may have written."""
    if content.get("rope_scaling"):
        raise ValueError("rope_scaling, which is not supported")
    if "rope_parameters" in content:
        content, rope, types = dict(content), content["rope_parameters"], content["layer_types"]
        del content["rope_parameters"], content["layer_types"]
        for kind, name in (("full_attention", "global"), ("sliding_attention", "local")):
            if rope[kind].get("rope_type", "default") != "default":
                raise ValueError(f"rope_type {rope[kind]['rope_type']}, only default")
            content[f"{name}_rope_theta"] = rope[kind]["rope_theta"]
        every = next((i for i, kind in enumerate(types) if i and kind == "full_attention"), len(types))
        given = content.get("global_attn_every_n_layers")  # may be more than there are layers
        every = given if type(given) is int and given > len(types) == every else every
        if types != ["sliding_attention" if i % every else "full_attention" for i in range(len(types))]:
            raise ValueError("layer_types are not one global layer in every so many")
        content["global_attn_every_n_layers"] = every
    config = FAMILIES[content["model_type"]].config_class.from_dict(content)
    if getattr(config, "local_rope_theta", 0) is None:
        config.local_rope_theta = config.global_rope_theta
    return config


def read_config(folder: UPath, where: str) -> PretrainedConfig:
    """Returns the config of a local folder, from config.json alone; errors call the folder `where`."""
    try:
        content = logs.read_object(folder / "config.json")
        known = content.get("model_type") in FAMILIES
        config = config_of(content) if known else None
    except Exception as error:  # whatever transformers raises at values of another type
        reason = printable(f"{type(error).__name__}: {error}")[:200]
        reason = "not a JSON object" if isinstance(error, DamageError) else reason
        raise InputError(f"{where}: its config.json can't be read ({reason}); use another copy or model.") from None
    if not known:
        name, kinds = printable(str(content.get("model_type")))[:80], " or ".join(FAMILIES)
        raise InputError(f"{where}: its config.json has model_type = {name}; it must be {kinds}.")
    own = MODERNBERT if config.model_type == "modernbert" else ROBERTA
    for (check, allowed), keys in (*SHARED.items(), *own.items()):
        for key in keys.split():
            value = getattr(config, key)
            if not check(value):
                raise InputError(f"{where}: its config.json has {key} = {value!r:.80}; it must be {allowed}.")
    size, rest = divmod(config.hidden_size, config.num_attention_heads)
    if rest or (config.model_type == "modernbert" and size % 2) or config.pad_token_id >= config.vocab_size:
        text = "has attention heads that don't divide hidden_size or are of an odd size"
        raise InputError(
            f"{where}: its config.json {text}, or a pad_token_id outside the vocabulary; use another copy or model."
        )
    return config


def _read_weights(folder: UPath, family: type[Network], where: str) -> Params:
    """Returns all parameters of a local folder, float32, by our names; a model without a head has shorter ones."""
    if not any((folder / file).is_file() for file in (INDEX, SAFETENSORS, MSGPACK)):
        hint = "load it in PyTorch and save it with save_pretrained."
        raise InputError(f"{where}: has neither {SAFETENSORS} nor {MSGPACK}; {hint}")
    files = [folder / SAFETENSORS] if (folder / SAFETENSORS).is_file() else []
    try:
        if (folder / INDEX).is_file():
            names = set(logs.read_object(folder / INDEX)["weight_map"].values())
            files = [inside(folder, file, links=True) for file in sorted(names)]
        if files:
            parts = [safetensors.flax.load_file(str(file)) for file in files]  # numpy's loader knows no bfloat16
            tensors = {key: value for part in parts for key, value in part.items()}
            params = weights.from_torch(_with_one_bias(tensors))
        else:
            params = flax.serialization.msgpack_restore((folder / MSGPACK).read_bytes())
        flat = {path: np.asarray(value, np.float32) for path, value in flatten_dict(params).items()}
        if not all(isinstance(part, str) for path in flat for part in path):
            raise ValueError("a parameter has a name that is not text")
        params = unflatten_dict(flat)
    except Exception as error:  # whatever the libraries raise at a file that is not what its name says
        reason = printable(str(error))[:300]
        raise InputError(f"{where}: its weights can't be read ({reason}); use an undamaged copy.") from None
    return params if family.body in params else {family.body: params}


def _with_one_bias(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns PyTorch's tensors with one bias of the decoder: of two, one may be left over from another vocabulary."""
    embedding = next((value for name, value in tensors.items() if name.endswith("word_embeddings.weight")), ())
    for name in ("lm_head.bias", "lm_head.decoder.bias"):
        if name in tensors and len(tensors[name]) == len(embedding):
            return tensors | {"lm_head.bias": tensors[name]}
    return tensors


def _shapes(config: PretrainedConfig, head: str) -> Params:
    init = classifier.init_params if head == CLASSIFIER else family_of(config).init_params
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def _check_params(found: Pretrained, head: str | None, where: str) -> None:
    """Raises InputError for the first parameter of the body and of `head` that is not as the config has it."""
    family = found.family
    parts = {LM_HEAD: family.lm_head, CLASSIFIER: (CLASSIFIER,)}
    if head and not set(parts[head]) <= found.params.keys():
        raise InputError(f"{where}: has no {HEAD_NAMES[head]}; name a model with one.")
    layers = {
        name.split("/")[len(family.stack)] for name in found.leaves if name.startswith("/".join(family.stack) + "/")
    }
    difference = ""
    if len(layers) != found.config.num_hidden_layers:  # before the shapes of as many are made
        difference = f"{len(layers)} layers where config.json asks for {found.config.num_hidden_layers}"
    else:
        shapes = _shapes(found.config, head or LM_HEAD)
        own = found.params if head else found.encoder
        trees = (shapes, own) if head else ({name: shapes[name] for name in own}, own)
        wanted, own = ({name: leaf.shape for name, leaf in flatten_dict(tree, sep="/").items()} for tree in trees)
        odd = sorted(name for name in wanted.keys() | own.keys() if wanted.get(name) != own.get(name))
        if odd:
            difference = f"{odd[0]} is {own.get(odd[0])} where config.json asks for {wanted.get(odd[0])}"
    if difference:
        raise InputError(f"{where}: its weights don't match its config.json: {difference}; use an undamaged copy.")
