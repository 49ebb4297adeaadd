"""An hour on two CPU cores: a model of 8.7 million parameters outside the embeddings.

Command:  python -m mlm run --config=configs/budget_cpu.py --workdir=runs/budget_cpu
Hardware: two CPU cores.
Expect:   measured on one core: 2.609 nats with 15% of the tokens masked, after 1,023 steps (4.19 million tokens); 2.646
          with another seed and the same number of steps. run_mlm.py's recipe on the same model gives 3.430 after an
          hour; this one gets there in 1,345 s. On a RoBERTa of as many parameters, run_mlm.py's recipe gives 6.751
          after an hour; this one is past that in its first 3 minutes.
"""

from ml_collections import ConfigDict

from configs.quickstart_modernbert import get_config as quickstart_modernbert


def get_config() -> ConfigDict:
    """Returns the config."""
    config = quickstart_modernbert()
    config.shards.length = 128
    config.data.global_batch = 32
    config.model.layers = 3
    config.model.hidden_size = 512
    config.model.heads = 8
    config.model.intermediate_size = 1152
    config.model.positions = 128
    config.optimizer.muon_iterations = 2  # five take a third of the time of a step of 2,048 tokens
    config.train.steps = 0
    config.train.hours = 1.0
    return config
