"""The parts of `bench` that need data: "shards", "batches" and "loop"."""

import concurrent.futures
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlm import config as configs
from mlm.bench import interleaved, tf_tpu_example
from mlm.bench.steps import repeated, updates
from mlm.data import sample, shards
from mlm.data.corpus import Corpus
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.data.stages import make_stages
from mlm.engine.engine import Spawn, open_pool
from mlm.tasks.pretraining import Pretraining, train_batches
from mlm.text import say
from mlm.training import sharding

BATCH_INTERVALS = 3  # long timings, so that batches prefetched before them hardly matter
VALIDATION = 50  # one document in 50


def compare_shards(
    config: ConfigDict, tokenizer_folder: str, megabytes: float, seconds: float
) -> dict[str, Any]:
    """Measures writing shards of documents of the corpus: ours from reading them on, the example's from memory.

    Returns `interleaved.summary` in "tokens" of the text, special ones and dropped ones included;
    each with its "rows".
    """
    say(f"bench: shards: reading {megabytes:g} MB of the corpus")
    with (
        tempfile.TemporaryDirectory(prefix="mlm-bench-") as kept,
        open_pool(workers=config.shards.workers) as engine,
    ):
        corpus = Corpus.from_config(config.corpus)
        texts = sample.draw(corpus, megabytes=megabytes, engine=engine, texts=kept)
    splits = {
        "train": [text for n, text in enumerate(texts) if n % VALIDATION],
        "validation": texts[::VALIDATION],
    }
    length = config.shards.length
    process = concurrent.futures.ProcessPoolExecutor(1, Spawn())
    with tempfile.TemporaryDirectory(prefix="mlm-bench-") as folder, process as other:
        say("bench: shards: starting the TF-TPU example")
        other.submit(tf_tpu_example.prepare, splits, f"{folder}/documents").result()
        documents = Path(folder, "documents.jsonl")
        with documents.open("w", encoding="utf-8") as file:
            for split, column in splits.items():
                file.writelines(
                    json.dumps({"text": text, "split": split}) + "\n" for text in column
                )
        validation = sum(map(len, splits["validation"])) / sum(map(len, texts))
        ours = configs.replace(
            configs.load(str(configs.BASE), []),  # as the example, it leaves no document out
            {
                "corpus.sources": (f"jsonl:{documents}",),
                "corpus.group": "split",
                "corpus.validation_groups": ("validation",),
                "corpus.validation_fraction": validation,
            },
        )
        files = {"train": config.shards.count, "validation": config.shards.validation_count}
        target = f"{folder}/shards"
        rows = {}
        tokens = 0

        def write_ours(calls: int) -> None:
            nonlocal tokens
            with open_pool(workers=config.shards.workers) as engine:
                manifest = shards.write(
                    Corpus.from_config(ours.corpus),
                    shards.Settings(length, files),
                    tokenizer_folder=tokenizer_folder,
                    folder=target,
                    source=ours.corpus.to_dict(),
                    engine=engine,
                )
            counts = manifest.splits.values()
            rows["mlm"] = sum(split.records for split in counts)
            tokens = rows["mlm"] * length + sum(split.dropped_tokens for split in counts)
            shutil.rmtree(target)

        def write_example(calls: int) -> None:
            write = functools.partial(
                tf_tpu_example.write_shards, tokenizer_folder=tokenizer_folder, length=length
            )
            rows["tf_tpu_example"] = other.submit(write, f"{folder}/documents", target).result()
            shutil.rmtree(target)

        candidates = {"mlm": write_ours, "tf_tpu_example": write_example}
        rates = interleaved.measure("shards", candidates, seconds, calls=1)
    comparison = interleaved.summary(rates, tokens)
    for name, count in rows.items():
        comparison[name]["rows"] = count
    return comparison | {"tokens": tokens}


def compare_batches(config: ConfigDict, manifest: Manifest, seconds: float) -> dict[str, Any]:
    """Measures the run's batches and those of the TF-TPU example from the same shards, without its masks."""
    rows = config.data.global_batch
    stages = make_stages(config, manifest.splits["train"].records)
    files = manifest.paths("train")
    streams = {
        "mlm": train_batches(config, manifest, sharding.mesh_of(config.mesh), stages, start=0),
        "tf_tpu_example": tf_tpu_example.batches(files, length=manifest.length, rows=rows),
    }
    candidates = {
        name: repeated(functools.partial(next, stream)) for name, stream in streams.items()
    }
    rates = interleaved.measure("batches", candidates, seconds, intervals=BATCH_INTERVALS)
    return interleaved.summary(rates, rows * manifest.length * manifest.real_share)


def compare_loop(
    config: ConfigDict,
    manifest: Manifest,
    seconds: float,
    pretraining: type[Pretraining] = Pretraining,
) -> dict[str, Any]:
    """Measures the step on the batches of the run, "real_batches", and on "one_batch" reused."""
    say("bench: loop: compiling")
    task = pretraining.without_data(
        config, info=DatasetInfo.from_manifest(manifest), manifest=manifest
    )
    stream = task.batches(0)
    put = functools.partial(sharding.put_batch, mesh=task.mesh, rows=config.data.global_batch)
    same = put(next(stream))
    update = updates(task.train_step, task.init())
    candidates = {
        "real_batches": repeated(lambda: update(put(next(stream)))),
        "one_batch": repeated(lambda: update(same)),
    }
    return interleaved.summary(
        interleaved.measure("loop", candidates, seconds), task.tokens_read(1)
    )
