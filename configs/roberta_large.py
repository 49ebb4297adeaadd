"""RoBERTa-large from scratch: the published recipe (Liu et al., 2019, arXiv 1907.11692, table 9) on public text.

Command:   python -m mlm run --config=configs/roberta_large.py --workdir=gs://BUCKET/roberta_large
           (the same on every host)
Hardware:  256 chips of TPU v5e (64 hosts of 4), as it stands.
Time:      3.1 days there, 25 days on 32 chips. By arithmetic, not measured here: 2.1e12 tokens, as for
           roberta_base, x 1,962.1 MFLOP (1,906.3 body + 15% of the tail's 371.7) = 4.1e21 FLOP; / (256 x 197 TFLOP/s x
           30%). The authors took about a day on 1,024 V100 for the first 100,000 of the 500,000 steps.
Score:     not measured here. Published for this model: 90.2 on MNLI-m and 96.4 on SST-2 (development sets, table 4).

Changes configs/roberta_base.py, which explains text, vocabulary and batch, according to table 9: 24 layers of 1,024
with 16 heads, learning rate 4e-4, 6% warmup (30,000 steps).

Memory:    355e6 parameters x 16 bytes (float32 parameters, two moments, gradient) = 5.7 GB on each device. Activations
           of 32 rows of 512 take about 30 GB, too much for 16 GB; with remat, which recomputes them in the backward
           pass, they take 24 layers x 32 MiB of inputs and one layer's 1.2 GiB. So 8,192 rows / 256 devices = 32 rows
           need no accumulation; on 32 devices set train.accumulate = 8, on one GPU of 80 GB train.accumulate = 64 (128
           rows). mesh.fsdp = 8, for example, shards the 5.7 GB eight ways, at the cost of gathering each layer's
           parameters.
"""

from ml_collections import ConfigDict

from configs.roberta_base import get_config as roberta_base


def get_config() -> ConfigDict:
    """Returns the config."""
    config = roberta_base()
    config.model.hidden_size = 1024
    config.model.layers = 24
    config.model.heads = 16
    config.model.intermediate_size = 4096
    config.model.remat = True
    config.optimizer.learning_rate = 4e-4
    config.schedule.warmup = 0.06
    config.train.accumulate = 1
    return config
