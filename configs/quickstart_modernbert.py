"""The quickstart with the other architecture: a small ModernBERT on the same text, in the same minutes.

Command:  bash launch/local.sh --config=configs/quickstart_modernbert.py
          (python -m mlm run --config=configs/quickstart_modernbert.py --workdir=runs/quickstart_modernbert)
Hardware: two CPU cores, or one GPU.
Expect:   measured on two cores: 3 min in all, 2 min of it training; evaluation loss 3.542 or 3.543 nats, by the
          processor (perplexity 34.5, accuracy 38.6% or 38.8%), 2.89 below the unigram entropy of the split.
Steps:    1,400 of 72.8 ms take the time of the quickstart's 1,575 of 64.2 ms (interleaved, on two cores).
"""

from ml_collections import ConfigDict

from configs.quickstart import get_config as quickstart


def get_config() -> ConfigDict:
    """Returns the config."""
    config = quickstart()
    config.model.family = "modernbert"
    # gated: 3 x 128 x 192 weights a layer; the RoBERTa has 2 x 128 x 256
    config.model.intermediate_size = 192
    config.optimizer.muon_iterations = 5
    config.train.steps = 1_400
    return config
