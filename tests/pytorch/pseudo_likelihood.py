"""Pseudo-log-likelihoods in PyTorch by their definitions: `PYTHON tests/pytorch/pseudo_likelihood.py CASES`.

CASES is a JSON file, {"folder", "texts"}; prints {"original": [...], "within_word": [...]}. One sentence, one masked
token at a time, without padding.
"""

import json
import os
import pathlib
import sys

os.environ.update(USE_TORCH="1", USE_FLAX="0", USE_TF="0", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

cases = json.loads(pathlib.Path(sys.argv[1]).read_text())
tokenizer = AutoTokenizer.from_pretrained(cases["folder"])
model = AutoModelForMaskedLM.from_pretrained(cases["folder"]).eval()
found = {"original": [], "within_word": []}
for text in cases["texts"]:
    encoded = tokenizer(text)
    ids, words = torch.tensor(encoded["input_ids"]), encoded.word_ids()
    sums = dict.fromkeys(found, 0.0)
    for place, word in enumerate(words):
        if word is None:  # <s> and </s>
            continue
        rest = [other for other in range(place, len(words)) if words[other] == word]
        for name, masked in (("original", [place]), ("within_word", rest)):
            read = ids.clone()
            read[masked] = tokenizer.mask_token_id
            with torch.no_grad():
                logits = model(read[None]).logits[0, place]
            sums[name] += torch.log_softmax(logits.float(), -1)[ids[place]].item()
    for name, own in found.items():
        own.append(sums[name])
print(json.dumps(found))
