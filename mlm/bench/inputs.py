"""The parts of `bench` that need data: "shards", "batches" and "loop"."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from mlm.bench import interleaved, tf_tpu_example
from mlm.bench.steps import waited
from mlm.data import corpus, shards
from mlm.data.corpus import Document
from mlm.data.dataset_info import DatasetInfo
from mlm.data.manifest import Manifest
from mlm.tasks.pretraining import Pretraining, train_batches
from mlm.training import sharding

BATCH_TURN = 3.0  # of turns of batches: so long that what was prefetched before them hardly counts
VALIDATION = 50  # one document in so many, of those that shards are written of


def compare_shards(config: ConfigDict, tokenizer_folder: str, megabytes: float, seconds: float) -> dict[str, Any]:
    """Measures the writing of shards of the corpus's first documents, which are read beforehand.

    The start of the workers counts; that of the example's process, which imports its packages, doesn't.

    Args:
      config: of the run.
      tokenizer_folder: local.
      megabytes: 10^6 characters of text.
      seconds: to measure for; three times each at least.

    Returns:
      As `interleaved.summary`, of the tokens of the text, special ones included, whatever part of them is written; each
      with the "rows" that it wrote; and "tokens".

    Raises:
      InputError: TensorFlow or the tokenizer is missing, or there is too little text for the number of shards.
    """
    interleaved.say(f"shards: reading {megabytes:g} MB of the corpus")
    documents = list(sample(config, megabytes))
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="mlm-bench-") as folder,
        concurrent.futures.ProcessPoolExecutor(1, context) as other,
    ):
        interleaved.say("shards: starting the TF-TPU example")
        other.submit(tf_tpu_example.prepare, documents, f"{folder}/documents").result()
        settings = {"tokenizer_folder": tokenizer_folder, "length": config.shards.length}
        counts = {"train": config.shards.count, "validation": config.shards.validation_count}
        written: dict[str, int] = {}
        tokens = 0

        def ours(calls: int) -> None:
            nonlocal tokens
            target, workers = f"{folder}/mlm", config.shards.workers
            made = shards.write(documents, folder=target, counts=counts, workers=workers, source="", **settings)
            written["mlm"] = sum(split.records for split in made.splits.values())
            tokens = sum(split.records * made.length + split.dropped_tokens for split in made.splits.values())
            shutil.rmtree(target)

        def example(calls: int) -> None:
            target = f"{folder}/example"
            task = other.submit(tf_tpu_example.write_shards, f"{folder}/documents", target, **settings)
            written["tf_tpu_example"] = task.result()
            shutil.rmtree(target)

        rates = interleaved.measure("shards", {"mlm": ours, "tf_tpu_example": example}, seconds, calls=1)
    found = interleaved.summary(rates, tokens)
    for name, rows in written.items():
        found[name]["rows"] = rows
    return found | {"tokens": tokens}


def sample(config: ConfigDict, megabytes: float) -> Iterator[Document]:
    """Yields the first training documents of the corpus, some of them as validation documents."""
    left = megabytes * 1e6
    documents = corpus.Corpus(**config.corpus.to_dict())
    texts = (document.text for document in documents if document.split == "train")
    for number, text in enumerate(texts):
        yield Document(text, "train" if number % VALIDATION else "validation")
        left -= len(text)
        if left <= 0:
            return


def compare_batches(config: ConfigDict, manifest: Manifest, mesh: jax.sharding.Mesh, seconds: float) -> dict[str, Any]:
    """Measures the batches of the run and those that the TF-TPU example makes of the same shards, without its masks.

    Returns:
      As `interleaved.summary`.
    """
    rows = config.data.global_batch
    files = [f"{manifest.folder}/{shard.file}" for shard in manifest.splits["train"].shards]
    streams = {
        "mlm": train_batches(config, manifest, mesh, 0),
        "tf_tpu_example": tf_tpu_example.batches(files, length=manifest.length, rows=rows),
    }

    def drain(stream: Iterator) -> interleaved.Turn:
        def turn(calls: int) -> None:
            for _ in range(calls):
                next(stream)

        return turn

    columns = {name: drain(stream) for name, stream in streams.items()}
    return interleaved.summary(
        interleaved.measure("batches", columns, seconds, length=BATCH_TURN), rows * manifest.length
    )


def compare_loop(config: ConfigDict, manifest: Manifest, mesh: jax.sharding.Mesh, seconds: float) -> dict[str, Any]:
    """Measures the step with the batches of the run and with one batch again and again.

    Returns:
      As `interleaved.summary` of "real_batches" and "one_batch".
    """
    interleaved.say("loop: compiling")
    task = Pretraining.without_data(config, mesh, DatasetInfo.from_manifest(manifest))
    rows = config.data.global_batch
    stream = train_batches(config, manifest, mesh, 0)
    same = sharding.put_batch(next(stream), mesh, rows)
    state = task.init()

    def update(batch: dict[str, jax.Array]) -> jax.Array:
        nonlocal state
        state, metrics = task.train_step(state, batch)
        return metrics["loss"]

    columns = {
        "real_batches": waited(lambda: update(sharding.put_batch(next(stream), mesh, rows))),
        "one_batch": waited(lambda: update(same)),
    }
    return interleaved.summary(interleaved.measure("loop", columns, seconds), rows * manifest.length)
