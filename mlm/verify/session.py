"""What the checks of `verify` work on, the results that they yield, and verify.json, which holds them."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm import cluster, logs
from mlm import config as configs
from mlm.bench import steps
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.paths import write_text
from mlm.plan import calibration
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.workdir import Workdir

PASS, FAIL, NO_REFERENCE = "pass", "fail", "no reference"
# Rows are made up, so nothing of the run's data or start matters: this is how the config is changed.
MADE_UP = {"data.batch_stages": (), "data.lanes": 1, "data.mixture": (), "data.skip_batches": ()}
MADE_UP |= {"train.accumulate": 1, "train.branch_from": "", "train.init_from": "", "train.replay": ""}
Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of a check: what it holds, what was measured, and what should have been."""

    what: str
    measured: str
    expected: str = "-"
    status: str = NO_REFERENCE
    values: Values = dataclasses.field(default_factory=dict)  # numbers, for programs


Check = Callable[["Session"], Iterator[Result]]


def compared(what: str, measured: str, expected: str, is_right: bool, values: Values | None = None) -> Result:
    """Returns the result of a comparison."""
    return Result(what, measured, expected, PASS if is_right else FAIL, values or {})


@dataclasses.dataclass
class Session:
    """One run of `verify`; `numbers` are what later checks read of earlier ones."""

    config: ConfigDict
    workdir: Workdir
    manifest: Manifest | None  # None if the workdir has no shards
    pretraining: type[Pretraining]
    quick: bool
    seconds: float  # for all checks; what is left of it is for trying other settings
    begin: float = dataclasses.field(default_factory=time.monotonic)
    numbers: Values = dataclasses.field(default_factory=dict)
    results: dict[str, Values] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of one microbatch: those that the devices hold at once."""
        return self.config.data.global_batch // self.config.train.accumulate

    def task(self, changes: Values | None = None, mesh: Mesh | None = None) -> Pretraining:
        """Returns the run's task on made-up rows, a microbatch a step, with `changes` of the config."""
        values = MADE_UP | {"data.global_batch": self.rows} | (changes or {})
        config, info = configs.replace(self.config, values), None
        if self.manifest is not None:
            info = DatasetInfo.from_manifest(self.manifest)
        return self.pretraining.without_data(config, mesh, info, self.manifest)

    def run(self, checks: dict[str, Check]) -> list[str]:
        """Runs the checks one after another, and writes and prints what they yield; returns those that failed."""
        for name, check in checks.items():
            cluster.progress("compile")  # the phase that may take longest
            begin, results = time.monotonic(), []
            try:
                for result in check(self):
                    results.append(result)
                    self._write(name, results, begin)
            except Exception as error:
                if jax.process_count() > 1:
                    raise  # the others wait for this process in a collective
                reason = (str(error).splitlines() or [""])[0]
                results.append(Result("runs to its end", f"{type(error).__name__}: {reason:.300}", "no error", FAIL))
            self._write(name, results, begin)
            if cluster.is_primary():
                status, seconds = self.results[name]["status"], self.results[name]["seconds"]
                shown = "; ".join(f"{one.what}: {one.measured}" for one in results if one.status == status)
                print(f"verify: {name}: {status}, {seconds:.0f} s: {shown}", flush=True)
        return [name for name, entry in self.results.items() if entry["status"] == FAIL]

    def _write(self, name: str, results: list[Result], begin: float) -> None:
        """Writes verify.json with the results of a check that has come so far."""
        statuses = [result.status for result in results]
        status = next((status for status in (FAIL, PASS) if status in statuses), NO_REFERENCE)
        lines = [dataclasses.asdict(result) | {"values": logs.finite(result.values)} for result in results]
        self.results[name] = {"status": status, "seconds": round(time.monotonic() - begin, 1), "results": lines}
        if cluster.is_primary():
            content = calibration.header(self.config, jax.devices()) | {"quick": self.quick, "checks": self.results}
            write_text(self.workdir.root / calibration.FILE, json.dumps(content, indent=1) + "\n")


def made_up_rows(task: Pretraining) -> dict[str, np.ndarray]:
    """Returns a global batch of two documents a row, the last row half padding; the same on every host."""
    batch, info = steps.random_rows(task), task.info
    batch["input_ids"][:, :: max(info.length // 2, 1)] = info.special_ids["cls"]
    batch["input_ids"][-1, info.length // 2 :] = info.special_ids["pad"]
    batch["attention_mask"][-1, info.length // 2 :] = 0
    return batch


def host_rows(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, np.ndarray]:
    """Returns this host's rows of a global batch."""
    start, stop = sharding.local_rows(mesh, len(batch["record_id"]))
    return {name: column[start:stop] for name, column in batch.items()}


def one_device(device: jax.Device) -> Mesh:
    """Returns the mesh of one device."""
    return sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=[device])


def cpu() -> jax.Device | None:
    """Returns this host's CPU as a device of jax; None if JAX_PLATFORMS leaves it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def roundoff(dtype: str, device: jax.Device) -> float:
    """Returns the relative error of one rounding in a matrix product of a dtype, by the device's matrix units.

    Products of float32 are of bfloat16 on a TPU, and of TF32 (10 bits) on a GPU, unless more precision is asked for.
    """
    if dtype == "bfloat16" or device.platform == "tpu":
        return float(jnp.finfo(jnp.bfloat16).eps) / 2
    return 2.0**-11 if device.platform == "gpu" else float(jnp.finfo(jnp.float32).eps) / 2


def milliseconds(seconds: float) -> str:
    """Returns a time as text."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
