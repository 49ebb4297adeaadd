"""The one loader of models. A folder may be hostile: it is read as data alone, and every value is checked."""

import dataclasses
from typing import Any, Self

import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors.flax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding
from transformers import RobertaConfig
from transformers.modeling_flax_utils import ACT2FN

from mlm import logs
from mlm.config_rules import BELOW_ONE, Rule, whole
from mlm.errors import DamageError, InputError
from mlm.model import classifier, roberta, weights
from mlm.model.roberta import Params
from mlm.paths import UPath, inside
from mlm.pretrained import checkpoint_files, locate
from mlm.pretrained.locate import INDEX, MSGPACK, SAFETENSORS
from mlm.text import printable
from mlm.workdir import Workdir

LM_HEAD, CLASSIFIER = "lm_head", "classifier"  # as Flax's tree names them
INIT = {LM_HEAD: roberta.init_params, CLASSIFIER: classifier.init_params}
HEAD_NAMES = {LM_HEAD: "language-model head", CLASSIFIER: "classification head"}
INIT_FROM = "config.train.init_from = "
SIZES = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size type_vocab_size"
RATES = "layer_norm_eps hidden_dropout_prob attention_probs_dropout_prob initializer_range"
RULES: dict[str, Rule] = {  # of config.json
    **dict.fromkeys(SIZES.split(), whole(1, 2**31)),
    "max_position_embeddings": whole(2, 2**31),
    "pad_token_id": whole(0, 2**31),
    **dict.fromkeys(RATES.split(), BELOW_ONE),
    "hidden_act": (lambda v: isinstance(v, str) and v in ACT2FN, "an activation that transformers knows"),
}


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model with its parameters on the host."""

    config: RobertaConfig  # its vocabulary is the tokenizer's, without the padding of training
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
    def network(self) -> roberta.Network:
        """The forward pass, in float32."""
        return roberta.Network(self.config)

    @property
    def longest_row(self) -> int:
        """How many tokens the model can read, special ones included: positions start at pad id + 1."""
        return self.config.max_position_embeddings - self.config.pad_token_id - 1

    @property
    def leaves(self) -> dict[str, np.ndarray]:
        """The parameters by name: {"roberta/embeddings/...": float32}."""
        return dict(sorted(flatten_dict(self.params, sep="/").items()))

    @property
    def body(self) -> Params:
        """The encoder's parameters, which every head shares."""
        return {name: own for name, own in self.params["roberta"].items() if name != "pooler"}

    def with_vocabulary(self, size: int) -> Self:
        """Returns the model with `size` entries, as `weights.resize_vocabulary` cuts off or adds them."""
        config = RobertaConfig.from_dict(self.config.to_dict())
        config.vocab_size = size
        return dataclasses.replace(self, config=config, params=weights.resize_vocabulary(self.params, size))

    def padded(self, multiple: int) -> Self:
        """Returns the model with its vocabulary padded up to a multiple, as a mesh may need it."""
        return self.with_vocabulary(-(-self.config.vocab_size // multiple) * multiple)


def load(model: str | Workdir, *, head: str | None, flag: str = "--model=") -> Pretrained:
    """Returns the model of a run, or the one that a person named with `flag`.

    Args:
      model: a workdir, WORKDIR@STEP, a folder with config.json and safetensors or flax_model.msgpack, or a Hub name.
      head: LM_HEAD or CLASSIFIER, which the model then has, and no parameters but its config's; None for any or none.
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
        raise InputError(f"{where}: is a multi-label classifier; a RoBERTa with one label or number per row is needed.")
    if head != CLASSIFIER and not config.tie_word_embeddings:
        raise InputError(f"{where}: its embeddings are not tied; a RoBERTa with tied embeddings is needed.")
    params = _read_weights(folder, where)
    if head and isinstance(params["roberta"], dict):
        params["roberta"].pop("pooler", None)
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


def restore(workdir: Workdir, step: int, meta: dict[str, Any]) -> tuple[RobertaConfig, Params]:
    """Returns the config and the parameters of a checkpoint, on the host, the vocabulary padded as in training."""
    config, part = RobertaConfig.from_dict(meta["dataset"]["model"]), part_of(meta)
    head = CLASSIFIER if "labels" in meta["dataset"] else LM_HEAD
    device = SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device), _shapes(config, head))
    item = {part: shapes}
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(str(workdir.checkpoints / str(step) / "state"), args=args)
    return config, jax.device_get(restored[part])


def read_config(folder: UPath, where: str) -> RobertaConfig:
    """Returns the config of a local folder, from config.json alone; errors call the folder `where`."""
    try:
        content = logs.read_object(folder / "config.json")
        config = RobertaConfig.from_dict(content)
    except Exception as error:  # whatever transformers raises at values of another type
        reason = printable(f"{type(error).__name__}: {error}")[:200]
        reason = "not a JSON object" if isinstance(error, DamageError) else reason
        raise InputError(f"{where}: its config.json can't be read ({reason}); take a good copy.") from None
    if content.get("model_type") != "roberta":
        name = printable(str(content.get("model_type")))[:80]
        raise InputError(f"{where}: is a {name} according to its config.json; a RoBERTa is needed.")
    for key, (check, allowed) in RULES.items():
        value = getattr(config, key)
        if not check(value):
            raise InputError(f"{where}: its config.json has {key} = {value!r:.80}; it must be {allowed}.")
    if config.hidden_size % config.num_attention_heads or config.pad_token_id >= config.vocab_size:
        text = "has attention heads that don't divide hidden_size, or a pad_token_id outside the vocabulary"
        raise InputError(f"{where}: its config.json {text}; take a good copy.")
    return config


def _read_weights(folder: UPath, where: str) -> Params:
    """Returns all parameters of a local folder, float32, by Flax's names; a model without a head has shorter ones."""
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
            if "lm_head.decoder.bias" in tensors:  # tied to the other
                tensors.setdefault("lm_head.bias", tensors["lm_head.decoder.bias"])
            params = weights.from_torch(tensors)
        else:
            params = flax.serialization.msgpack_restore((folder / MSGPACK).read_bytes())
        flat = {path: np.asarray(value, np.float32) for path, value in flatten_dict(params).items()}
        if not all(isinstance(part, str) for path in flat for part in path):
            raise ValueError("a parameter has a name that is not text")
        params = unflatten_dict(flat)
    except Exception as error:  # whatever the libraries raise at a file that is not what its name says
        raise InputError(f"{where}: its weights can't be read ({printable(str(error))[:300]}).") from None
    return params if "roberta" in params else {"roberta": params}


def _shapes(config: RobertaConfig, head: str) -> Params:
    return jax.eval_shape(lambda: INIT[head](config, jax.random.key(0)))


def _check_params(found: Pretrained, head: str | None, where: str) -> None:
    """Raises InputError for the first parameter of the body and of `head` that is not as the config has it."""
    if head and head not in found.params:
        raise InputError(f"{where}: has no {HEAD_NAMES[head]}; name a model with one.")
    layers = {name.split("/")[3] for name in found.leaves if name.startswith("roberta/encoder/layer/")}
    difference = ""
    if len(layers) != found.config.num_hidden_layers:  # before the shapes of as many are made
        difference = f"{len(layers)} layers where config.json asks for {found.config.num_hidden_layers}"
    else:
        shapes = _shapes(found.config, head or LM_HEAD)
        trees = (shapes, found.params) if head else ({"roberta": shapes["roberta"]}, {"roberta": found.body})
        wanted, own = ({name: leaf.shape for name, leaf in flatten_dict(tree, sep="/").items()} for tree in trees)
        odd = sorted(name for name in wanted.keys() | own.keys() if wanted.get(name) != own.get(name))
        if odd:
            difference = f"{odd[0]} is {own.get(odd[0])} where config.json asks for {wanted.get(odd[0])}"
    if difference:
        raise InputError(f"{where}: its weights are not those of its config.json: {difference}; take a good copy.")
