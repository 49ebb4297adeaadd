"""Prints the loss of a folder's RobertaForMaskedLM in PyTorch, for tests/bench/test_quality.py.

    PYTHON tests/pytorch/masked_loss.py FOLDER ROWS.npz

ROWS.npz holds "ids", "attention" and "labels" [rows, length]; labels are -100 where nothing is predicted.
"""

import sys

import numpy as np
import torch
from transformers import RobertaForMaskedLM

model = RobertaForMaskedLM.from_pretrained(sys.argv[1]).eval()
ids, attention, labels = (torch.from_numpy(np.load(sys.argv[2])[name]) for name in ("ids", "attention", "labels"))
with torch.no_grad():
    print(model(input_ids=ids, attention_mask=attention, labels=labels).loss.item())
