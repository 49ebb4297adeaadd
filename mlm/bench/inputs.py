"""The parts of `bench` that need data: "shards", "batches" and "loop"."""

import concurrent.futures
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlm.bench import interleaved, tf_tpu_example
from mlm.bench.steps import repeated, updates
from mlm.cluster.engine import Spawn, open_engine
from mlm.data import mixture, sample, shards
from mlm.data.corpus import Corpus
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.tasks.pretraining import Pretraining, train_batches
from mlm.training import sharding

BATCH_INTERVALS = 3.0  # long timings, so that batches prefetched before them hardly matter
VALIDATION = 50  # one document in 50


def compare_shards(config: ConfigDict, tokenizer_folder: str, megabytes: float, seconds: float) -> dict[str, Any]:
    """Measures writing shards of documents of the corpus: ours from reading them on, the example's from memory.

    Returns `interleaved.summary` in "tokens" of the text, special ones and dropped ones included; each with its "rows".
    """
    interleaved.say(f"shards: reading {megabytes:g} MB of the corpus")
    texts = sample_texts(config, megabytes)
    splits = {"train": [text for n, text in enumerate(texts) if n % VALIDATION], "validation": texts[::VALIDATION]}
    process = concurrent.futures.ProcessPoolExecutor(1, Spawn())
    with tempfile.TemporaryDirectory(prefix="mlm-bench-") as folder, process as other:
        interleaved.say("shards: starting the TF-TPU example")
        other.submit(tf_tpu_example.prepare, splits, f"{folder}/documents").result()
        lines = (json.dumps({"text": text, "split": split}) + "\n" for split in splits for text in splits[split])
        Path(folder, "documents.jsonl").write_text("".join(lines), encoding="utf-8")
        length, tok, target = config.shards.length, {"tokenizer_folder": tokenizer_folder}, f"{folder}/shards"
        counts = {"train": config.shards.count, "validation": config.shards.validation_count}
        split = {"sources": (f"jsonl:{folder}/documents.jsonl",), "weights": (1.0,), "field": "text"}
        held_out, everything = (sum(len(text.encode()) for text in own) for own in (splits["validation"], texts))
        split |= {"group": "split", "validation_groups": ("validation",), "validation_fraction": held_out / everything}
        corpus = Corpus(**config.corpus.to_dict() | split | {"max_documents": 0})
        rows, tokens = {}, 0

        def ours(calls: int) -> None:
            nonlocal tokens
            with open_engine(workers=config.shards.workers) as engine:
                settings = shards.Settings(length, counts)
                made = shards.write(corpus, settings, folder=target, source="", engine=engine, **tok)
            rows["mlm"] = sum(split.records for split in made.splits.values())
            tokens = sum(split.records * length + split.dropped_tokens for split in made.splits.values())
            shutil.rmtree(target)

        def example(calls: int) -> None:
            write = functools.partial(tf_tpu_example.write_shards, length=length, **tok)
            rows["tf_tpu_example"] = other.submit(write, f"{folder}/documents", target).result()
            shutil.rmtree(target)

        rates = interleaved.measure("shards", {"mlm": ours, "tf_tpu_example": example}, seconds, calls=1)
    found = interleaved.summary(rates, tokens)
    for name, count in rows.items():
        found[name]["rows"] = count
    return found | {"tokens": tokens}


def sample_texts(config: ConfigDict, megabytes: float) -> list[str]:
    """Returns so many megabytes of training documents of the corpus."""
    with tempfile.TemporaryDirectory(prefix="mlm-bench-") as kept, open_engine(workers=config.shards.workers) as engine:
        return sample.draw(Corpus(**config.corpus.to_dict()), megabytes=megabytes, engine=engine, texts=kept)


def compare_batches(config: ConfigDict, manifest: Manifest, seconds: float) -> dict[str, Any]:
    """Measures the run's batches and those of the TF-TPU example from the same shards, without its masks."""
    rows = config.data.global_batch
    files = mixture.paths(manifest, "train")
    streams = {
        "mlm": train_batches(config, manifest, sharding.make_mesh(**config.mesh.to_dict()), 0),
        "tf_tpu_example": tf_tpu_example.batches(files, length=manifest.length, rows=rows),
    }
    candidates = {name: repeated(functools.partial(next, stream)) for name, stream in streams.items()}
    rates = interleaved.measure("batches", candidates, seconds, intervals=BATCH_INTERVALS)
    return interleaved.summary(rates, rows * manifest.length)


def compare_loop(
    config: ConfigDict, manifest: Manifest, seconds: float, pretraining: type[Pretraining] = Pretraining
) -> dict[str, Any]:
    """Measures the step on the batches of the run, "real_batches", and on "one_batch" reused."""
    interleaved.say("loop: compiling")
    task = pretraining.without_data(config, info=DatasetInfo.from_manifest(manifest), manifest=manifest)
    stream = train_batches(config, manifest, task.mesh, 0)
    put = functools.partial(sharding.put_batch, mesh=task.mesh, rows=config.data.global_batch)
    same, update = put(next(stream)), updates(task.train_step, task.init())
    candidates = {
        "real_batches": repeated(lambda: update(put(next(stream)))),
        "one_batch": repeated(lambda: update(same)),
    }
    return interleaved.summary(interleaved.measure("loop", candidates, seconds), task.tokens_read(1))
