"""Saves PyTorch's logits of a folder's masked language model, at the last positions of a row.

    PYTHON tests/pytorch/logits.py FOLDER COUNT

FOLDER/ids.npy holds the row, ids [1, length]; FOLDER/logits.npy gets the logits [1, COUNT, vocabulary].
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForMaskedLM

folder, count = sys.argv[1], int(sys.argv[2])
model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="sdpa").eval()
with torch.no_grad():
    logits = model(input_ids=torch.from_numpy(np.load(f"{folder}/ids.npy"))).logits
np.save(f"{folder}/logits.npy", logits[:, -count:].numpy())
