"""Keys that a run takes from the model of train.init_from unless its config sets them: sizes, vocabulary, tokenizer.

A key is set if the command line sets it, or if the config file has another value than
configs/base.py, but for a file that names another model: its sizes are that model's.
"""

from collections.abc import Collection
from typing import Any

from mlm import config as configs
from mlm import logs
from mlm.config_rules import MODERNBERT
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files, load, locate, model_config

INIT_FROM = "train.init_from"
SIZES = tuple(
    f"model.{key}" for key in ("hidden_size", "layers", "heads", "intermediate_size", "positions")
)
MODEL = (
    *SIZES,
    *(f"model.{key}" for key in ("family", "activation", "layer_norm_eps", *MODERNBERT)),
)
TOKENIZER = ("tokenizer.path", "tokenizer.vocab_size")
# or trains one
CHOOSES_TOKENIZER = frozenset({*TOKENIZER, "tokenizer.kind", "tokenizer.lowercase"})


def values(
    flat: dict[str, Any],
    overridden: Collection[str],
    named_by_file: str,
    *,
    task: str,
    workdir: str,
) -> dict[str, Any]:
    """Returns the keys that differ from the flattened config; raises InputError for a model that can't be read.

    `named_by_file` is train.init_from as the config file has it. Once the workdir has a checkpoint,
    they are those of its config, and the model need not be there any more.
    """
    base = configs.flatten(configs.load(str(configs.BASE), []))
    is_set = set(overridden)
    if INIT_FROM not in overridden or named_by_file in ("", flat[INIT_FROM]):
        is_set |= {key for key, value in flat.items() if value != base.get(key)}
    source = saved(workdir, flat[INIT_FROM]) or _of_model(flat[INIT_FROM])
    # the model decides, but for the tokenizer, which must fit it
    if task == configs.CLASSIFICATION:
        kept = is_set & {"tokenizer.path"}
        return {
            key: value for key, value in source.items() if value != flat[key] and key not in kept
        }
    if "model.family" in is_set and flat["model.family"] != source["model.family"]:
        return {}
    kept = is_set.union(SIZES) if flat["model.init"] == "tiled" else is_set
    inherited = {key: source[key] for key in MODEL if key in source and key not in kept}
    if not is_set & CHOOSES_TOKENIZER and _has_no_other_tokenizer(
        workdir, source.get("tokenizer.path")
    ):
        inherited |= {key: source[key] for key in TOKENIZER if key in source}
    if "shards.length" not in is_set:
        positions = inherited.get("model.positions", flat["model.positions"])
        inherited["shards.length"] = min(flat["shards.length"], positions)
    return {key: value for key, value in inherited.items() if value != flat[key]}


def _of_model(name: str) -> dict[str, Any]:
    """Returns the keys of `model`, and of `tokenizer` if it has one, that describe the model `name`."""
    model = load.load(name, head=None, flag=load.INIT_FROM, headers=True)
    keys = model_config.keys_of(model.config)
    if locate.has_tokenizer(UPath(model.tokenizer)):
        path = f"{locate.split_step(name)[0]}/tokenizer" if locate.is_workdir(name) else name
        keys |= {"tokenizer.path": path, "tokenizer.vocab_size": model.config.vocab_size}
    return keys


def saved(workdir: str, init_from: str) -> dict[str, Any]:
    """Returns these keys of the run's checkpoints, {} if there are none or they started from another model."""
    meta = checkpoint_files.newest_meta(UPath(workdir) / "checkpoints") if workdir else {}
    if not meta or meta["config"].train.init_from != init_from:
        return {}
    config = configs.flatten(meta["config"])
    return {key: config[key] for key in (*MODEL, *TOKENIZER)}


def _has_no_other_tokenizer(workdir: str, path: str | None) -> bool:
    """Returns whether the workdir has no tokenizer yet, or a copy of the one at `path`."""
    folder = UPath(workdir) / "tokenizer"
    if not workdir or not (folder / "tokenizer.json").is_file():
        return True
    return logs.read_object(folder / "recipe.json") == {"path": path}
