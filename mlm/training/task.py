"""What is trained, as the loop sees it: pretraining and classification each build one of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mlm.model.roberta import Params
from mlm.training.metrics import Log
from mlm.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Task:
    """The data and the objective of a run; nothing here holds an array of a device.

    Attributes:
      mesh: of the batch and the state.
      steps: updates in all.
      shapes: of the state, placed, as `state.plan_state` gives them.
      step_of: number of an update, from 1 -> what makes it, of `step.make_train_step`.
      fresh: () -> the state before the first update.
      batches: number of updates made -> this host's rows of the batches of all later ones, numpy.
      evaluate: parameters -> scores, with a "loss"; the same on every host.
      ends_epoch: step -> whether to evaluate and to save after it, beside what the config says.
      badness: scores -> a number; the checkpoint with the lowest is kept.
      facts: what a checkpoint says of the data, as JSON, for those who build the model from it.
      data_fingerprint: of the data; a run can't go on with another one's.
      tokens_per_step: for the throughput.
      flops_per_token: number of an update -> useful FLOPs for each of its tokens, for MFU.
      programs: how often a train step may be compiled: the number of lengths that its rows have.
      listen: the log, just opened -> None; adds who hears its lines.
    """

    mesh: Mesh
    steps: int
    shapes: TrainState
    step_of: Callable[[int], Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]]
    fresh: Callable[[], TrainState]
    batches: Callable[[int], Iterator[dict[str, np.ndarray]]]
    evaluate: Callable[[Params], dict[str, Any]]
    ends_epoch: Callable[[int], bool]
    badness: Callable[[dict[str, Any]], float]
    facts: dict[str, Any]
    data_fingerprint: str
    tokens_per_step: int
    flops_per_token: Callable[[int], float]
    programs: int = 1
    listen: Callable[[Log], None] = lambda log: None
