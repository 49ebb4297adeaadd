"""Where a model lies that a person named: in a workdir, a folder, a bucket or on the hub. Imports no jax."""

from __future__ import annotations

import re

from mlm.errors import InputError
from mlm.paths import UPath, local_folder

INDEX, SAFETENSORS, MSGPACK = "model.safetensors.index.json", "model.safetensors", "flax_model.msgpack"
DOWNLOADED = ["config.json", "*token*.json", "vocab.*", "merges.txt", "*.bpe.model"]  # from the hub, beside the weights
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "sentencepiece.bpe.model")


def is_workdir(name: str) -> bool:
    """Returns whether a folder is that of a run."""
    return (UPath(name) / "checkpoints").is_dir()


def has_tokenizer(folder: str) -> bool:
    """Returns whether a folder holds the files of a tokenizer."""
    return any((UPath(folder) / file).is_file() for file in TOKENIZERS)


def local_copy(name: str, flag: str) -> UPath:
    """Returns the folder of a model on this machine: itself, a copy of one in a bucket, or the hub's cache.

    Args:
      name: a folder, or a repository on the hub.
      flag: what the name was given with, such as "--model=", for an error.

    Raises:
      InputError: it is neither, or has no config.json.
    """
    folder = UPath(name if UPath(name).is_dir() else _download(name, flag))
    if not (folder / "config.json").is_file():
        raise InputError(f"{flag}{name}: has no config.json and no checkpoints; name a workdir or a RoBERTa folder.")
    return UPath(local_folder(str(folder)))


def _download(name: str, flag: str) -> str:
    """Returns the folder of a repository of the hub, in transformers' cache."""
    import huggingface_hub

    try:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            raise FileNotFoundError("no such folder")
        for files in ([SAFETENSORS, INDEX, "model-*.safetensors"], [MSGPACK]):
            folder = huggingface_hub.snapshot_download(name, allow_patterns=DOWNLOADED + files)
            if any((UPath(folder) / file).is_file() for file in files):
                break
        return folder
    except Exception as error:  # of the hub, of its cache, of the network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(
            f"{flag}{name}: is no folder here, and can't be had from the hub ({reason}); name a folder, or a model "
            "that is in the hub's cache."
        ) from error
