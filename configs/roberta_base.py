"""RoBERTa-base from scratch: the published recipe (Liu et al., 2019, arXiv 1907.11692, table 9) on public text.

Command:   python -m mlm run --config=configs/roberta_base.py --workdir=gs://BUCKET/roberta_base
           (the same on every host; rehearse it with --config.train.steps=50 --config.corpus.max_documents=100000)
Hardware:  32 chips of TPU v5e (8 hosts of 4), as it stands; for others, see "Batch" below.
Time:      7.4 days there, 22 hours on 256 chips. By arithmetic, not measured here: 500,000 steps x 8,192 rows x 512
           tokens = 2.1e12 tokens; x 574.4 MFLOP (534.4 body + 15% of the tail's 267.0) = 1.21e21 FLOP; / (32 x 197
           TFLOP/s x 30%), half of the utilization that `plan` estimates, which is optimistic.
Score:     not measured here. Published for this model: 87.6 on MNLI-m and 94.8 on SST-2 (development sets, fairseq's
           examples/roberta). For the validation loss, table 3 of the paper gives a perplexity of 3.77 (1.33 nats) after
           31,000 steps of this batch on 16 GB of books and Wikipedia.

From table 9: 500,000 steps, batch 8,192, 4.8% warmup (24,000 steps), linear decay to 0. Its learning rate 6e-4, betas
0.9 and 0.98, epsilon 1e-6, weight decay 0.01, no clipping and dropout 0.1 are already the base config's values.
The warmup is a fraction, so for a shorter run change only train.steps.

Text:      the original 160 GB (Wikipedia and books, CC-News, OpenWebText, Stories) is no longer available. These three
           are, as plain parquet with a "text" field: Wikipedia (20 GB), OpenWebText (40 GB, one of the original five)
           and FineWeb-Edu's sample of 10e9 tokens (45 GB) in place of the other web text. About 105 GB at 4.4 bytes
           per token are 24e9 tokens: this run reads them 88 times; the original read its text about 58 times. All
           sizes are rounded; the shards take about 80 GB (3.3 bytes per token).
Vocabulary: RoBERTa's 50,265 entries are GPT-2's 50,257, 4 special tokens, 3 unused fillers, and <mask>. Ours has the
           same size, trained on this text. The model pads it to 50,304 = 393 x 128, the next size that fills TPU tiles.
Batch:     8,192 rows / (data x fsdp devices) / train.accumulate = rows per device at once:
             v5e, 16 GB    32 chips x 8 = 32 rows;  256 chips x 1 = 32 rows;  8 chips x 32 = 32 rows
             one GPU of 80 GB or more         x 64 = 128 rows
           Accumulation and mesh change the result only by rounding; lanes (64; with 128 hosts, two share one) stay
           fixed for the life of a run. For another batch size B, keep the tokens constant (steps x 8192 / B) and try a
           learning rate of 6e-4 x sqrt(B / 8192).
"""

from ml_collections import ConfigDict

from configs.base import get_config as base


def get_config() -> ConfigDict:
    """Returns the config."""
    config = base()
    config.corpus.sources = (
        "hf:wikimedia/wikipedia:20231101.en",
        "hf:Skylion007/openwebtext",
        "hf:HuggingFaceFW/fineweb-edu:sample-10BT",
    )
    config.corpus.weights = (1.0, 1.0, 1.0)
    config.corpus.streaming = True  # no second copy of the text on disk
    # 12e6 tokens: an evaluation costs as much as 3 steps
    config.corpus.validation_fraction = 0.0005
    config.tokenizer.kind = "bpe"
    config.tokenizer.vocab_size = 50_265
    config.tokenizer.sample_megabytes = 512.0
    config.shards.count = 1024
    config.shards.validation_count = 16
    config.data.global_batch = 8192
    config.data.lanes = 64
    config.schedule.warmup = 0.048
    config.train.steps = 500_000
    config.train.accumulate = 8
    config.model.remat_feed_forward = 2
    config.evaluate.every = 5_000
    config.evaluate.batch = 1024
    config.log.every = 100
    return config
