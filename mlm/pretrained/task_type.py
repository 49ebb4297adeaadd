"""Whether a model is a masked language model or a classifier, read without jax."""

from __future__ import annotations

import json

from mlm.paths import UPath
from mlm.pretrained import locate
from mlm.workdir import Workdir


def is_classifier(workdir: Workdir | None, model: str) -> bool:
    """Returns whether a model is a classifier.

    What can't be read is not: loading it says what is wrong with it.

    Args:
      workdir: of a run, where `model` is "".
      model: as `load.load` takes it.

    Raises:
      InputError: there is no such model.
    """
    root = UPath(model) if model or workdir is None else workdir.root
    try:
        if not model or locate.is_workdir(model):
            metas = sorted(root.glob("checkpoints/*/meta/metadata"))
            return bool(metas) and "labels" in json.loads(metas[0].read_text())["dataset"]
        config = json.loads((locate.local_copy(model, "--model=") / "config.json").read_text())
        return any("SequenceClassification" in name for name in config.get("architectures") or ())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
