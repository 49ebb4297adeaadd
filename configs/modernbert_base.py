"""ModernBERT-base from scratch: the published recipe's first stage (Warner et al., 2024, arXiv 2412.13663).

Command:   python -m mlm run --config=configs/modernbert_base.py --workdir=gs://BUCKET/modernbert_base
           (the same on every host; rehearse it with --config.train.steps=500 --config.corpus.max_documents=100000
           "--config.data.batch_stages=()" --config.schedule.warmup=50)
Hardware:  32 chips of TPU v5e (8 hosts of 4), as it stands.
Time:      8.5 days there. By arithmetic, not measured here: 1.719e12 tokens x 810.5 MFLOP (733.9 body + 30% of the
           tail's 255.1) = 1.39e21 FLOP; / (32 x 197 TFLOP/s x 30%).
Score:     not measured here. Published for this model after all stages: 89.1 on MNLI and 96.0 on SST-2 (development
           sets, the paper's table of GLUE).

From the authors' repository (AnswerDotAI/ModernBERT, yamls/modernbert/modernbert-base-pretrain.yaml): sizes, 1,024
tokens, 30% masks, StableAdamW at 8e-4, betas 0.9 and 0.98, epsilon 1e-6, no clipping, a rotary base of 10,000
everywhere, a warmup of 3e9 tokens and then a constant rate. Their weight decay of 1e-5 is not multiplied by the
learning rate, ours is: 1e-5 / 8e-4 = 0.0125. Their dropout of 0.1 after attention has no separate key in transformers;
it is 0 here.

Batch:     768 rows growing to 4,608 over 50e9 tokens, here in five stages of 10e9 tokens: 12,716, 6,358, 4,239, 3,179
           and 2,543 steps of 768, 1,536, 2,304, 3,072 and 3,840 rows. 353,690 steps of 4,608 rows read the remaining
           1,669e9 tokens: 382,725 steps in all. The warmup's 3e9 tokens are 3,815 steps of 768 rows.
Text:      as in configs/roberta_base.py. The authors' 2e12 tokens, which include much code, are not public.
Vocabulary: theirs has 50,368 entries, of which 50,280 are used; ours has the same size, trained on this text.
"""

from ml_collections import ConfigDict

from configs.roberta_base import get_config as roberta_base


def get_config() -> ConfigDict:
    """Returns the config."""
    config = roberta_base()
    config.tokenizer.vocab_size = 50_368
    config.shards.length = 1024
    config.data.global_batch = 4608
    config.data.batch_stages = (
        (768, 12_716),
        (1536, 6_358),
        (2304, 4_239),
        (3072, 3_179),
        (3840, 2_543),
    )
    config.masking.rate = 0.3
    config.model.family = "modernbert"
    config.model.layers = 22
    config.model.intermediate_size = 1152
    config.model.positions = 8192
    config.model.global_rope_theta = 10_000.0
    config.model.hidden_dropout = 0.0
    config.model.attention_dropout = 0.0
    config.model.remat_feed_forward = 0
    config.optimizer.name = "stable_adamw"
    config.optimizer.learning_rate = 8e-4
    config.optimizer.weight_decay = 0.0125
    config.schedule.name = "constant"
    config.schedule.warmup = 3_815
    config.train.steps = 382_725
    return config
