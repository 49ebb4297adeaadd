"""Where the model that a person named is: a workdir, a folder, a bucket or the Hub; and what it is. Without jax."""

import re
from collections.abc import Collection

from mlm import logs
from mlm.errors import DamageError, InputError
from mlm.paths import HUB_NAME, UPath, check_reachable, local_folder
from mlm.pretrained import checkpoint_files
from mlm.workdir import Workdir

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
MSGPACK = "flax_model.msgpack"
MSGPACK_INDEX = "flax_model.msgpack.index.json"
# transformers loads the first of these that is there: a save of one file leaves the index of an
# earlier, sharded one.
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
PRECEDENCE = (SAFETENSORS, SAFETENSORS_INDEX, *PICKLES, MSGPACK, MSGPACK_INDEX)
FROM_HUB = (
    (SAFETENSORS, SAFETENSORS_INDEX, "model-*.safetensors"),
    (MSGPACK, MSGPACK_INDEX, "flax_model-*.msgpack"),
)
# a tokenizer has one of them
TOKENIZERS = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "sentencepiece.bpe.model",
)
# from the Hub, beside the weights
DOWNLOADED = [
    "config.json",
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "*.bpe.model",
]


def split_step(name: str) -> tuple[str, int | None]:
    """Returns (WORKDIR, N) of "WORKDIR@N", and (name, None) of any other name."""
    check_reachable(name)
    match = re.fullmatch(r"(.+)@([0-9]{1,18})", name)
    if match is None or UPath(name).is_dir() or not (UPath(match[1]) / "checkpoints").is_dir():
        return name, None
    return match[1], int(match[2])


def at_step(name: str, step: int | None) -> str:
    """Returns "WORKDIR@STEP", or the name if no step is asked for; raises InputError if it has no steps."""
    if step is None:
        return name
    if split_step(f"{name}@{step}")[1] is None:
        raise InputError(
            f"--step={step}: needs a workdir with checkpoints; {name or 'no model'} is none."
        )
    return f"{name}@{step}"


def at_newest_step(name: str) -> str:
    """Returns "WORKDIR@N" of a workdir, which holds another model once it is trained on; any other name as it is."""
    folder, step = split_step(name)
    steps = checkpoint_files.complete_steps(UPath(folder) / "checkpoints") if step is None else []
    return f"{folder}@{steps[-1]}" if steps else name


def branch_source(name: str) -> tuple[str, int]:
    """Returns (WORKDIR, N) of train.branch_from; raises InputError if it is no workdir."""
    folder, step = split_step(name)
    if step is None:
        raise InputError(
            f"config.train.branch_from = {name}: no checkpoints are there; name a workdir and one of its steps, "
            "WORKDIR@STEP."
        )
    return folder, step


def is_workdir(name: str) -> bool:
    """Returns whether a name is that of a run's folder, or of one of its steps: WORKDIR@N."""
    return (UPath(split_step(name)[0]) / "checkpoints").is_dir()


def is_classifier(model: str | Workdir) -> bool:
    """Returns whether a model, named as for `load.load`, is a classifier; False for one that can't be read."""
    if isinstance(model, Workdir) or is_workdir(model):
        root = model.root if isinstance(model, Workdir) else UPath(split_step(model)[0])
        meta = checkpoint_files.newest_meta(root / "checkpoints")
        return "labels" in meta.get("dataset", ())
    try:
        config = logs.read_object(local_copy(model, "--model=") / "config.json")
    except DamageError:  # as `load` will say
        return False
    heads = ("SequenceClassification", "TokenClassification")
    return any(name.endswith(heads) for name in config.get("architectures") or ())


def milestones(workdir: Workdir) -> list[int]:
    """Returns the steps whose checkpoints are kept for good."""
    steps = checkpoint_files.complete_steps(workdir.checkpoints)
    metas = [checkpoint_files.read_meta(workdir.checkpoints, step) for step in steps]
    kept = {step for meta in metas for step in meta["milestones"]}
    return sorted(kept.intersection(steps))


def local_copy(name: str, flag: str, *, weights: bool = True) -> UPath:
    """Returns a local folder of the model that a person named with `flag`: a folder, or a repository on the Hub.

    Without `weights`, those of the Hub may be missing, if they are not in its cache.
    """
    folder = UPath(name if UPath(name).is_dir() else _download(name, flag, weights))
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{flag}{name}: has no config.json and no checkpoints; name a workdir or a transformers folder."
        )
    return UPath(local_folder(str(folder)))


def weight_file(names: Collection[str], where: str) -> str:
    """Returns which of the files of a model holds its weights; raises InputError if none does, or a pickle."""
    name = next((name for name in PRECEDENCE if name in names), None)
    if name is not None and name not in PICKLES:
        return name
    problem = f"has neither {SAFETENSORS} nor {MSGPACK}"
    if name is not None:
        problem = f"transformers would load its {name}, a pickle, which is not opened here"
    raise InputError(
        f"{where}: {problem}; load it in PyTorch and save it with save_pretrained, or remove what is not the model."
    )


def weight_files(folder: UPath) -> list[str]:
    """Returns the names of the files of weights in a folder, without the parts of several."""
    return [name for name in PRECEDENCE if (folder / name).is_file()]


def has_tokenizer(folder: UPath) -> bool:
    """Returns whether a folder has a tokenizer."""
    return any((folder / file).is_file() for file in TOKENIZERS)


def _download(name: str, flag: str, weights: bool) -> str:
    """Returns the folder of a repository in the Hub's cache."""
    import huggingface_hub

    try:
        if not re.fullmatch(HUB_NAME, name):
            raise FileNotFoundError("no such folder")
        if not weights:
            patterns = [*DOWNLOADED, SAFETENSORS_INDEX]
            folder = huggingface_hub.snapshot_download(name, allow_patterns=patterns)
            if not weight_files(UPath(folder)):
                files = set(huggingface_hub.list_repo_files(name)).difference(PICKLES)
                weight_file(files, f"{flag}{name}")
            return folder
        for files in FROM_HUB:
            folder = huggingface_hub.snapshot_download(name, allow_patterns=[*DOWNLOADED, *files])
            if weight_files(UPath(folder)):
                break
        return folder
    except InputError:
        raise
    except Exception as error:  # of the Hub, of its cache, of the network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(
            f"{flag}{name}: is not a folder here, and the Hub does not give it ({reason}); name a folder, or a model "
            "that is in the Hub's cache."
        ) from error
