"""A trained model, computed by the subclass of `Pretraining` that a command was started with."""

import copy
import dataclasses

from mlm import cluster, entry
from mlm.data.manifest import DatasetInfo
from mlm.model import attention
from mlm.pretrained import load
from mlm.text import say


def with_class(
    model: load.Pretrained, started_from: entry.Entry, *, command: str, stock_network: bool = True
) -> load.Pretrained:
    """Returns a model, computed by the class that the command was started with, if that made it by its `make_model`.

    Raises InputError if another class changed what the model computes; else process 0 says whose class trained it.
    With `stock_network`, the command does without all other methods.
    """
    record = model.meta.get("class", {})
    stock_network = stock_network or not model.meta  # a folder's is transformers' own network
    for remark in entry.check_use(
        record, started_from.record, model.source, command=command, stock_network=stock_network
    ):
        if cluster.is_primary():
            say(remark)
    pretraining = started_from.pretraining
    # then it is by that class
    if pretraining is None or "make_model" not in record.get("overrides", ()):
        return model
    dataset = model.meta["dataset"]
    info = DatasetInfo(
        *(dataset.get(field.name, field.default) for field in dataclasses.fields(DatasetInfo))
    )
    config = copy.deepcopy(model.run_config).unlock()
    config.model.dtype = "float32"
    module = pretraining.model_alone(config.lock(), info)
    compute = dataclasses.replace(module.compute, attend=attention.xla)  # for rows of any length
    return dataclasses.replace(model, changed_module=module.clone(compute=compute))
