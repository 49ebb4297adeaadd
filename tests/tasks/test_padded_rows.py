"""Padded rows: loss, masks, scores, throughput and plan are of their real tokens; what does not fit is refused."""

import dataclasses
import itertools
import math
import shutil

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from scipy.special import log_softmax

from mlm import __main__, logs
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.errors import InputError
from mlm.model import attention
from mlm.report import summary
from mlm.tasks.pretraining import Pretraining
from mlm.workdir import Workdir
from tests.support.corpora import LENGTH, shard_rows, write_shards
from tests.support.refusals import refuse
from tests.support.tiny import TINY, command, tiny_config

CLS = 0
STEPS = 6
ROWS = 16


@pytest.fixture(scope="module")
def shards(texts, tokenizer_folder, tmp_path_factory) -> dict[str, Manifest]:
    folder = tmp_path_factory.mktemp("padded")
    kinds = ("lines", "documents")
    return {
        kind: write_shards(texts[:400], folder / kind, tokenizer_folder, rows=kind)
        for kind in kinds
    }


def settings(manifest: Manifest, *overrides: str) -> tuple[str, ...]:
    steps = f"train.steps={STEPS}"
    return (f"shards.dir={manifest.folder}", "data.lanes=2", steps, "log.every=1", *overrides)


@pytest.fixture(scope="module", params=["lines", "documents"])
def ran(
    request, one_device, shards, tokenizer_folder, tmp_path_factory
) -> tuple[Manifest, Workdir, ConfigDict]:
    """A run on lines, or on packed documents that don't see one another; and its config."""
    kind = request.param
    folder = tmp_path_factory.mktemp("ran") / "run"
    manifest = shards[kind]
    shutil.copytree(tokenizer_folder, folder / "tokenizer")
    overrides = settings(
        manifest,
        f"shards.rows={kind}",
        f"data.isolate_documents={kind == 'documents'}",
        "model.init_stddev=0.2",  # so large that who attends to whom changes a loss
    )
    assert __main__.main(command("train", folder, *TINY, *overrides)) == 0
    return manifest, Workdir(str(folder)), tiny_config(*overrides)


@pytest.mark.standard
def test_the_loss_is_that_of_each_document_alone_without_padding(ran):
    """The first step's, of the same masks: each document is a batch of its own, as long as it is."""
    manifest, workdir, config = ran
    task = Pretraining.open(config, workdir, manifest)
    total = 0.0
    batch = next(task.batches(0))
    params = task.initial_state().params
    # for one document of any length
    compute = dataclasses.replace(task.module.compute, attend=attention.xla, cls_id=None)
    module = task.module.clone(compute=compute)
    alone = {}
    # by number, padding is -1
    rows = np.concatenate(shard_rows(manifest, "train"))[batch["record_id"]]
    real_ids = np.where(batch["attention_mask"], batch["input_ids"], -1)
    assert np.array_equal(real_ids, rows) and (rows < 0).any()
    masked = jax.device_get(task.inputs(batch, 0))
    columns = (masked.ids_BxL, masked.positions_BxK, masked.labels_BxK, masked.weights_BxK)
    for row, ids, positions, labels, weights in zip(rows, *columns, strict=True):
        real = int((row >= 0).sum())
        predicted = positions[weights > 0]
        ordinary = np.flatnonzero(row > 4)
        assert np.isin(predicted, ordinary).all(), "never padding, never a special token"
        assert math.floor(0.2 * len(ordinary)) <= len(predicted) <= math.ceil(0.2 * len(ordinary))
        for start, stop in itertools.pairwise([*np.flatnonzero(row == CLS), real]):
            inside = (positions >= start) & (positions < stop) & (weights > 0)
            places = np.where(inside, positions - start, 0)
            answers = np.where(inside, labels, -1)
            alone.setdefault(stop - start, []).append((ids[start:stop], places, answers))
    for documents in alone.values():  # those of one length in one batch
        ids_NxT, places_NxK, answers_NxK = map(np.stack, zip(*documents, strict=True))
        logits = jax.jit(module.logits)(params, ids_NxT, np.ones_like(ids_NxT), places_NxK)
        probs = log_softmax(np.asarray(logits, np.float32)[..., : manifest.vocab_size], axis=-1)
        total -= float(np.sum(probs[answers_NxK >= 0, answers_NxK[answers_NxK >= 0]]))
    line = logs.read(workdir.metrics, "train")[0]
    assert line["loss"] == pytest.approx(total / masked.weights_BxK.sum(), rel=1e-5)


@pytest.mark.standard
def test_tokens_are_real_ones(ran):
    """By hand: the mean of the rows in the shards, times the rows of the steps; bits a byte are of whole documents."""
    manifest, workdir, config = ran
    real = np.mean([(row >= 0).sum() for row in np.concatenate(shard_rows(manifest, "train"))])
    assert real == pytest.approx(LENGTH * manifest.real_share) and real < LENGTH
    task = Pretraining.open(config, workdir, manifest)
    assert task.tokens_read(9) == round(9 * ROWS * real)
    run = summary.gather(workdir, config)
    assert run.tokens(STEPS) == round(STEPS * ROWS * real)
    split = manifest.splits["validation"]
    line = logs.read(workdir.metrics, "eval")[-1]
    bits_per_token = line["loss"] / math.log(2)
    assert line["bits_per_byte"] == pytest.approx(bits_per_token * split.tokens / split.text_bytes)


def test_useful_flops_are_of_real_tokens(shards):
    """A row half of padding has less than half of the FLOPs: its tokens attend to fewer others."""
    info = DatasetInfo.from_manifest(shards["lines"])
    one, other = (
        Pretraining(tiny_config(), dataclasses.replace(info, real_share=share))
        for share in (1.0, 0.5)
    )
    assert (one.tokens_read(10), other.tokens_read(10)) == (10 * ROWS * LENGTH, 5 * ROWS * LENGTH)
    assert 0.4 < other.useful_flops(10) / one.useful_flops(10) < 0.5


def test_other_rows_than_the_config_s_are_refused(shards, manifest, tmp_path, capsys):
    """By one sentence with both, before anything is written."""
    lines = shards["lines"]
    for made, asked, there in (
        (manifest, "lines", "concatenated"),
        (lines, "documents", "lines"),
    ):
        overrides = settings(made, f"shards.rows={asked}")
        arguments = command("train", tmp_path / "run", *TINY, *overrides)
        refuse(arguments, 2, f"shards.rows = {asked}", made.folder, there, capsys=capsys)
    assert not (tmp_path / "run").exists()
    for key, value in (("data.short_length", 16), ("data.mixture", ((lines.folder, 1.0),))):
        with pytest.raises(InputError, match=rf"shards\.rows.*concatenated.*{key}"):
            tiny_config("shards.rows=lines", f"{key}={value}")
