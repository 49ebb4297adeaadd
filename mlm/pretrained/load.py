"""Loads models. A folder may be hostile: it is only ever read as data, and every value is checked."""

import dataclasses
from typing import Any, Self

import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors.flax
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding
from ml_collections import ConfigDict
from transformers import PretrainedConfig

from mlm import logs
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.model import classifier, families, weights
from mlm.model.families import Family, family_of
from mlm.model.keys import make_key
from mlm.model.module import MASKED_LM, Model, Params
from mlm.paths import UPath, inside
from mlm.pretrained import checkpoint_files, locate
from mlm.pretrained.locate import INDEX, MSGPACK, SAFETENSORS
from mlm.pretrained.model_config import config_of, longest_row, read_config
from mlm.text import printable
from mlm.workdir import Workdir

LM_HEAD, CLASSIFIER = "lm_head", "classifier"
HEAD_NAMES = {LM_HEAD: "language-model head", CLASSIFIER: "classification head"}
INIT_FROM = "config.train.init_from = "


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model with its parameters on the host."""

    config: PretrainedConfig  # its vocabulary is the tokenizer's, without the padding of training
    params: Params  # numpy float32
    tokenizer: str  # its folder, which may be missing if only parameters are needed
    step: int | None  # of the checkpoint; None for a folder
    meta: dict[str, Any]  # of the checkpoint, see `checkpoint_files.read_meta`; empty for a folder
    source: str  # where it was read from, for messages
    changed_module: Model | None = None  # of a class that overrides `make_model`, see `changed_model.with_class`

    @property
    def run_config(self) -> ConfigDict | None:
        """The config of the run; None for a folder."""
        return self.meta.get("config")

    @property
    def family(self) -> Family:
        """What kind of model it is."""
        return family_of(self.config)

    @property
    def module(self) -> Model:
        """The linen module, in float32, with the head of the parameters."""
        if self.changed_module is not None:
            return self.changed_module.clone(config=self.config)
        head = classifier.head_name(self.config) if CLASSIFIER in self.params else MASKED_LM
        return self.family.make_module(self.config, head)

    @property
    def longest_row(self) -> int:
        """How many tokens the model can read, special ones included."""
        return longest_row(self.config)

    @property
    def leaves(self) -> dict[str, np.ndarray]:
        """The parameters by name: {"roberta/embeddings/...": float32}."""
        return dict(sorted(flatten_dict(self.params, sep="/").items()))

    @property
    def encoder(self) -> Params:
        """What language models and classifiers share: the body, and of ModernBERT's heads all but the last layer.

        A BERT's includes its pooler, if it has one, which classifiers of rows read.
        """
        unused = () if self.family is families.BERT else ("pooler",)
        body = {name: tree for name, tree in self.params[self.family.body].items() if name not in unused}
        shared = {"head"} & self.params.keys() & set(self.family.lm_head)
        return {self.family.body: body} | {name: self.params[name] for name in shared}

    def with_vocabulary(self, size: int) -> Self:
        """Returns the model with a vocabulary of `size` entries, cut off or padded by `Family.resize_vocabulary`."""
        config = type(self.config).from_dict(self.config.to_dict())
        config.vocab_size = size
        return dataclasses.replace(self, config=config, params=self.family.resize_vocabulary(self.params, size))

    def padded(self) -> Self:
        """Returns the model with its vocabulary padded up to a multiple, as a mesh may need it."""
        return self.with_vocabulary(-(-self.config.vocab_size // families.VOCAB_MULTIPLE) * families.VOCAB_MULTIPLE)


def load(model: str | Workdir, *, head: str | None, flag: str = "--model=", headers: bool = False) -> Pretrained:
    """Returns the model of a run, or the one that a person named with `flag`.

    Args:
      model: a workdir, WORKDIR@STEP, a folder with config.json and safetensors or flax_model.msgpack, or a Hub name.
      head: the head that it must have, LM_HEAD or CLASSIFIER, and no other parameters; None for any or none.
      headers: check all that can be known without reading the parameters, which are then zeros, or for a run missing.
    """
    if isinstance(model, Workdir):
        return from_workdir(model, head=head, headers=headers)
    where = f"{flag}{model}"
    if locate.is_workdir(model):
        folder, step = locate.split_step(model)
        pretrained = from_workdir(Workdir(folder, create=False), head=head, step=step, where=where, headers=headers)
        return dataclasses.replace(pretrained, source=model)
    folder = locate.local_copy(model, flag, weights=not headers)
    config = read_config(folder, where)
    family, is_classifier = family_of(config), head == CLASSIFIER
    if is_classifier:
        _check_classifier(config, where)
    elif not config.tie_word_embeddings:
        raise InputError(f"{where}: its embeddings are not tied; a model with tied embeddings is needed.")
    if is_classifier and config.model_type == "bert" and locate.has_tokenizer(folder):
        tok = tokenizer.load(str(folder))
        classifier.set_pairs(config, tok, has_types="token_type_ids" in tok.model_input_names)
    if headers and not UPath(model).is_dir() and not locate.has_weights(folder):
        return Pretrained(config, {}, str(folder), None, {}, model)
    params = _read_weights(folder, family, where, headers=headers)
    reads_pooler = is_classifier and family is families.BERT and classifier.kind(config) != "tokens"
    if head and not reads_pooler and isinstance(params[family.body], dict):
        params[family.body].pop("pooler", None)
    if isinstance(params.get("cls"), dict):
        params["cls"].pop("seq_relationship", None)  # BERT's head for next sentences
    pretrained = Pretrained(config, params, str(folder), None, {}, model)
    _check_params(pretrained, head, where)
    return pretrained


def _check_classifier(config: PretrainedConfig, where: str) -> None:
    """Raises InputError for a classifier of a kind that is not supported."""
    kind = classifier.kind(config)
    if config.problem_type == "multi_label_classification":
        raise InputError(f"{where}: is a multi-label classifier; one with a label or number per row is needed.")
    if kind == "regression" and config.num_labels > 1:
        raise InputError(f"{where}: predicts {config.num_labels} numbers per row; one that predicts one is needed.")
    names = set(map(str, config.id2label.values()))
    if sorted(config.id2label) != list(range(config.num_labels)) or len(names) < config.num_labels:
        fix = f"it must give each label from 0 to {config.num_labels - 1} a name of its own"
        raise InputError(f"{where}: its config.json has id2label = {config.id2label!r:.80}; {fix}.")
    if kind != "tokens" and getattr(config, "classifier_pooling", "cls") != "cls":
        raise InputError(f"{where}: its head reads the mean of a row's tokens; one that reads the first is needed.")


def from_workdir(
    workdir: Workdir, *, head: str | None, step: int | None = None, where: str = "", headers: bool = False
) -> Pretrained:
    """Returns the model of a step (None: the newest, a classifier's best); its moving average, if the run has one."""
    where = where or str(workdir.checkpoints)
    if step is None and headers:
        step = max(checkpoint_files.complete_steps(workdir.checkpoints), default=None)
    if step is not None:
        checkpoint_files.check_step(workdir.checkpoints, step, where, deep=not headers)
    else:
        step = checkpoint_files.choose(workdir.checkpoints, on_damage="stop", best=locate.is_classifier(workdir))
    if step is None:
        raise InputError(f"{where}: there is no complete checkpoint; train first.")
    meta = checkpoint_files.read_meta(workdir.checkpoints, step)
    dataset = meta["dataset"]
    model_head, kind = (CLASSIFIER, "classifier") if "labels" in dataset else (LM_HEAD, "masked language model")
    if head not in (None, model_head):
        raise InputError(f"{where}: holds a {kind}, which has no {HEAD_NAMES[head]}.")
    params = {} if headers else restore(workdir, step, meta)
    source = str(workdir.checkpoints / str(step))
    pretrained = Pretrained(config_of(dataset["model"]), params, str(workdir.tokenizer), step, meta, source)
    return pretrained if headers else pretrained.with_vocabulary(dataset["vocab_size"])


def part_of(meta: dict[str, Any]) -> str:
    """Returns which part of a checkpoint's state is evaluated: "ema" if the run keeps an average, else "params"."""
    return "ema" if meta["config"].optimizer.ema_decay > 0 else "params"


def restore(workdir: Workdir, step: int, meta: dict[str, Any]) -> Params:
    """Returns the parameters of a checkpoint, on the host, the vocabulary padded as in training."""
    part, device = part_of(meta), SingleDeviceSharding(jax.local_devices()[0])
    state = workdir.checkpoints / str(step) / "state"
    with (
        checkpoint_files.reading(workdir.checkpoints, step),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        saved = ocp.StandardCheckpointHandler().metadata(epath.Path(str(state))).tree[part]
        item = {part: jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device), saved)}
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        restored = checkpointer.restore(str(state), args=args)
    return jax.device_get(restored[part])


def _read_weights(folder: UPath, family: Family, where: str, *, headers: bool = False) -> Params:
    """Returns all parameters of a local folder, float32, by our names, which start with the body's."""
    if not locate.has_weights(folder):
        raise locate.no_weights(where)
    files = [folder / SAFETENSORS] if (folder / SAFETENSORS).is_file() else []
    try:
        if (folder / INDEX).is_file():
            names = set(logs.read_object(folder / INDEX)["weight_map"].values())
            files = [inside(folder, file) for file in sorted(names)]
        if files:
            read = _zeros_of if headers else safetensors.flax.load_file  # numpy's loader knows no bfloat16
            tensors = {key: value for file in files for key, value in read(str(file)).items()}
            params = weights.from_torch(weights.with_one_bias(weights.unwrapped(tensors, family.body)))
        else:
            params = flax.serialization.msgpack_restore((folder / MSGPACK).read_bytes())
        flat = {path: np.asarray(value, np.float32) for path, value in flatten_dict(params).items()}
        if not all(isinstance(part, str) for path in flat for part in path):
            raise ValueError("a parameter has a name that is not text")
        params = unflatten_dict(flat)
    except Exception as error:  # whatever the libraries raise at a file that is not what its name says
        reason = printable(str(error))[:300]
        raise InputError(f"{where}: its weights can't be read ({reason}); use an undamaged copy.") from None
    if family.body not in params and "embeddings" not in params:
        raise InputError(
            f"{where}: its parameters are named {printable(min('/'.join(path) for path in flat))[:120]} and so on; "
            f"remove the prefix, or save the model itself, so that their names start with {family.body}.embeddings."
        )
    return params if family.body in params else {family.body: params}


def _zeros_of(file: str) -> dict[str, np.ndarray]:
    """Returns zeros of the tensors' shapes, which take no memory, from the header of a safetensors file."""
    with safetensors.safe_open(file, framework="np") as tensors:
        names = tensors.keys()
        return {name: np.broadcast_to(np.float32(0), tensors.get_slice(name).get_shape()) for name in names}


def shapes_of(params: Params) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters by name."""
    return {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()}


def _check_params(pretrained: Pretrained, head: str | None, where: str) -> None:
    """Raises InputError for the first parameter of the body and of `head` that is not as the config has it."""
    config, family = pretrained.config, pretrained.family
    parts = {LM_HEAD: family.lm_head, CLASSIFIER: (CLASSIFIER,)}
    if head and not set(parts[head]) <= pretrained.params.keys():
        raise InputError(f"{where}: has no {HEAD_NAMES[head]}; name a model with one.")
    stack = "/".join(family.stack) + "/"
    layers = {name.removeprefix(stack).split("/")[0] for name in pretrained.leaves if name.startswith(stack)}
    layer_count = config.num_hidden_layers
    differences = [f"{len(layers)} layers where config.json asks for {layer_count}"]
    if len(layers) == layer_count:  # before the shapes of as many are made
        params = pretrained.params if head else pretrained.encoder
        is_classifier = head == CLASSIFIER or "pooler" in params[family.body]
        module = family.make_module(config, classifier.head_name(config) if is_classifier else MASKED_LM)
        config_params = jax.eval_shape(lambda: module.init_params(make_key(0)))
        if not head:
            config_params = {name: config_params[name] for name in params}
        expected, actual = shapes_of(config_params), shapes_of(params)
        differences = [
            f"{name} is {actual.get(name)} where config.json asks for {expected.get(name)}"
            for name in sorted(expected.keys() | actual.keys())
            if expected.get(name) != actual.get(name)
        ]
    if differences:
        raise InputError(f"{where}: its weights don't match its config.json: {differences[0]}; use an undamaged copy.")
