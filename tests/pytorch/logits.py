"""Saves PyTorch's logits of a folder's masked language model, at the last positions of each row.

    PYTHON tests/pytorch/logits.py FOLDER COUNT

FOLDER/rows.npz holds "ids" and "attention" [rows, length]; FOLDER/logits.npy gets the logits [rows, COUNT, vocabulary].
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForMaskedLM

folder = sys.argv[1]
count = int(sys.argv[2])
model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="sdpa").eval()
ids, attention = (
    torch.from_numpy(np.load(f"{folder}/rows.npz")[name]) for name in ("ids", "attention")
)
with torch.no_grad():
    logits = model(input_ids=ids, attention_mask=attention).logits
np.save(f"{folder}/logits.npy", logits[:, -count:].numpy())
