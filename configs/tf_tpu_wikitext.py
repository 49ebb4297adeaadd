"""The recipe of transformers' TF-TPU example: RoBERTa-base at length 128 on WikiText-103, with a Unigram tokenizer.

Command:   python -m mlm run --config=configs/tf_tpu_wikitext.py --workdir=gs://BUCKET/tf_tpu_wikitext
Hardware:  one TPU v3-8 (4 chips, 8 cores of 16 GB), as in the example; 256 rows per core, in two microbatches.
Time:      75 hours. By arithmetic, not measured here: 293,500 steps x 2,048 rows x 128 tokens = 7.7e10 tokens; x
           514.5 MFLOP (491.9 body + 15% of the tail's 150.6) = 4.0e19 FLOP; / (492 TFLOP/s x 30%). The published run
           (huggingface.co/tf-tpu/roberta-base-epochs-500-no-wd) dates its epochs 0 to 346 from 6 to 10 April 2023.
Score:     not measured here. The published run's card: validation loss 0.80 nats at epoch 400 of 500, accuracy 0.1206
           over all positions, which is 80% of the 15% predicted. Losses with different tokenizers can't be compared;
           bits per byte can.

From examples/tensorflow/language-modeling-tpu of transformers 4: learning rate 1e-4, 5% warmup, linear decay to 0,
weight decay 1e-3 on all but biases and norms, masks 15%, RoBERTa-base's config with dropout 0.1, bfloat16; Keras'
AdamW with betas 0.9 and 0.999, epsilon 1e-8, no clipping; a vocabulary of 25,000 (the README's command). The mask token
is RoBERTa's, `<mask>`: fill "... <mask> ..." where the example fills "... [MASK] ...".

The batch size is inferred: the card's schedule has 14,675 + 278,825 = 293,500 steps in 500 epochs, 587 per epoch. At
1.25 to 1.5 tokens per word the 103 million words are 1.0 to 1.2 million rows of 128, so a step took 1,700 to 2,050
rows. The script's default, 8 rows per core, is a batch of 64: --config.data.global_batch=64.

The test split is written to shards/test as well, as the example tokenizes it; after training, `evaluate --split=test`
scores it. To train on shards written by the example, set shards.dir to their folder and tokenizer.path to their
tokenizer; `run` uses both as they are.
"""

from ml_collections import ConfigDict

from configs.base import get_config as base


def get_config() -> ConfigDict:
    """Returns the config."""
    config = base()
    config.corpus.sources = ("hf:Salesforce/wikitext:wikitext-103-raw-v1",)
    config.tokenizer.vocab_size = 25_000
    config.tokenizer.sample_megabytes = 600.0  # all of it: 540 MB
    config.shards.length = 128
    config.data.global_batch = 2048
    config.optimizer.learning_rate = 1e-4
    config.optimizer.b2 = 0.999
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 1e-3
    config.schedule.warmup = 0.05
    config.train.steps = 293_500
    config.train.accumulate = 2
    config.evaluate.batch = 1024
    return config
