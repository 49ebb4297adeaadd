"""A trace of some steps, for TensorBoard or Perfetto (log.profile_start)."""

from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from mlm.paths import UPath, staging_folder, upload

STEPS = 5  # of a trace


class Profile:
    """Records STEPS steps from log.profile_start on."""

    def __init__(self, log: ConfigDict, folder: UPath):
        self._first = log.profile_start
        self._end = self._first + STEPS
        self._folder = folder
        self._staging: Path | None = None  # while it records

    def begin(self, step: int, state: Any) -> None:
        """Starts or ends the trace if `step`, which comes next, is the first one of it or the first one after it."""
        if self._first and step == self._first:
            self._staging = staging_folder(self._folder)
            jax.profiler.start_trace(str(self._staging))
        elif step == self._end:
            self.end(state)

    def end(self, state: Any) -> None:
        """Ends the trace, if it is running, once all steps that led to `state` have."""
        if self._staging:
            jax.block_until_ready(state.step)
            jax.profiler.stop_trace()
            upload(self._staging, self._folder)
            self._staging = None
