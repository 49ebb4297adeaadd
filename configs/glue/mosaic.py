"""GLUE as used to evaluate MosaicBERT (Portes et al., 2023), with the settings of its code (mosaicml/examples).

Command: python -m mlm glue --model=runs/mine --workdir=runs/glue --protocol=mosaic
Runs:    25: one setting per task, and several seeds for the small ones. RTE, MRPC and STS-B start from MNLI's model.
Score:   not measured here.
"""

KEYS = ("optimizer.learning_rate", "optimizer.weight_decay", "train.epochs", "data.global_batch")
TASKS = {
    "mnli": (5e-5, 5e-6, 3.0, 48),
    "rte": (1e-5, 1e-5, 3.0, 16),
    "qqp": (3e-5, 3e-6, 5.0, 16),
    "cola": (5e-5, 5e-6, 10.0, 32),
    "mrpc": (8e-5, 8e-6, 10.0, 32),
    "qnli": (1e-5, 1e-6, 10.0, 16),
    "sst2": (3e-5, 3e-6, 3.0, 16),
    "stsb": (3e-5, 3e-6, 10.0, 32),
    "boolq": (1e-5, 1e-5, 3.0, 16),  # these two are not in it: as RTE
    "cb": (1e-5, 1e-5, 3.0, 16),
}


def get_protocol() -> dict:
    """Returns the protocol, see `Protocol` in mlm/glue/tasks.py."""
    return {
        "settings": {
            "optimizer.b1": 0.9,
            "optimizer.b2": 0.98,
            "optimizer.eps": 1e-6,
            "schedule.warmup": 0.06,
            "classify.length": 256,
        },
        "own": {name: dict(zip(KEYS, values, strict=True)) for name, values in TASKS.items()},
        "seeds": {"": 1, "rte": 5, "stsb": 5, "mrpc": 5, "sst2": 3, "cola": 4},
        "from_mnli": ("rte", "mrpc", "stsb"),
    }
