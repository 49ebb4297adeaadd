"""The models: transformers' Flax classes, computed by mlm's own linen modules, and ModernBERT, which it has not.

from mlm.model import RobertaForMaskedLM

model = RobertaForMaskedLM.from_pretrained("FacebookAI/roberta-base")
logits = model(input_ids, attention_mask).logits
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Makes a model's class when it is used: commands import this package before they import jax."""
    family, _, head = name.removeprefix("Flax").partition("For")
    if head in ("MaskedLM", "SequenceClassification", "TokenClassification"):
        from mlm.model import families

        if model_class := families.model_class(family, head):
            return model_class
    raise AttributeError(f"module {__name__} has no attribute {name}")
