"""GLUE as RoBERTa's authors fine-tune on it (Liu et al., 2019, table 10): single models, the median of five seeds.

Command: python -m mlm glue --model=runs/mine --workdir=runs/glue --protocol=roberta
Runs:    30 per task: three learning rates, two batch sizes, five seeds.
Score:   not measured here. Published for RoBERTa-base on the development sets (fairseq, examples/roberta/README.md):
         MNLI 87.6, QNLI 92.8, QQP 91.9, RTE 78.7, SST-2 94.8, MRPC 90.2, CoLA 63.6, STS-B 91.2.
"""


def get_protocol() -> dict:
    """Returns the protocol, see `Protocol` in mlm/glue/tasks.py."""
    return {
        "settings": {
            "optimizer.b1": 0.9,
            "optimizer.b2": 0.98,
            "optimizer.eps": 1e-6,
            "optimizer.weight_decay": 0.1,
            "schedule.warmup": 0.06,
            "train.epochs": 10.0,
            "classify.length": 512,
        },
        "grid": {"optimizer.learning_rate": (1e-5, 2e-5, 3e-5), "data.global_batch": (16, 32)},
        "seeds": {"": 5},
    }
