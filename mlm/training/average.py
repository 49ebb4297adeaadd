"""The mean of checkpoints (Izmailov et al., 2018; Wortsman et al., 2022), as a checkpoint in a workdir of its own."""

import copy
import operator
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mlm import entry
from mlm.config_rules import ROTARY_BASES
from mlm.data import tokenizer
from mlm.errors import InputError
from mlm.model.families import family_of
from mlm.paths import UPath, canonical, children, copy_files, write_text
from mlm.pretrained import checkpoint_files, load, locate
from mlm.training.checkpoint import Checkpoints
from mlm.workdir import LOCK, Workdir

STEPS = re.compile(r"|([0-9]{1,18})(?:\.\.([0-9]{1,18}))?")
Checkpoint = tuple[Workdir, int]


def choose(
    names: Sequence[str], new: Workdir, *, last: int = 0, decay: float = 1.0
) -> tuple[list[Checkpoint], list[dict[str, Any]]]:
    """Returns the checkpoints to average into `new`, which may not exist yet, and their metadata.

    Those of one workdir come in the order of their steps, those of several as they are named.

    Args:
      names: WORKDIR@A..B (what is there from A to B), WORKDIR@A, or WORKDIR: its newest, a classifier's best.
      last: take so many of the newest of each WORKDIR instead; 0 = off.
      decay: weight of a checkpoint, as a share of that of the one after it.
    """
    if [path for path in children(new.root) if path.name != LOCK]:
        raise InputError(f"--workdir={new.root}: holds something already; name a new folder.")
    chosen = [checkpoint for name in names for checkpoint in _find(name, last)]
    if len({workdir.root for workdir, _ in chosen}) == 1:
        chosen.sort(key=operator.itemgetter(1))
    elif decay != 1 and chosen:
        raise InputError(f"--decay={decay:g}: is for checkpoints of one workdir.")
    chosen_names = [_name(checkpoint) for checkpoint in chosen]
    if len(set(chosen_names)) < max(len(chosen), 2):
        listed = ", ".join(chosen_names) or "none"
        raise InputError(
            f"average: takes two checkpoints or more, each once; {' '.join(names)} names {listed}."
        )
    metas = [checkpoint_files.read_meta(workdir.checkpoints, step) for workdir, step in chosen]
    *models, newest = [
        _architecture(workdir, meta) for (workdir, _), meta in zip(chosen, metas, strict=True)
    ]
    for name, model in zip(chosen_names, models, strict=False):
        for key in model:
            if model[key] != newest.get(key):
                raise InputError(
                    f"{name}: its {key} ({model[key]!s:.80}) differs from that of {chosen_names[-1]} "
                    f"({newest.get(key)!s:.80}); only checkpoints of one model can be averaged."
                )
    return chosen, metas


def write_mean(
    new: Workdir,
    chosen: Sequence[Checkpoint],
    metas: Sequence[dict[str, Any]],
    *,
    decay: float = 1.0,
) -> None:
    """Writes the mean of the parameters that are evaluated, of checkpoints that `choose` has returned.

    The tokenizer, the config and the other metadata are those of the newest.
    """
    weights = [decay**age for age in reversed(range(len(chosen)))]
    total: Any = None
    for (workdir, step), meta, weight in zip(chosen, metas, weights, strict=True):
        params = load.restore(workdir, step, meta)
        # float32 times a Python number
        weighted = jax.tree.map(lambda value, weight=weight: weight * value, params)
        total = weighted if total is None else jax.tree.map(np.add, total, weighted)
    mean = jax.tree.map(lambda value: value / sum(weights), total)

    source, step = chosen[-1]
    meta = metas[-1]
    config = copy.deepcopy(meta["config"]).unlock()
    if not config.data.mixture:
        config.shards.dir = source.shards_of(config)
    copy_files(source.tokenizer, new.tokenizer)
    write_text(new.config, config.to_json(indent=1) + "\n")
    averaged = [
        {"checkpoint": _name(checkpoint), "weight": weight}
        for checkpoint, weight in zip(chosen, weights, strict=True)
    ]
    meta = meta | {"config": config, "milestones": [], "averaged": averaged}
    with Checkpoints(new.checkpoints, keep=1) as checkpoints:
        checkpoints.save(step, {load.part_of(meta): mean}, meta, None)


def _name(checkpoint: Checkpoint) -> str:
    return f"{checkpoint[0].root}@{checkpoint[1]}"


def _find(name: str, last: int) -> list[Checkpoint]:
    """Returns the checkpoints that a name stands for."""
    folder, at, text = name.rpartition("@")
    if not at or UPath(name).is_dir():
        folder = name
        text = ""
    match = STEPS.fullmatch(text)
    if not (UPath(folder) / "checkpoints").is_dir() or match is None:
        raise InputError(
            f"{name}: is not a workdir with checkpoints; name WORKDIR@A..B, WORKDIR@A or WORKDIR."
        )
    workdir = Workdir(canonical(folder), create=False)  # which may be named in several ways
    complete = checkpoint_files.complete_steps(workdir.checkpoints)
    if last and (text or last > len(complete)):
        raise InputError(
            f"--last={last}: {name} must be a workdir with so many checkpoints; it has {len(complete)}."
        )
    if match[2]:
        steps = [step for step in complete if int(match[1]) <= step <= int(match[2])]
    elif text:
        steps = [int(text)]
    elif last:
        steps = complete[-last:]
    else:
        best = checkpoint_files.choose(
            workdir.checkpoints, on_damage="stop", best=locate.is_classifier(workdir)
        )
        steps = [] if best is None else [best]
    for step in steps:
        checkpoint_files.check_step(workdir.checkpoints, step, name)
    return [(workdir, step) for step in steps]


def _architecture(workdir: Workdir, meta: dict[str, Any]) -> dict[str, Any]:
    """Returns what checkpoints that are averaged must have in common."""
    dataset = meta["dataset"]
    folder = workdir.tokenizer_folder
    model = load.config_of(dataset["model"])
    positions = ROTARY_BASES if model.model_type == "modernbert" else ("max_position_embeddings",)
    keys = ("model_type", "vocab_size", *positions, *family_of(model).architecture.values())
    return {
        # a file may hold several classes
        "class": entry.changes_evaluation(meta["class"])
        and [meta["class"]["name"], meta["class"]["code"]],
        "labels": dataset.get("labels"),
        "vocabulary": dataset["vocab_size"],
        "tokenizer": folder and tokenizer.fingerprint(folder),
        **{key: getattr(model, key) for key in keys},
    }
