"""Which of the two kinds of model lies in a folder, told without jax: a masked language model or a classifier."""

from __future__ import annotations

import json

from mlm.paths import UPath
from mlm.workdir import Workdir


def is_classifier(workdir: Workdir | None, folder: str) -> bool:
    """Returns whether the transformers folder, or, without one, the workdir's checkpoints are of a classifier.

    What can't be read is not: whoever reads it next says what is wrong with it.
    """
    try:
        if folder:
            config = json.loads((UPath(folder) / "config.json").read_text())
            return any("SequenceClassification" in name for name in config.get("architectures") or ())
        metas = [] if workdir is None else list(workdir.checkpoints.glob("*/meta/metadata"))
        return bool(metas) and "labels" in json.loads(metas[0].read_text())["dataset"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
