"""The models: transformers' Flax classes, computed by mlm's own linen modules, and ModernBERT, which it has not.

from mlm.model import RobertaForMaskedLM

model = RobertaForMaskedLM.from_pretrained("FacebookAI/roberta-base")
logits = model(input_ids, attention_mask).logits
"""

import importlib
from typing import Any

HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification")
MODULES = {"Bert": "bert", "Roberta": "roberta", "RobertaPreLayerNorm": "roberta", "FlaxModernBert": "flax_modernbert"}
CLASSES = {f"{name}For{head}": module for name, module in MODULES.items() for head in HEADS}


def __getattr__(name: str) -> Any:
    """Imports a model's class when it is used: commands import this package before they import jax."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{CLASSES[name]}"), name)
