"""ModernBERT-base at 8,192 tokens: the published second and third stages (Warner et al., 2024, arXiv 2412.13663).

Command:   python -m mlm run --config=configs/modernbert_base_long.py --workdir=gs://BUCKET/modernbert_base_long
           --config.train.branch_from=gs://BUCKET/modernbert_base@382725
           (the same on every host; a branch of the last step of configs/modernbert_base.py, with its tokenizer)
Hardware:  32 chips of TPU v5e (8 hosts of 4), as it stands.
Time:      2.5 days there. By arithmetic, not measured here: 63,578 steps x 576 rows x 8,192 tokens = 3.0e11 tokens;
           x 1,339.4 MFLOP (1,262.9 body + 30% of the tail's 255.1) = 4.02e20 FLOP; / (32 x 197 TFLOP/s x 30%).
Score:     not measured here. Published for this model: 89.1 on MNLI and 96.0 on SST-2 (development sets, the paper's
           table of GLUE).

From the authors' repository (AnswerDotAI/ModernBERT, commit 00220af, yamls/modernbert: base-context-extension and
base-learning-rate-decay): batches of 576 rows, a rotary base of 160,000 in global layers and 10,000 in local ones,
250e9 tokens at a constant 3e-4, then 50e9 in which the rate falls to 0.001 of that by 1 - sqrt. Their weight decay of
1e-5 is not multiplied by the learning rate, ours is: 1e-5 / 3e-4 = 0.0333.

Steps:     250e9 / (576 x 8,192) = 52,982 and 50e9 / (576 x 8,192) = 10,596, after 382,725: 446,303 in all. This one
           run does both stages, on the same text. To decay on other text, write its shards with the same tokenizer,
           have this run keep step 435,707 (checkpoint.milestones), and branch off again with `train` (`run` refuses
           shards of other corpus.sources):
           --config.train.branch_from=gs://BUCKET/modernbert_base_long@435707 --config.shards.dir=gs://BUCKET/decay
           To branch at another step N, set train.steps to N + 63,578 and schedule.decay_fraction to 10,596 of these.
Rows:      the same text, chunked again; the branch reads it from its own batch 382,726 on. The source's
           data.batch_stages apply to its own rows, so there are none here. 576 rows / 32 devices / 9 = 2 rows at once
           on each.
"""

from ml_collections import ConfigDict

from configs.modernbert_base import get_config as modernbert_base


def get_config() -> ConfigDict:
    """Returns the config."""
    config = modernbert_base()
    config.shards.length = 8192
    config.data.global_batch = 576
    config.data.batch_stages = ()
    config.model.global_rope_theta = 160_000.0
    config.optimizer.learning_rate = 3e-4
    config.optimizer.weight_decay = 0.0333
    config.schedule.name = "wsd_sqrt"
    config.schedule.decay_fraction = 10_596 / 446_303
    config.schedule.final_fraction = 0.001
    config.train.branch_from = "runs/modernbert_base@382725"
    config.train.steps = 446_303
    config.train.accumulate = 9
    config.evaluate.batch = 128
    return config
