"""ModernBERT-large at 8,192 tokens: the published second and third stages (Warner et al., 2024, arXiv 2412.13663).

Command:   python -m mlm run --config=configs/modernbert_large_long.py --workdir=gs://BUCKET/modernbert_large_long
           --config.train.branch_from=gs://BUCKET/modernbert_large@346458
           (the same on every host; a branch of the last step of configs/modernbert_large.py, with its tokenizer)
Hardware:  64 chips of TPU v5e (16 hosts of 4), as it stands.
Time:      2.9 days there. By arithmetic, not measured here: 57,221 steps x 640 rows x 8,192 tokens = 3.0e11 tokens;
           x 3,150.4 MFLOP (3,039.3 body + 30% of the tail's 370.4) = 9.45e20 FLOP; / (64 x 197 TFLOP/s x 30%).
Score:     not measured here. Published for this model: 90.8 on MNLI and 97.1 on SST-2 (development sets, the paper's
           table of GLUE).

From the authors' repository (AnswerDotAI/ModernBERT, commit 00220af, yamls/modernbert: large-context-extension and
large-learning-rate-decay): a rotary base of 160,000 in global layers and 10,000 in local ones, 250e9 tokens at a
constant 5e-5, then 50e9 in which the rate falls to 0.001 of that by 1 - sqrt. Their weight decay of 1e-6 is not
multiplied by the learning rate, ours is: 1e-6 / 5e-5 = 0.02.

Source:    the authors' first stage ended at 5e-5, after a restart; if yours was restarted as
           configs/modernbert_large.py says, branch off from the restarted workdir.
Batch:     theirs have 616 rows in the second stage and 624 in the third; 640 here are 10 for each of 64 devices, 2 of
           them at once.
Steps:     250e9 / (640 x 8,192) = 47,684 and 50e9 / (640 x 8,192) = 9,537, after 346,458: 403,679 in all. Other text
           for the third stage, and another step to start from: as in configs/modernbert_base_long.py.
"""

from ml_collections import ConfigDict

from configs.modernbert_large import get_config as modernbert_large


def get_config() -> ConfigDict:
    """Returns the config."""
    config = modernbert_large()
    config.tokenizer.path = ""  # the source's
    config.shards.length = 8192
    config.data.global_batch = 640
    config.data.batch_stages = ()
    config.model.global_rope_theta = 160_000.0
    config.optimizer.learning_rate = 5e-5
    config.schedule.name = "wsd_sqrt"
    config.schedule.decay_fraction = 9_537 / 403_679
    config.schedule.final_fraction = 0.001
    config.train.init_from = ""
    config.model.init = "stock"
    config.train.branch_from = "runs/modernbert_large@346458"
    config.train.steps = 403_679
    config.train.accumulate = 5
    config.evaluate.batch = 128
    return config
