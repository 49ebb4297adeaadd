"""What the loop trains: `mlm/tasks/` has one class for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from mlm.model.roberta import Params
from mlm.training.metrics import Log
from mlm.training.state import TrainState

TrainStep = Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]


class Task(Protocol):
    """The data and the objective of a run; holds no array of a device.

    Attributes:
      mesh: of the batch and the state.
      steps: in all.
      shapes: of the state, with shardings, as `state.plan_state` returns them.
      metadata: of the data and the model, as JSON, saved with a checkpoint for those who load it.
      data_fingerprint: of the data; a run can't be resumed on other data.
      tokens_per_step: for the throughput.
      expected_compiles: of a train step: how many row lengths it is called with.
    """

    mesh: Mesh
    steps: int
    shapes: TrainState
    metadata: dict[str, Any]
    data_fingerprint: str
    tokens_per_step: int
    expected_compiles: int

    def step_at(self, step: int) -> TrainStep:
        """Returns the jitted function that makes a step, counted from 1."""

    def initial_state(self) -> TrainState:
        """Returns the state before the first step."""

    def batches(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        """Returns this host's rows of the batches of the steps after `start`."""

    def evaluate(self, params: Params) -> dict[str, Any]:
        """Returns the scores of the validation split, "loss" among them; the same on every host."""

    def is_epoch_end(self, step: int) -> bool:
        """Returns whether to evaluate and to save after this step, whatever the config's intervals are."""

    def minimized_metric(self, scores: dict[str, Any]) -> float:
        """Returns the number by which the best checkpoint is chosen: the lowest."""

    def flops_per_token(self, step: int) -> float:
        """Returns the useful FLOPs of a step for each of its tokens, for MFU."""

    def attach_hooks(self, log: Log) -> None:
        """Adds metrics hooks to a log that was just opened."""
