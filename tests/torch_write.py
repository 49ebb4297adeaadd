"""A model that PyTorch's transformers writes, for tests/test_warm_start_torch.py: `PYTHON tests/torch_write.py FOLDER`.

FOLDER holds ids.json, rows of token ids of one length. The model, random, in float32, is written to FOLDER/whole and,
in several files, to FOLDER/parts, and what it gives for the rows to FOLDER/logits.json. Biases and normalizations are
random too: those of a fresh model are alike, and would hide a mistake.
"""

import json
import os
import pathlib
import sys

os.environ.update(USE_TORCH="1", USE_FLAX="0", USE_TF="0", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from transformers import RobertaConfig, RobertaForMaskedLM

folder = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
config = RobertaConfig(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=34,
    type_vocab_size=1,
    layer_norm_eps=1e-5,
)
model = RobertaForMaskedLM(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    logits = model(torch.tensor(json.loads((folder / "ids.json").read_text()))).logits
model.save_pretrained(folder / "whole")
model.save_pretrained(folder / "parts", max_shard_size="150KB")
(folder / "logits.json").write_text(json.dumps(logits.tolist()))
