"""Scores of words by a plain loop, from the definition in mlm/inference/comparison.py alone, for tests.

    PYTHON tests/pytorch/words.py TEXTS.json COUNT FOLDER...

Prints {"words": [[document, start, stop], ...], "scores": [[nats, match is exact] of each word] of each FOLDER]}.
"""

import hashlib
import json
import pathlib
import re
import sys

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer


def hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


texts = json.loads(pathlib.Path(sys.argv[1]).read_text())
count = int(sys.argv[2])
words = []
for document, text in enumerate(texts):
    for number, match in enumerate(re.finditer(r"[^\W_]+(?:'[^\W_]+)*", text)):
        words.append((hashed(f"0 {hashed(text)} {number}"), document, *match.span()))
words = sorted(place for _, *place in sorted(words)[:count])
scores = []
for folder in sys.argv[3:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    scores.append([])
    for document, start, stop in words:
        settings = {
            "return_offsets_mapping": True,
            "split_special_tokens": True,
            "return_tensors": "pt",
        }
        encoded = tokenizer(texts[document], **settings)
        offsets = encoded.pop("offset_mapping")[0].tolist()
        places = [
            place for place, (begin, end) in enumerate(offsets) if begin < stop and end > start
        ]
        # a token of the space before the word
        if texts[document][slice(*offsets[places[0] - 1])] == " ":
            places = [places[0] - 1, *places]
        labels = encoded["input_ids"][0, places].clone()
        encoded["input_ids"][0, places] = tokenizer.mask_token_id
        with torch.no_grad():
            log_probs = model(**encoded).logits[0, places].log_softmax(-1)
        nats = -log_probs[range(len(places)), labels].sum().item()
        scores[-1].append([nats, bool((log_probs.argmax(-1) == labels).all())])
print(json.dumps({"words": words, "scores": scores}))
