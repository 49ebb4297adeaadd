"""Loads models: of a run, of a transformers folder or of the Hub. Every value that comes from a folder is checked."""

import contextlib
import dataclasses
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict
from transformers import PretrainedConfig

from mlm.data import tokenizer
from mlm.data.tokenizer_checks import vocabulary_size
from mlm.errors import InputError
from mlm.model import classifier, families
from mlm.model.families import Family, family_of, first_position
from mlm.model.keys import make_key
from mlm.model.module import MASKED_LM, Model, Params
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files, locate, weight_files
from mlm.pretrained.model_config import config_of, longest_row, read_config
from mlm.text import printable
from mlm.workdir import Workdir

LM_HEAD = "lm_head"
CLASSIFIER = "classifier"
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
    # of a class that overrides `make_model`, see `changed_model.with_class`
    changed_module: Model | None = None

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
        body = dict(self.params[self.family.body])
        if self.family is not families.BERT:
            body.pop("pooler", None)
        shared = {"head"} & self.params.keys() & set(self.family.lm_head)
        return {self.family.body: body} | {name: self.params[name] for name in shared}

    def with_vocabulary(self, size: int) -> Self:
        """Returns the model with a vocabulary of `size` entries, cut off or padded by `Family.resize_vocabulary`."""
        config = type(self.config).from_dict(self.config.to_dict())
        config.vocab_size = size
        params = self.family.resize_vocabulary(self.params, size)
        return dataclasses.replace(self, config=config, params=params)

    def padded(self) -> Self:
        """Returns the model with its vocabulary padded up to a multiple, as a mesh may need it."""
        return self.with_vocabulary(
            -(-self.config.vocab_size // families.VOCAB_MULTIPLE) * families.VOCAB_MULTIPLE
        )


def load(
    model: str | Workdir, *, head: str | None, flag: str = "--model=", headers: bool = False
) -> Pretrained:
    """Returns the model of a run, or the one that a person named with `flag`.

    Args:
      model: a workdir, WORKDIR@STEP, a folder with config.json and safetensors or
        flax_model.msgpack, or a Hub name.
      head: the head that it must have, LM_HEAD or CLASSIFIER, and no other parameters; None for any
        or none.
      headers: check all that can be known without reading the parameters, which are then zeros, or
        for a run missing.
    """
    if isinstance(model, Workdir):
        return from_workdir(model, head=head, headers=headers)
    where = f"{flag}{model}"
    if locate.is_workdir(model):
        folder, step = locate.split_step(model)
        workdir = Workdir(folder, create=False)
        pretrained = from_workdir(workdir, head=head, step=step, where=where, headers=headers)
        return dataclasses.replace(pretrained, source=model)
    folder = locate.local_copy(model, flag, weights=not headers)
    config = read_config(folder, where)
    if head == CLASSIFIER:
        _check_classifier(config, where)
    elif not config.tie_word_embeddings:
        raise InputError(
            f"{where}: its embeddings are not tied; a model with tied embeddings is needed."
        )
    if locate.has_tokenizer(folder):
        _fit_tokenizer(config, folder, head, where)
    params = {}
    if not headers or UPath(model).is_dir() or locate.weight_files(folder):
        params = _read_params(folder, config, head, where, headers=headers)
    return Pretrained(config, params, str(folder), None, {}, model)


def _check_classifier(config: PretrainedConfig, where: str) -> None:
    """Raises InputError for a classifier of a kind that is not supported."""
    kind = classifier.kind(config)
    fault = ""
    if config.problem_type == "multi_label_classification":
        fault = "is a multi-label classifier"
    elif kind == "regression" and config.num_labels > 1:
        fault = f"predicts {config.num_labels} numbers per row"
    elif len(set(config.id2label.values())) < config.num_labels:
        fault = f"has id2label = {config.id2label!r:.80}, where labels share a name"
    elif kind != "tokens" and getattr(config, "classifier_pooling", "cls") != "cls":
        fault = "has a head that reads the mean of a row's tokens, not the first"
    if fault:
        raise InputError(
            f"{where}: {fault}; one with a label, or a number, for each row or word is needed."
        )


def _fit_tokenizer(config: PretrainedConfig, folder: UPath, head: str | None, where: str) -> None:
    """Refuses a tokenizer that is not the model's, and notes how it marks pairs for a BERT.

    A RoBERTa of transformers gives each token whose id is the config's pad_token_id the position of
    padding, whatever the tokenizer means by it. Ours reads the attention mask instead, which is the
    same while the two ids are.
    """
    tok = tokenizer.load(str(folder))
    entries = vocabulary_size(tok.backend_tokenizer)
    fault = ""
    if head is not None and entries > config.vocab_size:
        fault = f"has {config.vocab_size} vocabulary entries, its tokenizer has {entries}"
    elif first_position(config) and tok.pad_token_id != config.pad_token_id:
        meaning = printable(str(tok.convert_ids_to_tokens(config.pad_token_id)))
        fault = (
            f"its config.json has pad_token_id = {config.pad_token_id}, which its tokenizer calls {meaning}; there the "
            f"padding token {tok.pad_token} is {tok.pad_token_id}, and positions depend on it"
        )
    if fault:
        raise InputError(f"{where}: {fault}; use the tokenizer that the model was trained with.")
    if head == CLASSIFIER and config.model_type == "bert":
        classifier.set_pairs(config, tok, has_types="token_type_ids" in tok.model_input_names)


def _read_params(
    folder: UPath, config: PretrainedConfig, head: str | None, where: str, *, headers: bool
) -> Params:
    """Returns the parameters of the body and of `head`, each of the shape that the config asks for."""
    family = family_of(config)
    params = weight_files.read_params(folder, family.body, where, headers=headers)
    reads_pooler = (
        head == CLASSIFIER and family is families.BERT and classifier.kind(config) != "tokens"
    )
    if head and not reads_pooler:
        params[family.body].pop("pooler", None)
    if "cls" in params:
        params["cls"].pop("seq_relationship", None)  # BERT's head for next sentences
    required = {LM_HEAD: family.lm_head, CLASSIFIER: (CLASSIFIER,), None: ()}[head]
    if not set(required) <= params.keys():
        raise InputError(f"{where}: has no {HEAD_NAMES[head]}; name a model with one.")
    compared = params if head else Pretrained(config, params, "", None, {}, "").encoder
    is_classifier = head == CLASSIFIER or "pooler" in compared[family.body]
    module = family.make_module(
        config, classifier.head_name(config) if is_classifier else MASKED_LM
    )
    all_expected = jax.eval_shape(lambda: module.init_params(make_key(0)))
    expected = shapes_of(
        {name: tree for name, tree in all_expected.items() if head or name in compared}
    )
    actual = shapes_of(compared)
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise InputError(
                f"{where}: its weights don't match its config.json: {name} is {actual.get(name)} where config.json "
                f"asks for {expected.get(name)}; use an undamaged copy."
            )
    return params


def shapes_of(params: Params) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters by name."""
    return {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()}


def from_workdir(
    workdir: Workdir,
    *,
    head: str | None,
    step: int | None = None,
    best: bool = False,
    where: str = "",
    headers: bool = False,
) -> Pretrained:
    """Returns the model of a step; its moving average, if the run has one.

    Without a step it is the newest one, or the `best`, as of a classifier always.
    """
    where = where or str(workdir.checkpoints)
    if step is None and headers:
        step = max(checkpoint_files.complete_steps(workdir.checkpoints), default=None)
    if step is not None:
        checkpoint_files.check_step(workdir.checkpoints, step, where, deep=not headers)
    else:
        best = best or locate.is_classifier(workdir)
        step = checkpoint_files.choose(workdir.checkpoints, on_damage="stop", best=best)
    if step is None:
        raise InputError(f"{where}: there is no complete checkpoint; train first.")
    meta = checkpoint_files.read_meta(workdir.checkpoints, step)
    dataset = meta["dataset"]
    is_classifier = "labels" in dataset
    if head not in (None, CLASSIFIER if is_classifier else LM_HEAD):
        kind = "classifier" if is_classifier else "masked language model"
        raise InputError(f"{where}: holds a {kind}, which has no {HEAD_NAMES[head]}.")
    params = {} if headers else restore(workdir, step, meta)
    source = str(workdir.checkpoints / str(step))
    config = config_of(dataset["model"])
    if not headers and locate.has_tokenizer(workdir.tokenizer):
        entries = vocabulary_size(tokenizer.load_fast(str(workdir.tokenizer)))
        if entries != dataset["vocab_size"]:
            raise InputError(
                f"{where}: has {dataset['vocab_size']} vocabulary entries, {workdir.tokenizer} has {entries}; use the "
                "tokenizer that the model was trained with."
            )
    pretrained = Pretrained(config, params, str(workdir.tokenizer), step, meta, source)
    return pretrained.with_vocabulary(dataset["vocab_size"])


def part_of(meta: dict[str, Any]) -> str:
    """Returns which part of a checkpoint's state is evaluated: "ema" if the run keeps an average, else "params"."""
    return "ema" if meta["config"].optimizer.ema_decay > 0 else "params"


def restore(workdir: Workdir, step: int, meta: dict[str, Any]) -> Params:
    """Returns the parameters of a checkpoint, on the host, the vocabulary padded as in training."""
    part = part_of(meta)
    state = epath.Path(str(workdir.checkpoints / str(step) / "state"))
    with (
        checkpoint_files.reading(workdir.checkpoints, step),
        contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler,
    ):
        item = {part: ocp.StandardCheckpointHandler().metadata(state).tree[part]}
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        return handler.restore(state, args=args)[part]
