"""One process of several: dumps the rows, record ids, epochs and masks that its devices hold, by row of the batch.

From the first step on, and from the eighth on a mesh whose hosts interleave.
"""

import sys

import jax
import numpy as np

from mlm.data import batches, manifest
from mlm.data.manifest import DatasetInfo
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from tests.programs.interleaved import interleaved
from tests.support.tiny import tiny_config

STEPS = 12


def main(argv: list[str]) -> None:
    options = dict(argument.removeprefix("--").split("=", 1) for argument in argv)
    process = int(options["process-id"])
    jax.distributed.initialize(options["coordinator"], int(options["processes"]), process)
    dump(options["folder"], options["out"], process)


def dump(folder: str, out: str, process: int) -> None:
    """Writes the arrays "MESH STEP NAME ROW"; the row of the name `array` is that of the global array."""
    shards = manifest.load_manifest(folder)
    config = tiny_config("data.lanes=4", "mesh.fsdp=2")
    rows = config.data.global_batch
    found = {}
    for name, make_mesh, start in (
        ("plain", sharding.make_mesh, 0),
        ("interleaved", interleaved, 7),
    ):
        mesh = make_mesh(data=-1, **config.mesh.to_dict())
        masks = jax.jit(Pretraining(config, DatasetInfo.from_manifest(shards), mesh=mesh).masking)
        logical = sharding.logical_rows(mesh, rows)
        local = sharding.local_rows(mesh, rows)
        stream = batches.train_batches(
            shards,
            split="train",
            seed=3,
            global_batch=rows,
            lanes=4,
            start_row=start * rows,
            rows=local,
        )
        for step in range(start, STEPS):
            batch = sharding.put_batch(next(stream), mesh, rows)
            columns = (batch[key] for key in ("input_ids", "attention_mask", "record_id", "epoch"))
            for key, array in (batch | masks(jax.random.key(5), *columns)._asdict()).items():
                for shard in array.addressable_shards:
                    first = shard.index[0].start or 0
                    found[f"{name} {step} {key} {logical[first]}"] = np.asarray(shard.data)
                    if key == "record_id":
                        found[f"{name} {step} array {first}"] = np.asarray(shard.data)
    np.savez(f"{out}/{process}.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1:])
