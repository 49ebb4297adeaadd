"""transformers' pipeline("fill-mask") in PyTorch: `PYTHON tests/pytorch/fill_mask.py CASES`.

CASES is a JSON file, [{"folder", "text", "targets", "top_k"}, ...]; prints a list of fillings for each mask of each.
"""

import json
import os
import pathlib
import sys

os.environ.update(USE_TORCH="1", USE_FLAX="0", USE_TF="0", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

from transformers import pipeline

cases = json.loads(pathlib.Path(sys.argv[1]).read_text())
fillers = {folder: pipeline("fill-mask", folder, device="cpu") for folder in {case["folder"] for case in cases}}
found = []
for case in cases:
    wishes = {"targets": case["targets"]} if case["targets"] else {}
    masks = fillers[case["folder"]](case["text"], top_k=case["top_k"], **wishes)
    masks = masks if isinstance(masks[0], list) else [masks]
    found.append([[{key: f[key] for key in ("token", "token_str", "score")} for f in mask] for mask in masks])
print(json.dumps(found))
