"""GLUE with one learning rate and one seed, to check that a model learns at all; not a published protocol.

Command: python -m mlm glue --model=runs/mine --workdir=runs/glue --protocol=quick
Runs:    one per task.
"""


def get_protocol() -> dict:
    """Returns the protocol, see `Protocol` in mlm/glue/tasks.py."""
    return {
        "settings": {
            "optimizer.learning_rate": 5e-5,
            "optimizer.b1": 0.9,
            "optimizer.b2": 0.98,
            "optimizer.eps": 1e-6,
            "optimizer.weight_decay": 0.01,
            "schedule.warmup": 0.06,
            "train.epochs": 3.0,
            "data.global_batch": 32,
            "classify.length": 128,
        },
        "seeds": {"": 1},
    }
