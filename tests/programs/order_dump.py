"""One process of several: dumps the rows, record ids, epochs and masks that its devices hold, by row of the batch."""

import sys

import jax
import numpy as np

from mlm.data import batches, manifest
from mlm.data.manifest import DatasetInfo
from mlm.tasks.pretraining import Pretraining
from mlm.training import data_parallel, sharding
from tests.programs.interleaved import interleaved
from tests.support.tiny import tiny_config


def main(argv: list[str]) -> None:
    options = dict(argument.removeprefix("--").split("=", 1) for argument in argv)
    process = int(options["process-id"])
    jax.distributed.initialize(options["coordinator"], int(options["processes"]), process)
    dump(options, process)


def dump(options: dict[str, str], process: int) -> None:
    shards = manifest.load_manifest(options["folder"])
    config = tiny_config("data.lanes=4", f"mesh.fsdp={options['fsdp']}")
    make_mesh = interleaved if options["interleaved"] == "True" else sharding.make_mesh
    run = Pretraining(config, DatasetInfo.from_manifest(shards), mesh=make_mesh(**config.mesh.to_dict()))
    rows = config.data.global_batch
    logical = data_parallel.logical_rows(run.mesh, rows)
    local = sharding.local_rows(run.mesh, rows)
    stream = batches.train_batches(
        shards, split="train", seed=3, global_batch=rows, lanes=4, start_row=int(options["start"]) * rows, rows=local
    )
    masks = jax.jit(run.masking)
    found = {}
    for step in range(int(options["start"]), int(options["stop"])):
        batch = sharding.put_batch(next(stream), run.mesh, rows)
        columns = (batch[key] for key in ("input_ids", "attention_mask", "record_id", "epoch"))
        for name, array in (batch | masks(jax.random.key(5), *columns)._asdict()).items():
            for shard in array.addressable_shards:
                start = shard.index[0].start or 0
                found[f"{step} {name} {logical[start]}"] = np.asarray(shard.data)
                if name == "record_id":
                    found[f"{step} array's {start}"] = np.asarray(shard.data)
    np.savez(f"{options['out']}/{process}.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1:])
