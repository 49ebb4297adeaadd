r"""BANKING77, 77 intents of bank customers, with the hyperparameters of the BERT-on-TPU fine-tuning post.

Command:   python -m mlm classify --config=configs/classify_banking77.py --workdir=runs/banking77 \
             --config.train.init_from=runs/quickstart
           with train.csv and test.csv of github.com/PolyAI-LDN/task-specific-datasets (banking_data) in banking77/.
           init_from is a workdir or a transformers folder whose model has at least classify.length positions.
Hardware:  one TPU v3-8 (4 chips, 8 cores), as in the post, 32 rows per core; a small model runs on anything.
Time:      not measured here. The post ("Getting started with Transformers and TPU using PyTorch", philschmid.de,
           January 2023) takes 220 s with compilation, every row padded to 512 tokens: 481 rows per second.
Score:     not measured here for a base model. The post's bert-base-uncased has a weighted F1 of 0.285, 0.814 and 0.915
           after its three epochs.
           Measured with a small model on two CPU cores, 938 steps of 64 rows, six epochs: accuracy on the 3,080 test
           rows over three seeds, from the model of configs/quickstart_modernbert.py (evaluation loss 3.542) and from
           random weights of the same shape:
             pretrained  median 0.8792  (0.8773 to 0.8860)
             random      median 0.8760  (0.8679 to 0.8795)
           python -m mlm sweep classify --config=configs/classify_banking77.py --workdir=runs/banking77 \
             --vary "train.init_from=runs/quickstart_modernbert,''" train.seed=0,1,2 --config.classify.length=64 \
             --config.shards.length=64 --config.model.positions=64 --config.data.global_batch=64 \
             --config.optimizer.learning_rate=1e-3 --config.schedule.warmup=0.1 --config.train.epochs=6 \
             --config.tokenizer.path=runs/quickstart_modernbert/tokenizer --config.model.family=modernbert \
             --config.model.layers=2 --config.model.hidden_size=128 --config.model.heads=4 \
             --config.model.intermediate_size=192
           A RoBERTa of that width and depth, with an evaluation loss of 3.918 (configs/quickstart.py with
           --config.model.intermediate_size=512 --config.optimizer.muon_iterations=5 --config.train.steps=1200; the
           command with runs/quickstart in place of runs/quickstart_modernbert, --config.model.family=roberta and
           --config.model.intermediate_size=512):
             pretrained  median 0.7851  (0.7821 to 0.7955)
             random      median 0.7425  (0.7065 to 0.7727)

From the post: learning rate 3e-4, linear with 100 steps of warmup (of 120 in all), 3 epochs, 32 rows on each of 8
cores, AdamW of transformers with its defaults (betas 0.9 and 0.999, epsilon 1e-6, no weight decay), float32, dropout
0.1 (as in bert-base-uncased), evaluation on the test rows after each epoch. The length is our choice: no row has more
than 128 tokens, so nothing is truncated, and a batch is padded to its longest row.

As in the post, the best checkpoint is selected on the rows it is scored on: for an unbiased score, hold out some
training rows for classify.validation, and set classify.test.
"""

from ml_collections import ConfigDict

from configs.base import get_config as base


def get_config() -> ConfigDict:
    """Returns the config."""
    config = base()
    config.classify.train = "csv:banking77/train.csv"
    config.classify.validation = "csv:banking77/test.csv"
    config.classify.label = "category"
    config.data.global_batch = 256
    config.model.dtype = "float32"
    config.optimizer.learning_rate = 3e-4
    config.optimizer.b2 = 0.999
    config.optimizer.weight_decay = 0.0
    config.schedule.warmup = 100
    config.train.steps = 0
    config.train.epochs = 3.0
    config.evaluate.every = 0  # after each epoch
    config.evaluate.batch = 64
    config.checkpoint.every = 0
    config.log.every = 10
    return config
