"""ModernBERT-large, started from base: the published recipe's first stage (Warner et al., 2024, arXiv 2412.13663).

Command:   python -m mlm run --config=configs/modernbert_large.py --workdir=gs://BUCKET/modernbert_large
           --config.tokenizer.path=gs://BUCKET/modernbert_base/tokenizer
           --config.train.init_from=gs://BUCKET/modernbert_base@382725
           (the same on every host; from the last step of configs/modernbert_base.py, with its tokenizer)
Hardware:  64 chips of TPU v5e (16 hosts of 4), as it stands.
Time:      11.9 days there. By arithmetic, not measured here: 1.719e12 tokens x 2,268.8 MFLOP (2,157.7 body + 30% of the
           tail's 370.4) = 3.90e21 FLOP; / (64 x 197 TFLOP/s x 30%).
           `plan --config=configs/modernbert_large.py --topology=v5e:8x8 "--config.data.batch_stages=()"` estimates
           the time of a step of 4,928 rows, and its memory (8.9 of 16.9 GB a chip); it is optimistic.
Score:     not measured here. Published for this model after all stages: 90.8 on MNLI and 97.1 on SST-2 (development
           sets, the paper's table of GLUE).

Changes configs/modernbert_base.py, which explains text and vocabulary, according to the authors' repository (commit
00220af, yamls/modernbert/modernbert-large-pretrain.yaml): 28 layers of 1,024 with 16 heads and 2,624 gated units, a
rate of 5e-4 after a warmup of 2e9 tokens. Weight decay: 1e-5 / 5e-4 = 0.02.

Start:     model.init = tiled: base's parameters in the middle of each tensor, wrapped around; nothing is rescaled, as
           in their src/bert_layers/initialization.py. 2 heads of 64 come before base's 12, and 2 after them. Their
           layer i copies layer round(22 i / 28), global or not; here global layers copy global ones, and local ones
           local ones.
Batch:     448 rows growing to 4,928 over 10e9 tokens, here in five stages of 2e9 tokens: 4,360, 1,453, 872, 623 and 484
           steps of 448, 1,344, 2,240, 3,136 and 4,032 rows. 338,666 steps of 4,928 rows read the remaining 1,709e9
           tokens: 346,458 steps in all. The warmup's 2e9 tokens are 4,360 steps of 448 rows. 4,928 rows / 64 devices
           / 7 = 11 rows at once on each, with remat; data.lanes and train.accumulate divide the rows of all stages.
Restart:   the authors report that 5e-4 was too high and made them restart: 900e9 tokens at 5e-4, then 800e9 at 5e-5
           with a weight decay of 1e-6, which is 0.02 again. To do the same, keep step 184,160
           (--config.checkpoint.milestones=184160) and continue in another workdir with
           --config.train.branch_from=gs://BUCKET/modernbert_large@184160
           --config.optimizer.learning_rate=5e-5 --config.train.init_from= --config.model.init=stock
"""

from ml_collections import ConfigDict

from configs.modernbert_base import get_config as modernbert_base


def get_config() -> ConfigDict:
    """Returns the config."""
    config = modernbert_base()
    config.tokenizer.path = "runs/modernbert_base/tokenizer"
    config.data.global_batch = 4928
    config.data.batch_stages = ((448, 4_360), (1344, 1_453), (2240, 872), (3136, 623), (4032, 484))
    config.model.layers = 28
    config.model.hidden_size = 1024
    config.model.heads = 16
    config.model.intermediate_size = 2624
    config.model.remat = True
    config.optimizer.learning_rate = 5e-4
    config.optimizer.weight_decay = 0.02
    config.schedule.warmup = 4_360
    config.train.init_from = "runs/modernbert_base@382725"
    config.model.init = "tiled"
    config.train.steps = 346_458
    config.train.accumulate = 7
    return config
