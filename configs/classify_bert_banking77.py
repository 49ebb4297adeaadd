"""BERT-base on BANKING77, 77 intents of bank customers: the BERT-on-TPU fine-tuning post.

Command:   python -m mlm classify --config=configs/classify_bert_banking77.py --workdir=runs/bert_banking77
           with the files that configs/classify_banking77.py names in banking77/; without the Hub, add
           --config.train.init_from=FOLDER of any BERT: it decides the sizes.
Hardware:  one TPU v3-8 (4 chips, 8 cores), as in the post, 32 rows per core.
Time:      not measured here; the post's 220 s are for rows of 512 tokens.
Score:     not measured here. Published: a weighted F1 of 0.285, 0.814 and 0.915 after epochs 1, 2 and 3. It is `f1` in
           the line that `classify` prints after each epoch, and in metrics.jsonl.

Changes configs/classify_banking77.py, which has the post's recipe and what we chose: the start, and that the weighted
F1 chooses the checkpoint.
"""

from ml_collections import ConfigDict

from configs.classify_banking77 import get_config as classify_banking77


def get_config() -> ConfigDict:
    """Returns the config."""
    config = classify_banking77()
    config.train.init_from = "google-bert/bert-base-uncased"
    config.classify.metric = ("f1",)
    return config
