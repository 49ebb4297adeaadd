"""Exports that several files of this room test."""

import json
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
from safetensors.numpy import load_file, save_file

SCORES = {
    "step": 5,
    "kind": "eval",
    "loss": 3.25,
    "perplexity": 25.79,
    "accuracy": 0.31,
    "predictions": 12345,
}
# of classifiers: arguments of `trained_classifier.make`
KINDS = {
    "classes": {},
    "tokens": {"of_tokens": True},
    "pairs": {"pair": True},
    "regression": {"labels": ()},
    "modernbert": {"family": "modernbert"},
    "prelayernorm": {"family": "roberta_prelayernorm"},
    "real-bert pairs": {"family": "bert", "pair": True, "is_bert": True},
}


def change_tensors(folder: pathlib.Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def damage_embedding(folder: pathlib.Path) -> None:
    name = "roberta.embeddings.position_embeddings.weight"
    change_tensors(folder, lambda tensors: np.add.at(tensors[name], (20, 3), 0.02))


def damage_name(folder: pathlib.Path) -> None:
    names = ("lm_head.layernorm.weight", "lm_head.layer_norm.weight")
    change_tensors(folder, lambda tensors: tensors.update({names[0]: tensors.pop(names[1])}))


def damage_tokenizer(folder: pathlib.Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab[10], vocab[11] = vocab[11], vocab[10]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def damage_ranks(folder: pathlib.Path) -> None:
    proof = json.loads((folder / "proof.json").read_text())
    proof["rows"][0]["fillings"][0].reverse()
    (folder / "proof.json").write_text(json.dumps(proof))


def damage_labels(folder: pathlib.Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    names = list(content["id2label"].values())
    content["id2label"] = dict(zip(content["id2label"], [*names[1:], names[0]], strict=True))
    (folder / "config.json").write_text(json.dumps(content))


def damaged(folder, target: pathlib.Path, damage) -> pathlib.Path:
    damage(copy := pathlib.Path(shutil.copytree(str(folder), target)))
    return copy
