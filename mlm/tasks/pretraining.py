"""Pretraining, as a task of the loop: the batches of the shards, the evaluation of a split, the first state."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlm.cluster import watch
from mlm.data import batches, skip_batches, tokenizer
from mlm.data.manifest import Manifest
from mlm.monitor import metrics_hooks
from mlm.pretrained import load, warm_start
from mlm.training import build, evaluation, loop, sharding
from mlm.training.state import TrainState
from mlm.training.task import Task
from mlm.workdir import Workdir


def train(config: ConfigDict, workdir: Workdir, manifest: Manifest) -> dict[str, float]:
    """Pretrains on the shards of `manifest`; returns the last scores, and raises as `loop.run_task`."""
    return loop.run_task(config, workdir, build_task(config, workdir, manifest))


def build_task(config: ConfigDict, workdir: Workdir, manifest: Manifest) -> Task:
    """Returns the masked-language-model task of a config; raises InputError where config and shards don't fit."""
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    facts = facts_of(manifest)
    run = build.build_run(config, facts, mesh, starts_V=word_starts(config, workdir))
    sharding.check_batch(mesh, rows=config.evaluate.batch, key="evaluate.batch")

    def flops_of(step: int) -> float:
        length = config.data.short_length if step <= run.short_steps else facts.length
        return build.flops_per_token(config, facts, length=length)

    return Task(
        mesh=mesh,
        steps=run.steps,
        shapes=run.shapes,
        step_of=run.step_of,
        fresh=lambda: fresh_state(config, manifest, run, workdir),
        listen=lambda log: metrics_hooks.attach(log, config, workdir, manifest, run.steps),
        batches=lambda start: train_batches(config, manifest, mesh, start),
        evaluate=lambda params: evaluate_split(config, manifest, mesh, run.eval_step, params, "validation"),
        ends_epoch=lambda step: False,
        badness=lambda scores: scores["loss"],
        facts=dataclasses.asdict(facts) | {"model": run.model.config.to_dict()},
        data_fingerprint=manifest.fingerprint,
        tokens_per_step=config.data.global_batch * facts.length,
        flops_per_token=flops_of,
    )


def train_batches(config: ConfigDict, manifest: Manifest, mesh: Mesh, start: int) -> Iterator[dict[str, np.ndarray]]:
    """Returns this host's rows of the batches that the updates after `start` consume."""
    rows = config.data.global_batch

    def open_at(before: int) -> Iterator[dict[str, np.ndarray]]:
        return batches.train_batches(
            manifest,
            split="train",
            seed=config.data.seed,
            global_batch=rows,
            lanes=config.data.lanes,
            start_step=before,
            rows=sharding.local_rows(mesh, rows),
        )

    return skip_batches.follow(open_at, skip_batches.parse(config.data.skip_batches), start)


def evaluate_split(
    config: ConfigDict, manifest: Manifest, mesh: Mesh, eval_step: Callable, params: Any, split: str
) -> dict[str, float]:
    """Returns the scores of a split (see `evaluation.score`)."""
    rows = config.evaluate.batch
    facts = manifest.splits[split]
    return evaluation.score(
        eval_step,
        params,
        watch.beats(batches.eval_batches(manifest, split=split, batch=rows, rows=sharding.local_rows(mesh, rows))),
        mesh=mesh,
        rows=rows,
        tokens_per_byte=facts.tokens / facts.text_bytes if facts.text_bytes else None,
    )


def facts_of(manifest: Manifest) -> build.DataFacts:
    """Returns what the model needs to know of the data."""
    return build.DataFacts(
        vocab_size=manifest.vocab_size,
        special_ids=dict(manifest.special_ids),
        all_special_ids=tuple(manifest.all_special_ids),
        length=manifest.length,
        records=manifest.splits["train"].records,
    )


def word_starts(config: ConfigDict, workdir: Workdir) -> np.ndarray | None:
    """Returns which tokens of the workdir's tokenizer start a word, where config.masking.kind asks for it.

    Raises:
      InputError: there is no tokenizer, or it can't be told of it.
    """
    kind = config.masking.kind
    if kind == "token":
        return None
    return tokenizer.word_starts(str(workdir.tokenizer), key=f"config.masking.kind = {kind}")


def fresh_state(config: ConfigDict, manifest: Manifest, run: build.Run, workdir: Workdir) -> TrainState:
    """Returns the state before the first update, as config.model.init or config.train.init_from says."""
    if config.train.init_from:
        return _started(config, manifest, run, workdir)
    if config.model.init == "stock":
        return run.init()
    counts_V = np.zeros(run.model.config.vocab_size, np.float32)
    counts_V[: manifest.vocab_size] = batches.count_tokens(manifest, split="train")
    return run.init(counts_V)


def _started(config: ConfigDict, manifest: Manifest, run: build.Run, workdir: Workdir) -> TrainState:
    """Returns a fresh state whose parameters are those of train.init_from, as far as it has them."""
    source = load.load(config.train.init_from, head=None, flag=load.INIT_FROM)
    warm_start.refuse_another_model(source, run.model.config)
    taken, lines = warm_start.fit(
        source,
        {name: leaf.shape for name, leaf in sharding.named_leaves(run.shapes.params)},
        pad_id=run.model.config.pad_token_id,
        vocab_size=manifest.vocab_size,
        tokenizer_folder=str(workdir.tokenizer) if (workdir.tokenizer / "tokenizer.json").is_file() else None,
    )
    if jax.process_index() == 0:
        print("\n".join(lines), file=sys.stderr, flush=True)
    state = run.init()
    ema = None if state.ema is None else warm_start.start(state.ema, taken)
    return state.replace(params=warm_start.start(state.params, taken), ema=ema)
