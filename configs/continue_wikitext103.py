r"""BERT-large continued on WikiText-103, 3 epochs at length 512: the job of the PyTorch/XLA post.

Command:   python -m mlm run --config=configs/continue_wikitext103.py --workdir=runs/continue_wikitext103
           (from another BERT: --config.train.init_from=google-bert/bert-base-uncased, whose sizes and tokenizer are
           taken; rehearse it with --config.train.init_from=FOLDER --config.train.accumulate=1
           --config.corpus.max_documents=20000)
Hardware:  one TPU v3-8 (4 chips, 8 cores of 16 GB), as in the post. Each core takes 16 rows, 4 at once.
Time:      not measured here. The post ("Hugging Face on PyTorch / XLA TPUs", huggingface.co/blog/pytorch-xla, February
           2021) took 106.4 minutes in bfloat16 with 128 rows a step, 178.4 in float32 with 64. For an estimate, which
           is optimistic (expect 1.7 times as long, mlm/plan/README.md):
             python -m mlm plan --config=configs/continue_wikitext103.py --topology=v3-8 --records=242000 --price=2.2
           (3 x 242,000 rows are 372 million tokens, 103 million words x 1.2 an epoch; the price of a chip-hour is one
           that we knew of, on demand, for v3-8 in europe-west4: 8.80 an hour for all four).
Score:     not measured here. The post's perplexity on the validation split is about 3.25 (1.18 nats), with 64 rows:
           --config.data.global_batch=64 --config.train.accumulate=2 --config.model.dtype=float32

Changes configs/wikitext103_large.py, which has the post's text, length, batch and epochs, and run_mlm.py's optimizer:
the start, its tokenizer and its family, and what run_mlm.py does by default: no warmup, no weight decay. Where the
lines are joined to rows as there, ours leave out empty lines and those that come again. The sizes are the model's, so
that `plan` needs no Hub.
"""

from ml_collections import ConfigDict

from configs.wikitext103_large import get_config as wikitext103_large


def get_config() -> ConfigDict:
    """Returns the config."""
    config = wikitext103_large()
    config.train.init_from = "google-bert/bert-large-uncased"
    config.tokenizer.path = config.train.init_from
    config.model.family = "bert"
    config.model.layer_norm_eps = 1e-12
    config.optimizer.weight_decay = 0.0
    config.schedule.warmup = 0.0
    return config
