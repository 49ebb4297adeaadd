"""The command `evaluate`: score a checkpoint, an export or any RoBERTa folder on a split."""

from __future__ import annotations

import dataclasses
import json

import jax
from ml_collections import ConfigDict

from mlm import distributed, trained
from mlm.data.manifest import Manifest
from mlm.errors import InputError
from mlm.model import weights
from mlm.training import loop, sharding, step
from mlm.training.build import build_model
from mlm.workdir import Workdir


def run(config: ConfigDict, workdir: Workdir, manifest: Manifest, *, model: str, split: str) -> dict[str, float]:
    """Scores a model and returns the scores; the first process prints them as a line of JSON.

    Args:
      config: says which masks, which batch size.
      workdir: of the run.
      manifest: of the shards.
      model: a transformers folder; "" for the workdir's newest checkpoint.
      split: of the shards.

    Raises:
      InputError: no such split, an empty one, or a model of another vocabulary than the shards.
    """
    if split not in manifest.splits or manifest.splits[split].records == 0:
        raise InputError(f"--split={split}: the shards in {manifest.folder} hold no records of that split.")
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    sharding.check_batch(mesh, rows=config.evaluate.batch, key="evaluate.batch")
    found = trained.from_folder(model) if model else trained.from_checkpoint(workdir)
    if found.config.vocab_size != manifest.vocab_size:
        raise InputError(
            f"{found.source}: has {found.config.vocab_size} vocabulary entries, the shards in {manifest.folder} "
            f"{manifest.vocab_size}; score it on shards of its own tokenizer."
        )
    objective = build_model(config, loop.facts_of(manifest))
    padded = objective.config.vocab_size
    found.config.vocab_size = padded
    params = weights.resize_vocabulary(found.params, padded)
    shardings = sharding.tree_shardings(params, mesh, params)
    eval_step = step.make_eval_step(
        network=dataclasses.replace(objective.network, config=found.config),
        masking=objective.masking,
        mask_seed=config.evaluate.seed,
        mesh=mesh,
        param_shardings=shardings,
    )
    params = jax.device_put(params, shardings)
    scores = loop.evaluate_split(config, manifest, mesh, eval_step, params, split)
    if distributed.is_first():
        print(json.dumps({"split": split, "model": found.source, **scores}))
    return scores
