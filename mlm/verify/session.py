"""What the checks of `verify` work on, the results that they yield, and verify.json, which holds them."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import cluster, logs
from mlm import config as configs
from mlm.bench import steps
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.errors import StopError
from mlm.paths import write_text
from mlm.plan import calibration
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.workdir import Workdir

STATUSES = {False: "fail", True: "pass", None: "no reference"}  # the worst one first
# Rows are made up, so nothing of the run's data or start matters.
MADE_UP = {"data.batch_stages": (), "data.lanes": 1, "data.mixture": (), "data.skip_batches": ()}
MADE_UP |= {"train.accumulate": 1, "train.branch_from": "", "train.init_from": "", "train.replay": ""}
Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of a check: what it holds, what was measured, and what should have been."""

    what: str
    measured: str
    expected: str = "-"
    is_right: bool | None = None  # None without a reference
    values: Values = dataclasses.field(default_factory=dict)  # numbers, for programs


@dataclasses.dataclass
class Session:
    """One run of `verify`; `numbers` are what later checks read of earlier ones, `checks` as verify.json has them."""

    config: ConfigDict
    workdir: Workdir
    manifest: Manifest | None  # None if the workdir has no shards
    pretraining: type[Pretraining]
    quick: bool
    begin: float = dataclasses.field(default_factory=time.monotonic)
    numbers: Values = dataclasses.field(default_factory=dict)
    checks: Values = dataclasses.field(default_factory=dict)

    def task(self, changes: Values | None = None, mesh: Mesh | None = None) -> Pretraining:
        """Returns the run's task on made-up rows, a microbatch a step, with `changes` of the config."""
        rows = {"data.global_batch": self.config.data.global_batch // self.config.train.accumulate}
        info = self.manifest and dataclasses.replace(DatasetInfo.from_manifest(self.manifest), real_share=1.0)
        config = configs.replace(self.config, MADE_UP | rows | (changes or {}))
        return self.pretraining.without_data(config, mesh, info, self.manifest)

    def run(self, checks: dict[str, Callable[["Session"], Iterator[Result]]]) -> list[str]:
        """Runs the checks one after another, and writes and prints what they yield; returns those that failed."""
        for name, check in checks.items():
            cluster.progress("compile")  # the phase that may take longest
            begin, results = time.monotonic(), []
            try:
                for result in check(self):
                    results.append(result)
                    self._write(name, results, begin)
                    show(name, result)
            except Exception as error:
                if isinstance(error, StopError) or jax.process_count() > 1:
                    raise  # a config that can't be, or the other processes wait for this one in a collective
                what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.300}"
                results.append(Result("runs to its end", what, "no error", False))
                show(name, results[-1])
            self._write(name, results, begin)
        return [name for name, check in self.checks.items() if check["status"] == STATUSES[False]]

    def _write(self, name: str, results: list[Result], begin: float) -> None:
        """Writes verify.json with the results of a check so far, so that one that is cut off leaves them."""
        worst = next(verdict for verdict in STATUSES if verdict is None or verdict in [one.is_right for one in results])
        lines = [logs.finite(dataclasses.asdict(one)) | {"status": STATUSES[one.is_right]} for one in results]
        seconds = round(time.monotonic() - begin, 1)
        self.checks[name] = {"status": STATUSES[worst], "seconds": seconds, "results": lines}
        if cluster.is_primary():
            content = calibration.header(self.config, jax.devices()) | {"quick": self.quick, "checks": self.checks}
            write_text(self.workdir.root / calibration.FILE, json.dumps(content, indent=1) + "\n")


def show(name: str, result: Result) -> None:
    """Prints a result of a check as a line, on process 0."""
    expected = "" if result.expected == "-" else f"; expected: {result.expected}"
    if cluster.is_primary():
        line = f"verify: {name}: {STATUSES[result.is_right]}: {result.what}: {result.measured}{expected}"
        print(line, flush=True)


def made_up_rows(task: Pretraining) -> dict[str, np.ndarray]:
    """Returns a global batch of two documents a row, the last row half padding; the same on every host."""
    batch, info = steps.random_rows(task), task.info
    batch["input_ids"][:, :: max(info.length // 2, 1)] = info.special_ids["cls"]
    batch["input_ids"][-1, info.length // 2 :] = info.special_ids["pad"]
    batch["attention_mask"][-1, info.length // 2 :] = 0
    return batch


def one_device(device: jax.Device) -> Mesh:
    """Returns the mesh of one device."""
    return sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=[device])


def show_time(seconds: float) -> str:
    """Returns seconds as text."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
