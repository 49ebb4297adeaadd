"""What pretraining reads: batches, the splits that are scored, what a checkpoint is to know of them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm.data import batches, mixture, tokenizer
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.data.stages import Stages
from mlm.model.module import Params
from mlm.training import evaluation, sharding
from mlm.workdir import Workdir


def train_batches(
    config: ConfigDict, manifest: Manifest, mesh: Mesh, stages: Stages, *, start: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this host's rows of the batches after step `start`."""
    for stage in stages.between(start + 1):
        stream = batches.train_batches(
            manifest,
            split="train",
            seed=config.data.seed,
            lanes=config.data.lanes,
            global_batch=stage.rows,
            start_row=stage.rows_before,
            rows=sharding.local_rows(mesh, stage.rows),
        )
        yield from itertools.islice(stream, stage.count)


def score_split(
    config: ConfigDict, manifest: Manifest, mesh: Mesh, eval_step: Callable, params: Params, split: str
) -> dict[str, float]:
    """Returns the scores of a split, the mean of a mixture's folders; those of its sets are "NAME/loss" and so on."""
    folders = mixture.parts(manifest)
    sets = {} if split == "train" else manifest.sets
    sets = {name: folder for name, folder in sets.items() if split in folder.splits}
    rows, scores = config.evaluate.batch, {}
    for data in (*(folder.manifest for folder in folders), *sets.values()):
        if data.folder in scores:
            continue
        scores[data.folder] = evaluation.score(
            eval_step,
            params,
            batches.eval_batches(data, split=split, batch=rows, rows=sharding.local_rows(mesh, rows)),
            mesh=mesh,
            rows=rows,
            tokens_per_byte=_tokens_per_byte(data, split),
            draws=config.evaluate.draws,
        )
    mean = evaluation.mean(
        [folder.share for folder in folders],
        [scores[folder.manifest.folder] for folder in folders],
        [_tokens_per_byte(folder.manifest, split) for folder in folders],
    )
    of_sets = {f"{name}/{key}": score for name, data in sets.items() for key, score in scores[data.folder].items()}
    return mean | of_sets


def _tokens_per_byte(manifest: Manifest, split: str) -> float | None:
    counts = manifest.splits[split]
    return counts.tokens / counts.text_bytes if counts.text_bytes else None


def dataset_info(manifest: Manifest) -> DatasetInfo:
    """Returns what a checkpoint is to know of the data: of a mixture, its folders and shares, too."""
    folders = tuple(
        {"name": name, "share": share, "records": data.splits["train"].records, "fingerprint": data.fingerprint}
        for name, share, data in mixture.parts(manifest)
    )
    return dataclasses.replace(DatasetInfo.from_manifest(manifest), mixture=folders if len(folders) > 1 else ())


def word_starts(config: ConfigDict, workdir: Workdir) -> np.ndarray | None:
    """Returns which tokens of the workdir's tokenizer start a word, or None if config.masking.kind needs no words."""
    kind, folder = config.masking.kind, str(workdir.tokenizer)
    return None if kind == "token" else tokenizer.word_starts(folder, key=f"config.masking.kind = {kind}")
