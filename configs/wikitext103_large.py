"""A large model on WikiText-103, 3 epochs at length 512 and batch 128: the workload of the PyTorch/XLA post.

Command:   python -m mlm run --config=configs/wikitext103_large.py --workdir=runs/wikitext103_large
Hardware:  one TPU v3-8 (4 chips, 8 cores of 16 GB), as in the post.
Time:      82 minutes. By arithmetic, not measured here: 3 epochs x 124e6 tokens (103 million words x 1.2) x 1,943.9
           MFLOP (1,906.3 body + 15% of the tail's 250.4) = 7.2e17 FLOP; / (492 TFLOP/s x 30%). The post ("Hugging Face
           on PyTorch / XLA TPUs", February 2021) gives 106.4 minutes in bfloat16 for run_mlm.py, whose head runs on
           every position: 2,156.8 MFLOP a token, 26% of the peak.
Score:     not measured here, and not the post's: its perplexity of about 3.25 is for a pretrained bert-large-uncased,
           trained further (configs/continue_wikitext103.py). From scratch, 3 epochs are too few for a good model of
           this size; use this config to measure speed, or raise train.epochs.

From the post: 24 layers of 1,024, an uncased WordPiece vocabulary of 30,522, length 512, global batch 128, 3 epochs
(about 5,700 steps), and from run_mlm.py the learning rate 5e-5, linear decay, epsilon 1e-8, b2 0.999, clipping at 1.
That learning rate is also RoBERTa-large's 4e-4 at 8,192 rows, scaled by the square root of the batch:
4e-4 x sqrt(128 / 8192) = 5e-5. We add a 6% warmup, which random weights need, and a weight decay of 0.01.

Memory:    335e6 parameters x 20 bytes (float32 parameters, two moments, gradient and its sum) = 6.7 GB per core. 128
           rows / 8 cores / 4 microbatches = 4 rows at once, whose activations take about 3.7 GB. On GPUs of 80 GB, set
           train.accumulate = 1 on eight devices and 4 on one.
"""

from ml_collections import ConfigDict

from configs.base import get_config as base


def get_config() -> ConfigDict:
    """Returns the config."""
    config = base()
    config.corpus.sources = ("hf:Salesforce/wikitext:wikitext-103-raw-v1",)
    config.tokenizer.kind = "wordpiece"
    config.tokenizer.vocab_size = 30_522
    config.tokenizer.sample_megabytes = 600.0  # all of it: 540 MB
    config.tokenizer.lowercase = True
    config.data.global_batch = 128
    config.model.hidden_size = 1024
    config.model.layers = 24
    config.model.heads = 16
    config.model.intermediate_size = 4096
    config.optimizer.learning_rate = 5e-5
    config.optimizer.b2 = 0.999
    config.optimizer.eps = 1e-8
    config.optimizer.clip_norm = 1.0
    config.schedule.warmup = 0.06
    config.train.steps = 0
    config.train.epochs = 3.0
    config.train.accumulate = 4
    config.evaluate.every = 500
    config.evaluate.batch = 64
    return config
