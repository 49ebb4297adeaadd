"""Models that PyTorch's transformers writes, for tests: `PYTHON tests/pytorch/write.py FOLDER MODEL_TYPE...`.

FOLDER holds ids.json, rows of token ids of one length. A model, random, in float32, is written to FOLDER/TYPE/whole
and, in several files, to FOLDER/TYPE/parts, its logits to FOLDER/TYPE/logits.json,
and the standard deviation and the largest value of each parameter as it was initialised, under each of two heads, to
FOLDER/TYPE/drawn.json. Biases and normalizations are random too: those of a fresh model are alike, and would hide a
mistake.
"""

import json
import os
import pathlib
import sys

os.environ.update(
    USE_TORCH="1", USE_FLAX="0", USE_TF="0", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error"
)

import torch
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 34,
    "pad_token_id": 1,
    "num_labels": 64,  # a kernel of 4,096 draws
}
HEADS = {
    "MaskedLM": AutoModelForMaskedLM,
    "SequenceClassification": AutoModelForSequenceClassification,
}


def write(folder: pathlib.Path, model_type: str, ids: list[list[int]]) -> None:
    torch.manual_seed(0)
    if model_type == "modernbert":
        sizes = {
            "local_attention": 8,
            "bos_token_id": 0,
            "cls_token_id": 0,
            "eos_token_id": 2,
            "sep_token_id": 2,
        }
    else:
        sizes = {"type_vocab_size": 2 if model_type == "bert" else 1, "layer_norm_eps": 1e-5}
    config = AutoConfig.for_model(model_type, **SIZES, **sizes)
    fresh = {
        name: head.from_config(config, attn_implementation="eager").eval()
        for name, head in HEADS.items()
    }
    drawn = {
        head: {
            name: [value.std().item(), value.abs().max().item()]
            for name, value in model.named_parameters()
        }
        for head, model in fresh.items()
    }
    folder.mkdir()
    (folder / "drawn.json").write_text(json.dumps(drawn))
    model = fresh["MaskedLM"]
    randomize(model)
    with torch.no_grad():
        logits = model(torch.tensor(ids)).logits
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "parts", max_shard_size="150KB")
    (folder / "logits.json").write_text(json.dumps(logits.tolist()))


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


root = pathlib.Path(sys.argv[1])
for name in sys.argv[2:]:
    write(root / name, name, json.loads((root / "ids.json").read_text()))
